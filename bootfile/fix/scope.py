"""Tell by which name an object can be reached at a place, and whether it is bound there in each case."""

import ast
import dataclasses
from typing import Any

from bootfile.fix.places import CannotEdit
from bootfile.lint.facts import Facts
from bootfile.lint.record import Binding
from bootfile.lint.sources import FUNCTIONS, is_main_test, list_above, unparse
from bootfile.lint.values import Value, root

_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
PLAIN = (
    ast.Name, ast.Attribute, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.expr_context,
    ast.cmpop, ast.boolop, ast.unaryop,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Reach:
    """A name of an object at a place. guard: a test that tells whether the object exists, "" if it does in
    each case."""

    name: str
    guard: str = ""


class Scope:
    """The names of a script, in the modules that lint has read."""

    def __init__(self, facts: Facts):
        self.facts = facts
        self.parents = {source.path: source.parents() for source in facts.sources}
        self.trees = {source.path: source.tree for source in facts.sources}

    # Places

    def above(self, path: str, node: ast.AST) -> list[Any]:
        """Return the nodes around a node, from the inside."""
        return list_above(node, self.parents[path])

    def function(self, path: str, node: ast.AST) -> Any:
        """Return the function around a node; None at the top of a module."""
        return next((part for part in self.above(path, node) if isinstance(part, FUNCTIONS)), None)

    def cls(self, path: str, node: ast.AST) -> Any:
        """Return the class around a node; None outside of classes."""
        return next((part for part in self.above(path, node) if isinstance(part, ast.ClassDef)), None)

    def statement(self, path: str, node: ast.AST) -> Any:
        """Return the innermost statement with a node."""
        around = [node, *self.above(path, node)]
        return next(part for part in around if isinstance(part, ast.stmt))

    def block(self, path: str, statement: ast.stmt) -> list[ast.stmt]:
        """Return the statements of the block with a statement."""
        around: Any = self.parents[path][statement]
        for name in ("body", "orelse", "finalbody"):
            block = getattr(around, name, None)
            if isinstance(block, list) and statement in block:
                return block
        return [statement]

    # Names

    def reach(self, value: Value, path: str, node: ast.AST, used: str = "", loop: Any = None) -> Reach:
        """Return a name of an object at a node of a module. used: the tests under which the loop uses the
        object. loop: one that uses it in each pass, so that it is bound there. Raises CannotEdit if there is
        none that is bound in each case, and is not bound again."""
        base, reason = root(value), ""
        function, cls = self.function(path, node), self.cls(path, node)
        for binding in self._list_bindings(base, path, function, cls):
            try:
                return self._check(base, binding, path, node, used, loop)
            except CannotEdit as error:
                reason = reason or str(error)
        where = f"{function.name}()" if function is not None else "the script"
        raise CannotEdit(reason or f"{base.label or base.kind} has no name in {where}")

    def _list_bindings(self, base: Value, path: str, function: Any, cls: Any) -> list[Binding]:
        """Return the bindings of an object that a place may see: those of its function first."""
        visible: list[Binding] = []
        for binding in self.facts.tracer.bound:
            is_of_object = binding.path == path and root(binding.value) is base
            if is_of_object and self._is_visible(binding, function, cls):
                visible.append(binding)
        # the bare object before its wrapper, whose state has other names
        visible.sort(key=lambda binding: (binding.function is not function, binding.value.kind == "wrapped"))
        by_name: dict[str, Binding] = {}
        for binding in visible:
            by_name.setdefault(binding.name, binding)
        return list(by_name.values())

    def _is_visible(self, binding: Binding, function: Any, cls: Any) -> bool:
        """Return whether a binding has a plain name in a function, in its module or in its class."""
        if not binding.name.replace(".", "").isidentifier():
            return False
        if binding.function is function or binding.function is None:
            return True
        is_attribute = binding.name.startswith("self.") and cls is not None
        return is_attribute and self.cls(binding.path, binding.node) is cls

    def _check(self, base: Value, binding: Binding, path: str, node: ast.AST, used: str, loop: Any) -> Reach:
        """Return how the name of a binding reaches an object at a node. Raises CannotEdit if it does not."""
        name = binding.name
        same = self._same_name(binding, path)
        of_object = [other for other in same if root(other.value) is base]
        of_others = [other for other in same if root(other.value) is not base]
        function = binding.function if "." in name else self.function(path, node)
        if binding.function is None and function is not None and name in list_local(function):
            raise CannotEdit(f"{name} has another meaning in {function.name}()")
        # what the name was before does not matter if a statement with the object always runs
        is_last = all(other.order < binding.order for other in of_others)
        statements = {other.node for other in of_object}
        is_object = is_last and not any(map(_may_be_none, of_object))
        if is_object and self.is_bound(name, path, node, binding.function, statements):
            return Reach(name)
        is_used = loop in (node, *self.above(path, node)) and self.function(path, loop) is binding.function
        if is_object and is_used:
            return Reach(name)
        if any(root(other.value).kind != "none" for other in of_others):
            raise CannotEdit(f"{name} is also the name of another object")
        if self.is_bound(name, path, node, binding.function):
            return Reach(name, f"{name} is not None")
        test = self._find_test(binding, path, node)
        if test and test in used:
            return Reach(name, test)
        raise CannotEdit(f"{name} may not be bound in line {getattr(node, 'lineno', 0)}")

    def _same_name(self, binding: Binding, path: str) -> list[Binding]:
        """Return all bindings of a name in its function, or of an attribute in its class."""
        bound = self.facts.tracer.bound
        same = [other for other in bound if other.name == binding.name and other.path == path]
        if "." in binding.name:
            cls = self.cls(path, binding.node)
            return [other for other in same if self.cls(path, other.node) is cls]
        return [other for other in same if other.function is binding.function]

    def _find_test(self, binding: Binding, path: str, node: ast.AST) -> str:
        """Return the test under which an object is made, if it is the only one, and can be asked again."""
        statement = self.statement(path, binding.node)
        around: Any = self.parents[path][statement]
        is_test = isinstance(around, ast.If) and statement in around.body
        if not is_test or not all(isinstance(part, PLAIN) for part in ast.walk(around.test)):
            return ""
        names = {part.id for part in ast.walk(around.test) if isinstance(part, ast.Name)}
        # the test is asked where the object is used: its names mean the same only in the same function
        is_here = self.function(path, node) is binding.function or names <= {"self"}
        is_after = self._comes_after(path, around, node)
        return unparse(around.test) if is_here and is_after else ""

    def _comes_after(self, path: str, first: ast.stmt, node: ast.AST) -> bool:
        """Return whether a node is in a statement that follows another one in its block."""
        block = self.block(path, first)
        later = block[block.index(first) + 1 :] if first in block else []
        return any(part in later for part in [node, *self.above(path, node)])

    # Is it bound?

    def is_bound(self, name: str, path: str, node: ast.AST, function: Any, by: Any = None) -> bool:
        """Return whether a name is bound at a node, whatever way leads there. function: the one that binds
        it; None for a name of the module. by: the statements that count; all if it is None."""
        self._by = by
        here = self.function(path, node)
        if function is not here and function is None:
            return any(self._binds(part, name, None) for part in self.trees[path].body)
        if "." in name and self._is_made(name, path, node):
            return True
        if function is not here:
            return False
        is_parameter = here is not None and name in _list_parameters(here)
        if is_parameter and (by is None or any(isinstance(statement, ast.arg) for statement in by)):
            return True
        return self._is_bound_before(name, path, node)

    def _is_bound_before(self, name: str, path: str, node: ast.AST) -> bool:
        """Return whether a statement before a node, or around it, binds a name in the same function."""
        cls = self.cls(path, node)
        inner: Any = self.statement(path, node)
        for outer in self.above(path, inner):
            # `for name in ...:`, `with ... as name:`
            if inner in getattr(outer, "body", []) and name in _targets(outer):
                return True
            if isinstance(inner, ast.stmt):
                block = self.block(path, inner)
                before = block[: block.index(inner)]
                if any(self._binds(statement, name, cls) for statement in before):
                    return True
            if isinstance(outer, FUNCTIONS):
                return False
            inner = outer
        return False

    def _is_made(self, name: str, path: str, node: ast.AST) -> bool:
        """Return whether __init__() of the class makes an attribute in each case."""
        cls = self.cls(path, node)
        for function in getattr(cls, "body", []):
            if isinstance(function, FUNCTIONS) and function.name == "__init__":
                is_inside = self.function(path, node) is function
                parts = _before_return(function.body)
                return not is_inside and any(self._binds(part, name, cls) for part in parts)
        return False

    def _binds(self, statement: Any, name: str, cls: Any, inside: tuple[str, ...] = ()) -> bool:
        """Return whether a statement binds a name in each case. Only the statements of is_bound(by=...)
        count. inside: the methods of `cls` whose calls have led here."""

        def any_of(block: list[Any], inside: tuple[str, ...] = inside) -> bool:
            return any(self._binds(part, name, cls, inside) for part in block)

        if isinstance(statement, ast.If):
            if is_main_test(statement.test):
                return any_of(statement.body)
            return all(any_of(part) or _leaves(part) for part in (statement.body, statement.orelse))
        if isinstance(statement, ast.With):
            is_suppressed = any("suppress" in unparse(item.context_expr) for item in statement.items)
            return name in _targets(statement) or (not is_suppressed and any_of(statement.body))
        if isinstance(statement, ast.Try):
            handlers = all(any_of(part.body) or _leaves(part.body) for part in statement.handlers)
            return any_of(statement.finalbody) or (handlers and any_of([*statement.body, *statement.orelse]))
        # `self.build_optimizer()` in __init__()
        called = _called_method(statement)
        if called and cls is not None and "." in name:
            if called in inside:  # it calls itself: what else it does decides
                return False
            methods = [part for part in cls.body if isinstance(part, FUNCTIONS) and part.name == called]
            return any(any_of(_before_return(method.body), (*inside, called)) for method in methods)
        return name in _targets(statement) and (self._by is None or statement in self._by)


def _called_method(statement: Any) -> str:
    """Return the method that a statement such as `self.build()` calls; "" for other statements."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return ""
    holder, _, name = unparse(statement.value.func).partition(".")
    return name if holder == "self" else ""


def _before_return(body: list[Any]) -> list[Any]:
    """Return the statements of a function that each call of it runs: those before the first `return`."""
    returns = [any(isinstance(node, ast.Return) for node in ast.walk(part)) for part in body]
    return body[: returns.index(True)] if True in returns else body


def _leaves(block: list[Any]) -> bool:
    """Return whether nothing after a block runs once it has run."""
    return bool(block) and isinstance(block[-1], _LEAVES)


def _targets(statement: Any) -> list[str]:
    """Return the names that a statement itself binds."""
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target] if statement.value is not None else []
    elif isinstance(statement, ast.For):
        targets = [statement.target]
    elif isinstance(statement, ast.With):
        targets = [item.optional_vars for item in statement.items if item.optional_vars is not None]
    else:
        return []
    names: list[str] = []
    for target in targets:
        names += map(unparse, getattr(target, "elts", None) or [target])
    return names


def _may_be_none(binding: Binding) -> bool:
    """Return whether the expression that binds a name, or the default of a parameter, may be None."""
    node = binding.node
    value = getattr(node, "value", None)
    choices: list[ast.expr | None] = []
    if isinstance(node, ast.arg):
        choices = [_find_default(binding.function.args, node)]
    elif isinstance(value, ast.IfExp):
        choices = [value.body, value.orelse]
    return any(isinstance(choice, ast.Constant) and choice.value is None for choice in choices)


def _find_default(arguments: ast.arguments, parameter: ast.arg) -> ast.expr | None:
    """Return the default of a parameter; None if it has none."""
    positional = [*arguments.posonlyargs, *arguments.args]
    without = [None] * (len(positional) - len(arguments.defaults))
    defaults = [*without, *arguments.defaults, *arguments.kw_defaults]
    places = zip([*positional, *arguments.kwonlyargs], defaults, strict=True)
    return next((default for other, default in places if other is parameter), None)


def _list_parameters(function: Any) -> set[str]:
    """Return the names of the parameters of a function."""
    return {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}


def list_local(function: Any) -> set[str]:
    """Return the names that are local to a function."""
    local, shared = _list_parameters(function), set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            local.add(node.id)
        elif isinstance(node, ast.Global):
            shared.update(node.names)
    return local - shared

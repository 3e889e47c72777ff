"""Tell by which name an object can be reached at a place, whether it is bound there in each case, and whether
what comes in between may change it.

A name counts as bound if a plain assignment, a parameter, a loop, or both branches of an `if` bind it; what
`try`, `with` and nested helpers of a class bind does not count.
"""

import ast
import re
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from bootfile.fix.edits import CannotEdit, require
from bootfile.lint.facts import Facts
from bootfile.lint.record import Binding
from bootfile.lint.sources import FUNCTIONS, is_main_test, list_above, unparse
from bootfile.lint.values import Value, root

_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
PLAIN = (
    ast.Name, ast.Attribute, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.expr_context,
    ast.cmpop, ast.boolop, ast.unaryop,
)  # fmt: skip


class Reach(NamedTuple):
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
        return next(part for part in [node, *self.above(path, node)] if isinstance(part, ast.stmt))

    def block(self, path: str, statement: ast.stmt) -> list[ast.stmt]:
        """Return the statements of the block with a statement."""
        around = self.parents[path][statement]
        blocks: list[Any] = [getattr(around, name, None) for name in ("body", "orelse", "finalbody")]
        found = [block for block in blocks if isinstance(block, list) and statement in block]
        return [*found, [statement]][0]

    # Names

    def shared(self, path: str) -> set[str]:
        """Return the global names that functions of a module set."""
        return {name for node in self.facts.nodes(path, ast.Global) for name in node.names}

    def reach(self, value: Value, path: str, node: ast.AST) -> Reach:
        """Return a name of an object at a node of a module. Raises CannotEdit if there is none that is bound
        in each case, and is not bound again."""
        base, reason = root(value), ""
        function = self.function(path, node)
        for binding in self._list_bindings(base, path, node):
            try:
                return self._check(base, binding, path, node)
            except CannotEdit as error:
                reason = reason or str(error)
        where = f"{function.name}()" if function is not None else "the script"
        raise CannotEdit(reason or f"{base.label or base.kind} has no name in {where}")

    def _list_bindings(self, base: Value, path: str, node: ast.AST) -> list[Binding]:
        """Return the bindings of an object that a place may see, one of each name: those of its function
        first."""
        function, cls = self.function(path, node), self.cls(path, node)
        bound = [one for one in self.facts.tracer.bound if one.path == path and root(one.value) is base]
        bound = [one for one in bound if one.name.replace(".", "").isidentifier()]
        # the bare object before its wrapper, whose state has other names
        bound.sort(key=lambda binding: (binding.function is not function, binding.value.kind == "wrapped"))
        by_name: dict[str, Binding] = {}
        for one in bound:
            is_attribute = one.name.startswith("self.") and cls is not None
            if one.function in (function, None) or (is_attribute and self.cls(path, one.node) is cls):
                by_name.setdefault(one.name, one)
        return [*by_name.values()]

    def _check(self, base: Value, binding: Binding, path: str, node: ast.AST) -> Reach:
        """Return how the name of a binding reaches an object at a node. Raises CannotEdit if it does not."""
        name, home = binding.name, binding.function
        same = self._same_name(binding, path)
        of_object = [other for other in same if root(other.value) is base]
        of_others = [other for other in same if root(other.value) is not base]
        function = home if "." in name else self.function(path, node)
        is_hidden = home is None and function is not None and name in list_local(function)
        require(not is_hidden, f"{name} has another meaning in {getattr(function, 'name', '')}()")
        # what the name was before does not matter if a statement with the object always runs
        is_last = all(other.order < binding.order for other in of_others)
        statements = {other.node for other in of_object}
        is_object = is_last and not any(map(_may_be_none, of_object))
        # the loop uses an object in each pass that is made before it: it is bound there
        events = self.facts.in_training("step", "method", "call")
        uses = [event for event in events if root(event.value) is base]
        loop: Any = self.facts.loops[0].node if self.facts.loops else None
        is_used = any(not event.conditions[event.loops[0].depth :] for event in uses)
        is_used = is_used and loop in (node, *self.above(path, node)) and self.function(path, loop) is home
        is_used = is_used and loop not in self.above(path, binding.node)
        if is_object and (is_used or self.is_bound(name, path, node, home, statements)):
            return Reach(name)
        is_its_own = all(root(other.value).kind == "none" for other in of_others)
        require(is_its_own, f"{name} is also the name of another object")
        if self.is_bound(name, path, node, home):
            return Reach(name, f"{name} is not None")
        test = self._find_test(binding, path, node)
        used = " ".join(event.describe_conditions() for event in uses[:1])
        require(test and test in used, f"{name} may not be bound in line {getattr(node, 'lineno', 0)}")
        return Reach(name, test)

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
        block = self.block(path, around)
        later = block[block.index(around) + 1 :]
        is_after = any(part in later for part in [node, *self.above(path, node)])
        return unparse(around.test) if is_here and is_after else ""

    def may_change(self, path: str, parts: Collection[ast.AST], between: Collection[ast.AST]) -> bool:
        """Return whether nodes set what the parts of an expression read, or may change it by a call: that of
        an object that it gets, or whose method it is, and of a global name of the file."""
        stored = [node for node in between if isinstance(getattr(node, "ctx", None), ast.Store)]
        calls = [node for node in between if isinstance(node, ast.Call)]
        calls = [call for call in calls if unparse(call.func) not in ("print", "torch.save")]
        touched = _list_names(calls) | {re.split(r"[.\[]", unparse(node))[0] for node in stored}
        held = [part for part in parts if isinstance(part, ast.Attribute | ast.Subscript)]
        names = {part.id for part in parts if isinstance(part, ast.Name)}
        is_set = not {*map(unparse, stored)}.isdisjoint(map(unparse, parts))
        return bool(is_set or _list_names(held) & touched or (calls and names & self.shared(path)))

    # Is it bound?

    def is_bound(self, name: str, path: str, node: ast.AST, function: Any, by: Any = None) -> bool:
        """Return whether a name is bound at a node, whatever way leads there. function: the one that binds
        it; None for a name of the module. by: the statements that count; all if it is None."""
        here = self.function(path, node)
        if function is not here and function is None:
            return any(_binds(part, name, None, by) for part in self.trees[path].body)
        if "." in name and self._is_made(name, path, node, by):
            return True
        is_parameter = here is not None and name in _list_parameters(here)
        is_given = is_parameter and (by is None or any(isinstance(statement, ast.arg) for statement in by))
        return function is here and (is_given or self._is_bound_before(name, path, node, by))

    def _is_bound_before(self, name: str, path: str, node: ast.AST, by: Any) -> bool:
        """Return whether a statement before a node, or around it, binds a name in the same function."""
        cls = self.cls(path, node)
        inner: Any = self.statement(path, node)
        for outer in self.above(path, inner):
            # `for name in ...:`
            if inner in getattr(outer, "body", []) and name in _targets(outer):
                return True
            if isinstance(inner, ast.stmt):
                block = self.block(path, inner)
                if any(_binds(statement, name, cls, by) for statement in block[: block.index(inner)]):
                    return True
            if isinstance(outer, FUNCTIONS):
                return False
            inner = outer
        return False

    def _is_made(self, name: str, path: str, node: ast.AST, by: Any) -> bool:
        """Return whether __init__() of the class makes an attribute in each case."""
        cls = self.cls(path, node)
        methods = [part for part in getattr(cls, "body", []) if isinstance(part, FUNCTIONS)]
        first = next((method for method in methods if method.name == "__init__"), None)
        if first is None or self.function(path, node) is first:
            return False
        return any(_binds(part, name, cls, by) for part in _before_return(first.body))


def _binds(statement: Any, name: str, cls: Any, by: Any) -> bool:
    """Return whether a statement binds a name in each case. cls: the class whose methods it may call. by: the
    statements that count; all if it is None."""
    if isinstance(statement, ast.If):
        bodies = (statement.body, statement.orelse)
        found = [any(_binds(part, name, cls, by) for part in body) for body in bodies]
        # another file that imports this one does not run `raise SystemExit(main())`
        is_all = all(one or _leaves(body) for one, body in zip(found, bodies, strict=True))
        return found[0] if is_main_test(statement.test) else is_all
    # `self.build_optimizer()` in __init__()
    if cls is not None and "." in name and isinstance(statement, ast.Expr):
        called = re.match(r"self\.(\w+)\(", unparse(statement.value))
        methods = [part for part in cls.body if called and getattr(part, "name", "") == called[1]]
        return any(_binds(part, name, None, by) for one in methods for part in _before_return(one.body))
    return name in _targets(statement) and (by is None or statement in by)


def _before_return(body: list[Any]) -> list[Any]:
    """Return the statements of a function that each call of it runs: those before the first `return`."""
    returns = [any(isinstance(node, ast.Return) for node in ast.walk(part)) for part in body]
    return body[: returns.index(True)] if True in returns else body


def _leaves(block: list[Any]) -> bool:
    """Return whether nothing after a block runs once it has run."""
    return bool(block) and isinstance(block[-1], _LEAVES)


def _targets(statement: Any) -> list[str]:
    """Return the names that an assignment or a `for` binds."""
    if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.For):
        return []
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    is_bare = isinstance(statement, ast.AnnAssign) and statement.value is None
    parts = [part for target in targets for part in getattr(target, "elts", None) or [target]]
    return [] if is_bare else [*map(unparse, parts)]


def _may_be_none(binding: Binding) -> bool:
    """Return whether the expression that binds a name, or the default of a parameter, may be None."""
    node = binding.node
    value = getattr(node, "value", None)
    choices: list[Any] = [value.body, value.orelse] if isinstance(value, ast.IfExp) else []
    if isinstance(node, ast.arg):
        given = binding.function.args
        positional = [*given.posonlyargs, *given.args][::-1]
        pairs = [*zip(positional, given.defaults[::-1], strict=False)]
        pairs += zip(given.kwonlyargs, given.kw_defaults, strict=True)
        choices = [default for other, default in pairs if other is node]
    return any(isinstance(choice, ast.Constant) and choice.value is None for choice in choices)


def _list_names(nodes: list[Any]) -> set[str]:
    """Return the names in nodes."""
    return {part.id for node in nodes for part in ast.walk(node) if isinstance(part, ast.Name)}


def _list_parameters(function: Any) -> set[str]:
    """Return the names of the parameters of a function."""
    return {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}


def list_local(function: Any) -> set[str]:
    """Return the names that are local to a function."""
    nodes = [*ast.walk(function)]
    shared = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    return (_list_parameters(function) | list_stored(nodes)) - shared


def list_stored(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names that nodes set."""
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}

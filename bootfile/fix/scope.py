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
_PLAIN = (
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
        return next((part for part in self.above(path, node) if isinstance(part, ast.ClassDef)), None)

    def statement(self, path: str, node: ast.AST) -> Any:
        """Return the innermost statement with a node."""
        around = [node, *self.above(path, node)]
        return next(part for part in around if isinstance(part, ast.stmt))

    def block(self, path: str, statement: ast.stmt) -> list[ast.stmt]:
        """Return the statements of the block with a statement."""
        around: Any = self.parents[path][statement]
        fields = [getattr(around, name, None) for name in ("body", "orelse", "finalbody")]
        found = [part for part in fields if isinstance(part, list) and statement in part]
        return found[0] if found else [statement]

    # Names

    def reach(self, value: Value, path: str, node: ast.AST, used: str = "") -> Reach:
        """Return a name of an object at a node of a module. used: the tests under which the loop uses the
        object. Raises CannotEdit if there is none that is bound in each case, and is not bound again."""
        base, reason = root(value), ""
        function, cls = self.function(path, node), self.cls(path, node)
        for binding in self._list_bindings(base, path, function, cls):
            try:
                return self._check(base, binding, path, node, used)
            except CannotEdit as error:
                reason = reason or str(error)
        where = f"{function.name}()" if function is not None else "the script"
        raise CannotEdit(reason or f"{base.label or base.kind} has no name in {where}")

    def _list_bindings(self, base: Value, path: str, function: Any, cls: Any) -> list[Binding]:
        """Return the bindings of an object that a place may see: those of its function first."""
        mine = [one for one in self.facts.tracer.bound if one.path == path and root(one.value) is base]
        # the bare object before its wrapper, whose state has other names
        mine.sort(key=lambda one: (one.function is not function, one.value.kind == "wrapped"))
        found: dict[str, Binding] = {}
        for one in mine:
            is_member = one.name.startswith("self.") and cls is not None and self.cls(path, one.node) is cls
            is_seen = one.function is function or one.function is None or is_member
            if is_seen and one.name.replace(".", "").isidentifier():
                found.setdefault(one.name, one)
        return list(found.values())

    def _check(self, base: Value, binding: Binding, path: str, node: ast.AST, used: str) -> Reach:
        name = binding.name
        same = self._same_name(binding, path)
        mine = [one for one in same if root(one.value) is base]
        others = [one for one in same if one not in mine]
        function = binding.function if "." in name else self.function(path, node)
        if binding.function is None and function is not None and name in list_local(function):
            raise CannotEdit(f"{name} has another meaning in {function.name}()")
        # what the name was before does not matter if a statement with the object always runs
        is_last = all(one.order < binding.order for one in others) and not any(map(_may_be_none, mine))
        if is_last and self.is_bound(name, path, node, binding.function, {one.node for one in mine}):
            return Reach(name)
        if any(root(one.value).kind != "none" for one in others):
            raise CannotEdit(f"{name} is also the name of another object")
        if self.is_bound(name, path, node, binding.function):
            return Reach(name, f"{name} is not None")
        test = self._find_test(binding, path, node)
        if test and test in used:
            return Reach(name, test)
        raise CannotEdit(f"{name} may not be bound in line {getattr(node, 'lineno', 0)}")

    def _same_name(self, binding: Binding, path: str) -> list[Binding]:
        """Return all bindings of a name in its function, or of an attribute in its class."""
        of_name = [one for one in self.facts.tracer.bound if one.name == binding.name and one.path == path]
        if "." in binding.name:
            cls = self.cls(path, binding.node)
            return [one for one in of_name if self.cls(path, one.node) is cls]
        return [one for one in of_name if one.function is binding.function]

    def _find_test(self, binding: Binding, path: str, node: ast.AST) -> str:
        """Return the test under which an object is made, if it is the only one, and can be asked again."""
        statement = self.statement(path, binding.node)
        around: Any = self.parents[path][statement]
        is_test = isinstance(around, ast.If) and statement in around.body
        if not is_test or not all(isinstance(part, _PLAIN) for part in ast.walk(around.test)):
            return ""
        names = {part.id for part in ast.walk(around.test) if isinstance(part, ast.Name)}
        # the test is asked where the object is used: its names mean the same only in the same function
        is_here = self.function(path, node) is binding.function or names <= {"self"}
        is_after = self._comes_after(path, around, node)
        return unparse(around.test) if is_here and is_after else ""

    def _comes_after(self, path: str, first: ast.stmt, node: ast.AST) -> bool:
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
        parameters = [part.arg for part in ast.walk(here.args) if isinstance(part, ast.arg)] if here else []
        is_given = name in parameters and (by is None or any(isinstance(one, ast.arg) for one in by))
        return is_given or self._is_bound_before(name, path, node)

    def _is_bound_before(self, name: str, path: str, node: ast.AST) -> bool:
        cls = self.cls(path, node)
        inner: Any = self.statement(path, node)
        for outer in self.above(path, inner):
            targets = [*_targets(outer)] if inner in getattr(outer, "body", []) else []
            block = self.block(path, inner) if isinstance(inner, ast.stmt) else []
            before = block[: block.index(inner)] if inner in block else []
            if name in targets or any(self._binds(part, name, cls) for part in before):
                return True
            if isinstance(outer, FUNCTIONS):
                return False
            inner = outer
        return False

    def _is_made(self, name: str, path: str, node: ast.AST) -> bool:
        """Return whether __init__() of the class makes an attribute in each case."""
        cls = self.cls(path, node)
        functions = [part for part in cls.body if isinstance(part, FUNCTIONS)] if cls is not None else []
        makers = [part for part in functions if part.name == "__init__"]
        is_inside = bool(makers) and self.function(path, node) is makers[0]
        return bool(makers) and not is_inside and any(self._binds(part, name, cls) for part in makers[0].body)

    def _binds(self, statement: Any, name: str, cls: Any) -> bool:
        """Return whether a statement binds a name in each case."""

        def any_of(block: list[Any]) -> bool:
            return any(self._binds(part, name, cls) for part in block)

        if isinstance(statement, ast.If):
            if is_main_test(statement.test):
                return any_of(statement.body)
            return all(any_of(part) or _leaves(part) for part in (statement.body, statement.orelse))
        if isinstance(statement, ast.With):
            return name in _targets(statement) or any_of(statement.body)
        if isinstance(statement, ast.Try):
            handlers = all(any_of(part.body) or _leaves(part.body) for part in statement.handlers)
            return any_of(statement.finalbody) or (handlers and any_of([*statement.body, *statement.orelse]))
        # `self.build_optimizer()` in __init__()
        call = statement.value if isinstance(statement, ast.Expr) else None
        called = unparse(call.func) if isinstance(call, ast.Call) and cls is not None else ""
        methods = [part for part in getattr(cls, "body", []) if isinstance(part, FUNCTIONS)]
        if called.startswith("self.") and "." in name:
            return any(any_of(part.body) for part in methods if f"self.{part.name}" == called)
        return name in _targets(statement) and (self._by is None or statement in self._by)


def _leaves(block: list[Any]) -> bool:
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
    parts = [part for target in targets for part in (getattr(target, "elts", None) or [target])]
    return [unparse(part) for part in parts]


def _may_be_none(binding: Binding) -> bool:
    """Return whether the expression that binds a name, or the default of a parameter, may be None."""
    given = getattr(binding.node, "value", None)
    if isinstance(binding.node, ast.arg):
        arguments = binding.function.args
        last = [*arguments.posonlyargs, *arguments.args][-len(arguments.defaults) :]
        pairs = [
            *zip(last, arguments.defaults, strict=False),
            *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
        ]
        branches = [default for part, default in pairs if part is binding.node]
    else:
        branches = [given.body, given.orelse] if isinstance(given, ast.IfExp) else []
    return any(isinstance(part, ast.Constant) and part.value is None for part in branches)


def list_local(function: Any) -> set[str]:
    """Return the names that are local to a function."""
    stored = [
        part.id
        for part in ast.walk(function)
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
    ]
    parameters = [part.arg for part in ast.walk(function.args) if isinstance(part, ast.arg)]
    shared = [name for part in ast.walk(function) if isinstance(part, ast.Global) for name in part.names]
    return {*stored, *parameters} - {*shared}

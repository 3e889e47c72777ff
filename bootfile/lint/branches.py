"""Follow statements that branch: which branch is taken, and under which conditions the others are."""

import ast
from typing import Any

from bootfile.lint import values
from bootfile.lint.names import Names
from bootfile.lint.record import Condition
from bootfile.lint.sources import is_main_test, list_assigned, unparse
from bootfile.lint.values import Value, kind_of

_TERMINAL = (ast.Return, ast.Continue, ast.Raise, ast.Break)


class Branches(Names):
    """Follows branches."""

    def _do_if(self, node: ast.If) -> None:
        test = self.value(node.test)
        text = unparse(node.test)
        chosen = self._choose_branch(node)
        if chosen is not None:
            self._block(chosen)
            return
        self._event("test", test, {}, node, text)
        for body, is_true in ((node.body, True), (node.orelse, False)):
            if not body:
                continue
            count = len(self.events)
            self._conditions.append(Condition(text, test, is_true, node))
            self._block(body)
            self._conditions.pop()
            if any(event.name == "load" for event in self.events[count:]):
                self._restore_with_load(body)
        # what follows `if rank != 0: return` runs only on rank 0
        if isinstance(node.body[-1], _TERMINAL) and not node.orelse:
            self._conditions.append(Condition(text, test, False, node))

    def _restore_with_load(self, body: list[ast.stmt]) -> None:
        """Mark the numbers that a branch with a load sets, such as one from the name of the file: a restart
        continues with them."""
        names = self.frames[-1].names
        for name in set().union(*map(list_assigned, body)):
            value = names.get(name, Value())
            if value.kind in ("unknown", *values.NUMBERS):
                value.flags.add("restored")

    def _choose_branch(self, node: ast.If) -> list[ast.stmt] | None:
        """Return the branch that is taken; None if that is not known."""
        test = node.test
        if is_main_test(test):
            main = self.frames[-1].names.get("__name__")
            return node.body if main is not None and main.key == "__main__" else []
        is_true = bool(test.value) if isinstance(test, ast.Constant) else self._is_given(test)
        if self._has_state(test):
            is_true = True
        if is_true is None:
            return None
        return node.body if is_true else node.orelse

    def _has_state(self, test: ast.expr) -> bool:
        """Return whether a test is `hasattr(part, "state_dict")` of an object that is known to have it."""
        if not isinstance(test, ast.Call) or len(test.args) != 2 or unparse(test.func) != "hasattr":
            return False
        name = getattr(test.args[1], "value", None)
        kind = kind_of(self.value(test.args[0]))
        return name in ("state_dict", "load_state_dict") and kind in values.STATEFUL

    def _is_given(self, test: ast.expr) -> bool | None:
        """Return the value of a test of a parameter to which the call gives True, False or a dict: `flag`,
        `not flag`, `state is None`, `state is not None`. None if it is another test."""
        frame = self.frames[-1]
        is_negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        compared = test if isinstance(test, ast.Compare) else None
        part: Any = test.operand if isinstance(test, ast.UnaryOp) else test
        if compared:
            part = compared.left
        name = part.id if isinstance(part, ast.Name) and (compared or is_negated or part is test) else ""
        given = frame.given.get(name)
        if given is None or frame.node is None:
            return None
        if compared is not None:
            other = compared.comparators[0]
            is_none = isinstance(other, ast.Constant) and other.value is None
            # the function may have changed it before the test
            is_same = given.kind == "dict" and frame.names.get(name) is given
            return not isinstance(compared.ops[0], ast.Is) if is_none and is_same else None
        is_flag = given.kind == "const" and name not in list_assigned(frame.node)
        return (given.key is not is_negated) if is_flag else None

    def _do_try(self, node: ast.Try) -> None:
        self._block(node.body)
        for handler in node.handlers:
            self._conditions.append(Condition("except", Value(), True, handler))
            self._block(handler.body)
            self._conditions.pop()
        self._block(node.orelse)
        self._block(node.finalbody)

    def _do_match(self, node: Any) -> None:
        value = self.value(node.subject)
        for case in node.cases:
            self._conditions.append(Condition("case", value, True, case))
            self._block(case.body)
            self._conditions.pop()

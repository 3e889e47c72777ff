"""Follow a script from its first line to its end, and list what happens to its objects.

Nothing is executed: the tracer walks over the syntax tree. It enters functions of the same project at their
calls, walks each branch and each loop once, and keeps an abstract value for each name. What it cannot follow
is "unknown", and the rules are silent about it.
"""

import ast
import re
from typing import Any

from bootfile.lint import sources, values
from bootfile.lint.names import Names
from bootfile.lint.record import MOST_STEPS, Class, Condition, Frame, Function, Module, TooLarge
from bootfile.lint.sources import FUNCTIONS, list_assigned, unparse
from bootfile.lint.values import Loop, Value, kind_of

_TERMINAL = (ast.Return, ast.Continue, ast.Raise, ast.Break)


class Tracer(Names):
    """Walks over a script: its modules and statements. `_do_NODE()` follows a kind of statement; one without
    a method, such as `pass` or `del`, changes nothing that is followed."""

    is_script = False  # whether the file trains if it is started

    def run(self) -> None:
        """Walk over the script, and then over functions and classes that nothing has called if it does not
        train by itself."""
        module = Module(self.source)
        try:
            self._run_module(module, main=True)
            self.is_script = self._trains()
            if not self.is_script:
                self._run_uncalled(module)
        except (TooLarge, RecursionError):
            self.is_whole = False

    def _trains(self) -> bool:
        return any(event.name in ("step", "backward") and event.loops for event in self.events)

    def _run_uncalled(self, module: Module) -> None:
        """Walk over the functions of a module that no statement of it has called: main() first, and each
        class: __init__() and its methods."""
        self.frames.append(Frame(module, module.names))
        kinds = (*FUNCTIONS, ast.ClassDef)
        functions = [node for node in module.source.tree.body if isinstance(node, kinds)]
        functions.sort(key=sources.place_of_entry)
        called = sources.list_called(module.source.tree)
        # a function that another one calls comes after it, and has been walked over then
        first = [node for node in functions if node.name not in called]
        for node in [*first, *functions]:
            is_main = node.name == "main" and node.name not in called
            if node in self._walked or not (is_main or _mentions_training(node)):
                continue
            walked = set(self._walked)
            if isinstance(node, ast.ClassDef):
                self._run_class(Class(node, module, None))
            else:
                self._call_function(Function(node, module, None), [], {}, node)
            # a main() that a command of the package calls may leave the training to an object
            if is_main and not _mentions_training(node) and not self._trains():
                self._walked = walked
        self.frames.pop()

    def _run_class(self, cls: Class) -> None:
        # nothing calls them here, so the methods are walked in the order in which a restart would call them
        instance = self._make_instance(cls, [], {}, cls.node)
        names = {part.name for part in cls.node.body if isinstance(part, ast.FunctionDef)}
        first = ("resume", "load", "load_checkpoint", "_resume_checkpoint", "train", "fit", "run")
        for name in [*first, *sorted(names)]:
            function = self._find_method(cls, name)
            if name in names and function and function.node not in self._walked and name != "__init__":
                self._call_function(function, [instance], {}, cls.node)

    # Statements

    def _block(self, body: list[ast.stmt]) -> None:
        count = len(self._conditions)
        for statement in body:
            self._steps += 1
            if self._steps > MOST_STEPS:
                raise TooLarge
            if method := getattr(self, f"_do_{type(statement).__name__.lower()}", None):
                method(statement)
        # a `return` within this block has added a condition for the rest of it only
        del self._conditions[count:]

    def _do_expr(self, node: ast.Expr) -> None:
        self.value(node.value)

    def _do_assign(self, node: ast.Assign) -> None:
        value = self.value(node.value)
        for target in node.targets:
            self._assign(target, value, node)

    def _do_annassign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._assign(node.target, self.value(node.value), node)

    def _do_augassign(self, node: ast.AugAssign) -> None:
        added = self.value(node.value)
        old = self.value(node.target)
        # `state |= {...}` and `items += [...]` change the object; other sums make a new one
        if isinstance(node.op, ast.BitOr) and old.kind == "dict":
            self._merge_dict(old, added)
            return
        if isinstance(node.op, ast.Add) and old.kind == "list":
            old.is_open = True
            old.deps |= values.join_deps([added])
            return
        result = self._combine(node.op, old, added, node)
        # `step += 1`: a counter stays the same object, and the loop knows it as one
        is_sum = isinstance(node.op, ast.Add | ast.Sub)
        if is_sum and old.kind in ("const", "option") and set(old.loops) < set(self._loops):
            old = self._make_counter(node, node.target, old)
        if is_sum and old.kind == "counter":
            old.flags |= set() if added.kind in ("const", "option") else {"sum"}
            result = old
        self._assign(node.target, result, node, keep=True)

    def _do_return(self, node: ast.Return) -> None:
        frame = self.frames[-1]
        if node.value is not None:
            frame.returned.append(self.value(node.value))

    def _do_for(self, node: ast.For) -> None:
        iterated = self.value(node.iter)
        # a loop over few known objects, as `for optimizer in (a, b)`, is walked once for each of them
        entries = self._list_entries(iterated)
        for entry in entries or ():
            self._assign(node.target, entry, node, keep=True)
            self._block(node.body)
        if entries is None:
            loop = self.open_loop(node, iterated)
            self._read_loader(iterated, node)
            self._assign(node.target, self._element(iterated, node, loop), node, keep=True)
            self._block(node.body)
            self._loops.pop()
        self._block(node.orelse)

    _do_asyncfor = _do_for

    def _do_while(self, node: ast.While) -> None:
        loop = self.open_loop(node, Value())
        loop.test = self.value(node.test)
        self._event("test", loop.test, {}, node, unparse(node.test))
        loop.start = loop.test
        self._block(node.body)
        self._loops.pop()
        self._block(node.orelse)

    def open_loop(self, node: Any, iterated: Value) -> Loop:
        frame = self.frames[-1]
        loop = Loop(node, self._path(), node.lineno, iterated=iterated, function=frame.function)
        loop.depth, loop.calls = len(self._conditions), len(self._functions)
        self._make_counters(node, loop)
        self.all_loops.append(loop)
        self._loops.append(loop)
        return loop

    def _make_counters(self, node: Any, loop: Loop) -> None:
        """Make a counter of each name to which the loop adds: its value is not the one before the loop."""
        if node not in self._counted:
            pairs = [(part, sources.find_counted(part)) for part in sources.walk_loop(node)]
            self._counted[node] = [(part, target) for part, target in pairs if target is not None]
        for part, target in self._counted[node]:
            old = self.value(target)
            # `model += ...` is not a counter, and a counter of an outer loop stays one
            if old.kind in ("counter", "model", "list", "dict", "module", *values.STATEFUL):
                continue
            self._assign(target, self._make_counter(part, target, old), part, keep=True)

    def _make_counter(self, node: Any, target: ast.expr, old: Value) -> Value:
        counter = self._make("counter", node, [old], label=unparse(target), of=old, loops=old.loops)
        counter.key = old.key if old.kind == "const" and isinstance(old.key, int) else None
        self.counters.append(counter)
        return counter

    # Branches

    def _do_if(self, node: ast.If) -> None:
        test = self.value(node.test)
        text = unparse(node.test)
        chosen = self._choose_branch(node)
        if chosen is not None:
            self._block(chosen)
            return
        self._event("test", test, {}, node, text)
        for body, is_true in ((node.body, True), (node.orelse, False)):
            count = len(self.events)
            self._block_if(Condition(text, test, is_true, node), body)
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
        if sources.is_main_test(test):
            main = self.frames[-1].names.get("__name__")
            return node.body if main is not None and main.key == "__main__" else []
        is_true = bool(test.value) if isinstance(test, ast.Constant) else self._is_given(test)
        if is_true is None and not self._has_state(test):
            return None
        return node.orelse if is_true is False else node.body

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
        frame, text = self.frames[-1], unparse(test)
        # `not state is None` is another test
        name = re.sub(r"^not (?!.* )| is (not )?None$", "", text)
        given = frame.given.get(name)
        if given is None or frame.node is None or (text.startswith("not ") and text.endswith("None")):
            return None
        if text.endswith("None"):
            # the function may have changed it before the test
            is_same = given.kind == "dict" and frame.names.get(name) is given
            return text.endswith("is not None") if is_same else None
        is_flag = given.kind == "const" and name not in list_assigned(frame.node)
        return (given.key is not text.startswith("not ")) if is_flag else None

    def _do_try(self, node: ast.Try) -> None:
        self._block(node.body)
        for handler in node.handlers:
            self._block_if(Condition("except", Value(), True, handler), handler.body)
        self._block(node.orelse)
        self._block(node.finalbody)

    def _do_match(self, node: Any) -> None:
        value = self.value(node.subject)
        for case in node.cases:
            self._block_if(Condition("case", value, True, case), case.body)

    def _block_if(self, condition: Condition, body: list[ast.stmt]) -> None:
        self._conditions.append(condition)
        self._block(body)
        self._conditions.pop()

    def _do_with(self, node: Any) -> None:
        count = len(self._conditions)
        for item in node.items:
            value, text = self.value(item.context_expr), unparse(item.context_expr)
            if item.optional_vars is not None:
                self._assign(item.optional_vars, value, node)
            # every rank runs such a block, only later; other contexts may skip it or change what it does
            if "main_process_first" not in text:
                self._conditions.append(Condition(f"with {text}", value, True, node))
        self._block(node.body)
        del self._conditions[count:]

    _do_asyncwith = _do_with

    def _do_functiondef(self, node: Any) -> None:
        frame = self.frames[-1]
        # the names of a module are known from everywhere; those of a function only within it
        outer = frame.names if frame.function else None
        # it is entered at its calls, and not here
        kind, make = ("class", Class) if isinstance(node, ast.ClassDef) else ("function", Function)
        frame.names[node.name] = self._make(kind, node, label=node.name, cls=make(node, frame.module, outer))

    _do_asyncfunctiondef = _do_functiondef
    _do_classdef = _do_functiondef

    def _do_global(self, node: Any) -> None:
        self.frames[-1].shared.update(node.names)

    _do_nonlocal = _do_global


def _mentions_training(node: ast.AST) -> bool:
    for part in ast.walk(node):
        name = getattr(part.func, "id", "") if isinstance(part, ast.Call) else ""
        if "train" in name or getattr(part, "attr", "") in ("backward", "step", "train_one_epoch"):
            return True
    return False

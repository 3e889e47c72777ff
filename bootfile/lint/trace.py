"""Follow a script from its first line to its end, and list what happens to its objects.

Nothing is executed: the tracer walks over the syntax tree. It enters functions of the same project at their
calls, walks each branch and each loop once, and keeps an abstract value for each name. What it cannot follow
is "unknown", and the rules are silent about it.
"""

import ast
from typing import Any

from bootfile.lint import values
from bootfile.lint.calls import replaces
from bootfile.lint.expressions import Expressions
from bootfile.lint.record import MOST_STEPS, Class, Condition, Frame, Function, Module, TooLarge
from bootfile.lint.syntax import (
    find_counted,
    is_main_test,
    list_assigned,
    list_called,
    place_of_entry,
    unparse,
    walk_loop,
)
from bootfile.lint.values import Loop, Value, root

_TERMINAL = (ast.Return, ast.Continue, ast.Raise, ast.Break)


class Tracer(Expressions):
    """Walks over a script: its modules and statements."""

    def run(self) -> None:
        """Walk over the script, and then over functions and classes that nothing has called if it does not
        train by itself."""
        module = Module(self.source)
        try:
            self._run_module(module, main=True)
            if not self._trains():
                self._run_uncalled(module)
        except (TooLarge, RecursionError):
            self.is_whole = False

    def _trains(self) -> bool:
        return any(event.name in ("step", "backward") and event.loops for event in self.events)

    def _run_module(self, module: Module, main: bool) -> None:
        # only the script itself runs what stands under `if __name__ == "__main__"`
        module.names["__name__"] = Value("const", key="__main__" if main else "")
        module.names["__file__"] = Value("path", "__file__")
        self._frames.append(Frame(module, module.names))
        try:
            self._block(module.source.tree.body)
        finally:
            self._frames.pop()

    def _run_uncalled(self, module: Module) -> None:
        """Walk over the functions of a module that no statement of it has called: main() first, and each
        class: __init__() and its methods."""
        self._frames.append(Frame(module, module.names))
        functions = []
        for node in module.source.tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                functions.append(node)
        functions.sort(key=place_of_entry)
        called = list_called(module.source.tree)
        # a function that another one calls comes after it
        functions = [node for node in functions if node.name not in called] + functions
        for node in functions:
            # a function that another one has called has been walked over
            if node in self._walked:
                continue
            if isinstance(node, ast.ClassDef):
                self._run_class(Class(node, module, None))
            elif self._mentions_training(node):
                self._call_function(Function(node, module, None), [], {}, node)
            elif node.name == "main" and node.name not in called:
                self._run_main(node, module)
        self._frames.pop()

    def _run_main(self, node: Any, module: Module) -> None:
        """Walk over a main() that a command of the package calls: it may leave the training to an object."""
        walked = set(self._walked)
        self._call_function(Function(node, module, None), [], {}, node)
        if not self._trains():
            self._walked = walked

    def _mentions_training(self, node: ast.AST) -> bool:
        for part in ast.walk(node):
            if isinstance(part, ast.Attribute) and part.attr in ("backward", "step", "train_one_epoch"):
                return True
            if isinstance(part, ast.Call) and isinstance(part.func, ast.Name) and "train" in part.func.id:
                return True
        return False

    def _run_class(self, cls: Class) -> None:
        if not self._mentions_training(cls.node):
            return
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
            kind = type(statement)
            if kind not in self._methods:
                self._methods[kind] = getattr(self, f"_do_{kind.__name__.lower()}", None)
            # a statement without a method, such as `pass` or `del`, changes nothing that is followed
            method = self._methods[kind]
            if method:
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
        if old.kind == "counter" and isinstance(node.op, ast.Add | ast.Sub):
            result = old
        self._assign(node.target, result, node, keep=True)

    def _do_return(self, node: ast.Return) -> None:
        frame = self._frames[-1]
        if node.value is not None:
            frame.returned.append(self.value(node.value))

    def _do_if(self, node: ast.If) -> None:
        test = self.value(node.test)
        text = unparse(node.test)
        if is_main_test(node.test):
            main = self._frames[-1].names.get("__name__")
            if main is not None and main.key == "__main__":
                self._block(node.body)
            return
        # `if True:` has one branch
        if isinstance(node.test, ast.Constant):
            self._block(node.body if node.test.value else node.orelse)
            return
        chosen = self._choose_branch(node)
        if chosen is not None:
            self._block(chosen)
            return
        self._event("test", test, {}, node, text)
        self._conditions.append(Condition(text, test, True, node))
        self._block(node.body)
        self._conditions.pop()
        if node.orelse:
            self._conditions.append(Condition(text, test, False, node))
            self._block(node.orelse)
            self._conditions.pop()
        # what follows `if rank != 0: return` runs only on rank 0
        if node.body and isinstance(node.body[-1], _TERMINAL) and not node.orelse:
            self._conditions.append(Condition(text, test, False, node))

    def _choose_branch(self, node: ast.If) -> list[ast.stmt] | None:
        """Return the branch that a call takes if the test is a parameter to which it gives True or False.
        None if that is not known."""
        asks_for_none = self._find_given_dict(node.test)
        if asks_for_none is not None:
            return node.orelse if asks_for_none else node.body
        if self._has_state(node.test):
            return node.body
        is_negated = isinstance(node.test, ast.UnaryOp) and isinstance(node.test.op, ast.Not)
        name = node.test.operand if is_negated else node.test  # type: ignore[attr-defined]
        frame = self._frames[-1]
        if not isinstance(name, ast.Name) or frame.node is None:
            return None
        given = frame.given.get(name.id)
        if given is None or given.kind == "dict" or name.id in list_assigned(frame.node):
            return None
        return node.body if given.key is not is_negated else node.orelse

    def _has_state(self, test: ast.expr) -> bool:
        """Return whether a test is `hasattr(part, "state_dict")` for an optimizer, scheduler or another
        object that is known to have a state."""
        if not isinstance(test, ast.Call) or unparse(test.func) != "hasattr" or len(test.args) != 2:
            return False
        name = getattr(test.args[1], "value", None)
        value = root(self.value(test.args[0]))
        return name in ("state_dict", "load_state_dict") and value.kind in values.STATEFUL

    def _find_given_dict(self, test: ast.expr) -> bool | None:
        """Return True for `state is None` and False for `state is not None` if the call gives a dict to this
        parameter. None for any other test."""
        if not isinstance(test, ast.Compare) or not isinstance(test.left, ast.Name):
            return None
        given = self._frames[-1].given.get(test.left.id)
        is_none = isinstance(test.comparators[0], ast.Constant) and test.comparators[0].value is None
        if given is None or given.kind != "dict" or not is_none:
            return None
        # the function may have changed it before the test
        if self._frames[-1].names.get(test.left.id) is not given:
            return None
        return isinstance(test.ops[0], ast.Is)

    def _do_for(self, node: ast.For) -> None:
        iterated = self.value(node.iter)
        # a loop over few known objects, as `for optimizer in (a, b)`, is walked once for each of them
        entries = self._list_entries(iterated)
        if entries is not None:
            for entry in entries:
                self._assign(node.target, entry, node, keep=True)
                self._block(node.body)
            self._block(node.orelse)
            return
        # any other loop is walked once
        loop = self._open_loop(node, iterated)
        self._read_loader(iterated, node)
        element = self._element(iterated, node, loop)
        self._assign(node.target, element, node, keep=True)
        self._block(node.body)
        self._loops.pop()
        self._block(node.orelse)

    _do_asyncfor = _do_for

    def _do_while(self, node: ast.While) -> None:
        loop = self._open_loop(node, Value())
        loop.test = self.value(node.test)
        self._event("test", loop.test, {}, node, unparse(node.test))
        loop.start = loop.test
        self._block(node.body)
        self._loops.pop()
        self._block(node.orelse)

    def _open_loop(self, node: Any, iterated: Value) -> Loop:
        frame = self._frames[-1]
        loop = Loop(node, self._path(), node.lineno, iterated=iterated, function=frame.function)
        self._make_counters(node, loop)
        self.all_loops.append(loop)
        self._loops.append(loop)
        return loop

    def _make_counters(self, node: Any, loop: Loop) -> None:
        """Make a counter of each name to which the loop adds: its value is not the one before the loop."""
        if node not in self._counted:
            pairs = [(part, find_counted(part)) for part in walk_loop(node)]
            self._counted[node] = [(part, target) for part, target in pairs if target is not None]
        for part, target in self._counted[node]:
            key = unparse(target)
            old = self.value(target)
            # `model += ...` is not a counter, and a counter of an outer loop stays one
            if old.kind in ("counter", "model", "list", "dict", "module") or old.kind in values.STATEFUL:
                continue
            counter = Value("counter", key, self._path(), getattr(part, "lineno", 0), of=old, loops=old.loops)
            counter.deps = values.join_deps([old])
            if isinstance(old.key, int) and old.kind == "const":
                counter.key = old.key
            counter.flags.add(f"old:{old.kind}")
            self.counters.append(counter)
            counter.node = (old.line, old.path)
            self._assign(target, counter, part, keep=True)

    def _do_with(self, node: Any) -> None:
        count = 0
        for item in node.items:
            value = self.value(item.context_expr)
            if item.optional_vars is not None:
                self._assign(item.optional_vars, value, node)
            text = unparse(item.context_expr)
            # every rank runs such a block, only later; other contexts may skip it or change what it does
            if "main_process_first" not in text:
                self._conditions.append(Condition(f"with {text}", value, True, node))
                count += 1
        self._block(node.body)
        for _ in range(count):
            self._conditions.pop()

    _do_asyncwith = _do_with

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

    def _do_functiondef(self, node: Any) -> None:
        frame = self._frames[-1]
        # the names of a module are known from everywhere; those of a function only within it
        outer = frame.names if frame.function else None
        # it is entered at its calls, and not here
        function = Function(node, frame.module, outer)
        frame.names[node.name] = Value("function", node.name, self._path(), node.lineno, cls=function)

    _do_asyncfunctiondef = _do_functiondef

    def _do_classdef(self, node: ast.ClassDef) -> None:
        frame = self._frames[-1]
        outer = frame.names if frame.function else None
        cls = Class(node, frame.module, outer)
        frame.names[node.name] = Value("class", node.name, self._path(), node.lineno, cls=cls)

    def _do_global(self, node: Any) -> None:
        self._frames[-1].shared.update(node.names)

    _do_nonlocal = _do_global

    def _do_import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            full = alias.name if alias.asname else name
            self._frames[-1].names[name] = self._import(alias.name, full, 0, node)

    def _do_importfrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        path = self.project.find(module, node.level, self._path())
        names = self._frames[-1].names
        for alias in node.names:
            inner = self.project.find(f"{module}.{alias.name}".lstrip("."), node.level, self._path())
            loaded = self._load(path) if path else None
            if alias.name == "*":
                if loaded:
                    for name, value in loaded.names.items():
                        names.setdefault(name, value)
                continue
            name = alias.asname or alias.name
            # a name in a module of the project, or a module in a package of it, or of another package
            if loaded and alias.name in loaded.names:
                names[name] = loaded.names[alias.name]
            elif inner and self._load(inner):
                names[name] = Value("module", f"{module}.{alias.name}", inner, cls=self._load(inner))
            else:
                full = f"{module}.{alias.name}"
                self.externals.add(full)
                names[name] = Value("module", full, self._path(), node.lineno, key=bool(path))

    def _import(self, wanted: str, full: str, level: int, node: Any) -> Value:
        path = self.project.find(wanted, level, self._path())
        module = self._load(path) if path else None
        if module is not None and wanted == full:
            return Value("module", full, path, cls=module)
        if module is not None:  # `import a.b` binds a
            return Value("module", full, path, key=True)
        self.externals.add(wanted)
        return Value("module", full, self._path(), node.lineno)

    def _load(self, path: str) -> Module | None:
        """Return a module of the project, whose statements have been walked over."""
        if path in self.imported:
            return self.imported[path]
        source = self.project.read(path)
        if source is None:
            return None
        module = Module(source)
        self.imported[path] = module
        # the statements of a module run once, at its import: they are not events of the training
        self._muted += 1
        loops, self._loops = self._loops, []
        conditions, self._conditions = self._conditions, []
        try:
            self._run_module(module, main=False)
        finally:
            self._muted -= 1
            self._loops = loops
            self._conditions = conditions
        return module

    def _assign(self, target: ast.expr, value: Value, node: Any, keep: bool = False) -> None:
        """Bind a target. keep: a loop or a counter binds it, whatever it was before."""
        if isinstance(target, ast.Name):
            self._set_name(target.id, self._named(value, target.id, node), keep, node)
        elif isinstance(target, ast.Attribute):
            owner = self.value(target.value)
            named = self._named(value, target.attr, node)
            self._event("set_attribute", owner, {0: named}, node, target.attr)
            place = root(owner).parts
            place[target.attr] = self._chosen(place.get(target.attr), named, keep)
        elif isinstance(target, ast.Subscript):
            self._set_item(target, value, node)
        elif isinstance(target, ast.Tuple | ast.List):
            # `a, b = pair`, `first, *rest = items`
            for number, part in enumerate(target.elts):
                if isinstance(part, ast.Starred):
                    self._assign(part.value, Value(deps=values.join_deps([value])), node, keep)
                    continue
                self._assign(part, self._unpack(value, number, node), node, keep)
        elif isinstance(target, ast.Starred):
            self._assign(target.value, value, node, keep)

    def _unpack(self, value: Value, number: int, node: Any) -> Value:
        if number in value.parts:
            return value.parts[number]
        made = Value("unknown", "", self._path(), node.lineno, deps=values.join_deps([value]))
        made.loops = tuple(self._loops)
        made.flags |= value.flags & {"from_call", "restored"}
        made.of = value.of if value.kind == "attribute" else None
        return made

    def _set_item(self, target: ast.Subscript, value: Value, node: Any) -> None:
        owner = self.value(target.value)
        key = self.value(target.slice)
        self._event("set_item", owner, {0: value, 1: key}, node, unparse(target))
        if key.kind == "const":
            place = root(owner).parts
            old = place.get(key.key)
            # `if hasattr(part, "load_state_dict"): ... else: parts[name] = saved[name]`
            is_object = old is not None and values.kind_of(old) in values.STATEFUL
            if is_object and value.kind == "field" and self._conditions:
                return
            place[key.key] = self._chosen(old, value, False)
        else:
            owner.is_open = True
            owner.deps |= values.join_deps([value])

    def _set_name(self, name: str, value: Value, keep: bool, node: Any) -> None:
        frame = self._frames[-1]
        names = frame.names
        if name in frame.shared:
            names = frame.module.names
            # `nonlocal`, or else `global`
            if frame.outer is not None and name in frame.outer:
                names = frame.outer
        chosen = self._chosen(names.get(name), value, keep)
        if chosen is not names.get(name) and self._loops:
            self._event("set_name", chosen, {0: names.get(name, Value())}, node, name)
        names[name] = chosen

    def _chosen(self, old: Value | None, new: Value, keep: bool) -> Value:
        """Return the value of a name after an assignment, which a branch may leave out."""
        if old is None or keep or not self._conditions:
            return new
        # what `except` puts in its place is another one only if the block has failed
        if self._conditions[-1].text == "except" and root(old).kind in (*values.STATEFUL, "copied"):
            return old
        # `if not resume: step = 0` leaves the restored value: a restart does not come here
        if values.is_vague(new) and values.is_restored(old) and not values.is_restored(new):
            return old
        # 0 for a new run, or what the name of a file tells
        if new.kind == "const" and old.kind == "unknown" and "from_call" in old.flags:
            return old
        # without torchrun another sampler may be used, with which nothing has to be done
        if (
            root(old).kind == "sampler"
            and root(old).key == "DistributedSampler"
            and root(new).kind == "sampler"
        ):
            return old
        # `scheduler = None` in one branch: the rules look at the branch with the object
        says_less = values.is_vague(new) and not values.is_vague(old) and not values.is_restored(new)
        if says_less and (new.kind != "unknown" or old.kind != "field"):
            return old
        if old.kind == "state" and new.kind == "state" and old.flags != new.flags:
            new.flags.add("either")
        # two branches make the same thing in two ways: from here on they are one object
        both = root(old).kind == root(new).kind and root(old).kind in values.STATEFUL
        if both and root(old) is not root(new) and new.kind != "wrapped" and not replaces(old, new):
            root(old).same = new
        return new

    def _named(self, value: Value, name: str, node: Any) -> Value:
        """Return a value with the name of the target, and with the kind that the name tells if nothing else
        does."""
        # `optimizer = build(cfg)`: nothing but the name tells what it is
        if value.kind == "unknown" and not value.label:
            kind = values.kind_of_name(name)
            is_open = "from_call" in value.flags and not (kind == "checkpoint" and value.of is not None)
            if kind and is_open:
                value.kind = kind
                value.flags.add("by_name")
        is_average = value.kind == "instance" and values.kind_of_name(name) == "ema"
        if is_average and isinstance(value.cls, Class) and self._find_method(value.cls, "update"):
            value.kind = "ema"
        if not value.label and value.kind != "const":
            value.label = name
            value.line = value.line or node.lineno
        if value.kind == "const" and not value.label:
            return Value(
                "const",
                name,
                self._path(),
                getattr(node, "lineno", 0),
                key=value.key,
                loops=tuple(self._loops),
            )
        return value

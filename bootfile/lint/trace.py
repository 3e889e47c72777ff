"""Follow a script from its first line to its end, and list what happens to its objects.

Nothing is executed: the tracer walks over the syntax tree. It enters functions of the same project at their
calls, walks each branch and each loop once, and keeps an abstract value for each name. What it cannot follow
is "unknown", and the rules are silent about it.
"""

import ast
import builtins
import contextlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bootfile.lint import values
from bootfile.lint.project import Project
from bootfile.lint.sources import Source
from bootfile.lint.values import Loop, Value, kind_of, root

MOST_EVENTS = 60_000
MOST_STEPS = 150_000
DEEPEST = 14
MOST_ENTRIES = 12  # entries of a dict or a list over which a loop is walked one by one
_STARTERS = ("spawn", "launch", "run_main", "notebook_launcher", "debug_launcher", "wrapper")
_TERMINAL = (ast.Return, ast.Continue, ast.Raise, ast.Break)
_PASSED = (
    "cuda", "to", "cpu", "train", "eval", "half", "float", "double", "bfloat16", "requires_grad_", "copy",
    "items",
    "values", "tqdm", "enumerate", "list", "iter", "reversed", "prefetch", "__enter__", "unwrap_model",
    "setup_dataloaders", "setup", "convert_sync_batchnorm", "sync_batchnorm", "apply", "channels_last",
    "de_parallel",
    "unwrap", "get_model", "log_every", "track", "detach", "clone", "item", "int", "str",
)  # fmt: skip


class Condition(NamedTuple):
    """A test around a statement. text: its source. value: its value. is_true: which branch."""

    text: str
    value: Value
    is_true: bool
    node: Any


@dataclass(eq=False)
class Event:
    """One thing that a script does. name: "call", "save", "step", ... args: the values of a call, by place
    or name."""

    name: str
    value: Value
    args: dict[Any, Value]
    node: Any
    path: str
    line: int
    loops: tuple[Loop, ...]
    conditions: tuple[Condition, ...]
    functions: tuple[str, ...]
    order: int
    text: str = ""

    def describe_conditions(self) -> str:
        """Return the tests around the event, as one text."""
        return " ".join(condition.text for condition in self.conditions)


class Function(NamedTuple):
    """A function of the project. names: those of the function around it. owner: the class of a method."""

    node: Any
    module: "Module"
    names: "dict[str, Value] | None"
    owner: "Class | None" = None


class Class(NamedTuple):
    """A class of the project."""

    node: ast.ClassDef
    module: "Module"
    names: "dict[str, Value] | None"


@dataclass(eq=False)
class Module:
    """A module and its names."""

    source: Source
    names: dict[str, Value] = field(default_factory=dict)


@dataclass(eq=False)
class Frame:
    """A function that is being walked over."""

    module: Module
    names: dict[str, Value]
    outer: dict[str, Value] | None = None
    function: str = ""
    node: Any = None
    returned: list[Value] = field(default_factory=list)
    shared: set[str] = field(default_factory=set)
    owner: Class | None = None


class TooLarge(Exception):
    """The script has more steps than the tracer walks."""


def unparse(node: ast.AST) -> str:
    """Return the text of a node; "" if it is nested too deeply. The node keeps its text: a function that is
    called often has the same conditions each time."""
    text = getattr(node, "bootfile_text", None)
    if text is None:
        try:
            text = ast.unparse(node)
        except (RecursionError, ValueError, AttributeError):
            text = ""
        with contextlib.suppress(AttributeError):
            node.bootfile_text = text  # type: ignore[attr-defined]
    return str(text)


class Tracer:
    """Walks over a script. events: what it does, in its order. loops: its loops."""

    def __init__(self, source: Source, project: Project):
        self.project = project
        self.source = source
        self.events: list[Event] = []
        self.all_loops: list[Loop] = []
        self.counters: list[Value] = []
        self.imported: dict[str, Module] = {}
        self.externals: set[str] = set()
        self.is_whole = True
        self.missed: set[str] = set()  # project functions that were too deep
        self._loops: list[Loop] = []
        self._conditions: list[Condition] = []
        self._frames: list[Frame] = []
        self._stack: list[Any] = []
        self._steps = 0
        self._muted = 0
        self._walked: set[Any] = set()
        self._trained: set[Any] = set()
        self._loaders_read: set[Value] = set()

    # The whole script

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
        functions.sort(key=_place_of_entry)
        called = _list_called(module.source.tree)
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
        self._frames.pop()

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
            method = getattr(self, f"_do_{type(statement).__name__.lower()}", None)
            if method:
                method(statement)
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
        if isinstance(node.op, ast.BitOr) and old.kind == "dict":
            self._merge_dict(old, added)
            return
        if isinstance(node.op, ast.Add) and old.kind == "list":
            old.is_open = True
            old.deps |= values.join_deps([added])
            return
        result = self._combine(node.op, old, added, node)
        if (old.kind == "counter" and isinstance(node.op, ast.Add)) or (
            old.kind == "counter" and isinstance(node.op, ast.Sub)
        ):
            result = old
        self._assign(node.target, result, node, keep=True)

    def _do_return(self, node: ast.Return) -> None:
        frame = self._frames[-1]
        if node.value is not None:
            frame.returned.append(self.value(node.value))

    def _do_if(self, node: ast.If) -> None:
        test = self.value(node.test)
        text = unparse(node.test)
        if _is_main_test(node.test):
            main = self._frames[-1].names.get("__name__")
            if main is not None and main.key == "__main__":
                self._block(node.body)
            return
        if isinstance(node.test, ast.Constant):
            self._block(node.body if node.test.value else node.orelse)
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

    def _do_for(self, node: ast.For) -> None:
        iterated = self.value(node.iter)
        entries = self._list_entries(iterated)
        if entries is not None:
            for entry in entries:
                self._assign(node.target, entry, node, keep=True)
                self._block(node.body)
            self._block(node.orelse)
            return
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
        for part in _walk_loop(node):
            target = _find_counted(part)
            if target is None:
                continue
            key = unparse(target)
            old = self.value(target)
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
        outer = frame.names if frame.function else None
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

    # Assignment

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
            place[key.key] = self._chosen(place.get(key.key), value, False)
        else:
            owner.is_open = True
            owner.deps |= values.join_deps([value])

    def _set_name(self, name: str, value: Value, keep: bool, node: Any) -> None:
        frame = self._frames[-1]
        names = frame.names
        if name in frame.shared:
            names = frame.module.names
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
        if values.is_vague(new) and values.is_restored(old) and not values.is_restored(new):
            return old
        # without torchrun another sampler may be used, with which nothing has to be done
        if (
            root(old).kind == "sampler"
            and root(old).key == "DistributedSampler"
            and root(new).kind == "sampler"
        ):
            return old
        says_less = values.is_vague(new) and not values.is_vague(old) and not values.is_restored(new)
        if says_less and (new.kind != "unknown" or old.kind != "field"):
            return old
        if old.kind == "state" and new.kind == "state" and old.flags != new.flags:
            new.flags.add("either")
        both = root(old).kind == root(new).kind and root(old).kind in values.STATEFUL
        if both and root(old) is not root(new) and new.kind != "wrapped" and not _replaces(old, new):
            root(old).same = new
        return new

    def _named(self, value: Value, name: str, node: Any) -> Value:
        """Return a value with the name of the target, and with the kind that the name tells if nothing else
        does."""
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

    # Expressions

    def value(self, node: Any) -> Value:
        """Return the value of an expression."""
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise TooLarge
        if node is None:
            return Value("none")
        method = getattr(self, f"_of_{type(node).__name__.lower()}", None)
        if method:
            result: Value = method(node)
            return result
        inner = []
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                inner.append(self.value(child))
        return Value("unknown", deps=values.join_deps(inner))

    def _of_constant(self, node: ast.Constant) -> Value:
        if node.value is None:
            return Value("none", line=node.lineno)
        return Value("const", key=node.value, line=node.lineno, loops=tuple(self._loops))

    def _of_name(self, node: ast.Name) -> Value:
        frame = self._frames[-1]
        for names in (frame.names, frame.outer, frame.module.names):
            if names is not None and node.id in names:
                return names[node.id]
        if hasattr(builtins, node.id):
            return Value("module", node.id)
        return Value("unknown", node.id, flags={"undefined"})

    def _of_attribute(self, node: ast.Attribute) -> Value:
        owner = self.value(node.value)
        if owner.kind == "module":
            if isinstance(owner.cls, Module):
                if node.attr in owner.cls.names:
                    return owner.cls.names[node.attr]
                return Value("unknown", node.attr)
            return Value("module", f"{owner.label}.{node.attr}", owner.path, key=owner.key)
        if owner.kind == "wrapped" and node.attr in ("module", "_orig_mod") and owner.of is not None:
            return owner.of
        base = root(owner)
        if node.attr in base.parts and base.kind not in ("dict", "list", "field", "checkpoint"):
            return base.parts[node.attr]
        if isinstance(base.cls, Class):
            method = self._find_method(base.cls, node.attr)
            if method:
                if _is_property(method.node):
                    return self._call_function(method, [owner], {}, node)
                return Value("method", node.attr, of=owner, cls=method)
            constant = self._find_class_value(base.cls, node.attr)
            if constant is not None:
                return constant
        return self._unknown_attribute(owner, base, node)

    def _unknown_attribute(self, owner: Value, base: Value, node: ast.Attribute) -> Value:
        if base.kind in ("checkpoint", "field"):
            return Value("field", node.attr, of=base, key=node.attr, deps=frozenset([owner]))
        kind = "attribute"
        if base.kind in ("instance", "unknown", "self", "none", "attribute"):
            kind = values.kind_of_name(node.attr) or "attribute"
        if base.kind in ("args", "option"):
            kind = "option"
        made = Value(kind, node.attr, self._path(), node.lineno, of=owner, deps=frozenset([owner]))
        if kind not in ("attribute", "option"):
            made.flags.add("by_name")
            made.of = None
            base.parts[node.attr] = made
        if kind == "option":
            base.parts[node.attr] = made
        return made

    def _of_subscript(self, node: ast.Subscript) -> Value:
        owner = self.value(node.value)
        key = self.value(node.slice)
        return self._item(owner, key, node)

    def _item(self, owner: Value, key: Value, node: Any) -> Value:
        base = root(owner)
        if key.kind == "const" and key.key in base.parts and base.kind != "instance":
            return base.parts[key.key]
        if base.kind in ("checkpoint", "field"):
            name = key.key if key.kind == "const" else None
            made = Value("field", str(name or ""), self._path(), node.lineno, of=base, key=name)
            self._event("read", made, {}, node)
            return made
        deps = values.join_deps([owner, key])
        return Value("attribute", "", self._path(), node.lineno, of=owner, deps=deps, flags={"item"})

    def _of_dict(self, node: ast.Dict) -> Value:
        made = Value("dict", "", self._path(), node.lineno)
        for key, item in zip(node.keys, node.values, strict=True):
            value = self.value(item)
            if key is None:
                self._merge_dict(made, value)
                continue
            name = self.value(key)
            if name.kind == "const":
                made.parts[name.key] = value
            else:
                made.is_open = True
                made.deps |= values.join_deps([value])
        return made

    def _merge_dict(self, made: Value, other: Value) -> None:
        other = root(other)
        if other.kind == "dict":
            made.parts.update(other.parts)
            made.is_open = made.is_open or other.is_open
        else:
            made.is_open = True
        made.deps |= values.join_deps([other])

    def _of_list(self, node: Any) -> Value:
        made = Value("list", "", self._path(), node.lineno)
        for number, item in enumerate(node.elts):
            value = self.value(item)
            if isinstance(item, ast.Starred):
                made.is_open = True
                made.deps |= values.join_deps([value])
            made.parts[number] = value
        return made

    _of_tuple = _of_list

    def _of_set(self, node: Any) -> Value:
        made = self._of_list(node)
        made.flags.add("set")
        return made

    def _of_starred(self, node: ast.Starred) -> Value:
        return self.value(node.value)

    def _of_await(self, node: ast.Await) -> Value:
        return self.value(node.value)

    def _of_namedexpr(self, node: ast.NamedExpr) -> Value:
        value = self.value(node.value)
        self._assign(node.target, value, node)
        return value

    def _of_ifexp(self, node: ast.IfExp) -> Value:
        test = self.value(node.test)
        text = unparse(node.test)
        self._conditions.append(Condition(text, test, True, node))
        body = self.value(node.body)
        self._conditions[-1] = Condition(text, test, False, node)
        orelse = self.value(node.orelse)
        self._conditions.pop()
        chosen = self._either(body, orelse)
        other = orelse if chosen is body else body
        if chosen.kind in ("state", "const", "none") or values.is_vague(other) or values.is_vague(chosen):
            return chosen
        # it is the one or the other: a wrapper without a prefix keeps both
        return Value(
            "wrapped", chosen.label, chosen.path, chosen.line, of=chosen, key="", deps=frozenset([other])
        )

    def _either(self, first: Value, second: Value) -> Value:
        if first.kind == "state" and second.kind == "state":
            made = Value(
                "state", first.label, first.path, first.line, of=first.of, deps=first.deps | second.deps
            )
            made.flags = first.flags & second.flags
            made.flags.add("either")
            return made
        if values.is_restored(second) and not values.is_restored(first):
            return second
        if values.is_vague(first) and not values.is_vague(second):
            return second
        return first

    def _of_boolop(self, node: ast.BoolOp) -> Value:
        inner = [self.value(part) for part in node.values]
        if isinstance(node.op, ast.Or):
            result = inner[0]
            for value in inner[1:]:
                result = self._either(result, value)
            if result.kind not in VAGUE_OR_OPTION:
                return result
        return Value("unknown", deps=values.join_deps(inner))

    def _of_compare(self, node: ast.Compare) -> Value:
        inner = [self.value(node.left), *map(self.value, node.comparators)]
        return Value("compared", deps=values.join_deps(inner), line=node.lineno, node=node)

    def _of_unaryop(self, node: ast.UnaryOp) -> Value:
        inner = self.value(node.operand)
        if isinstance(node.op, ast.USub) and inner.kind == "const" and isinstance(inner.key, int | float):
            return Value("const", key=-inner.key, line=node.lineno, loops=tuple(self._loops))
        return Value("unknown", deps=values.join_deps([inner]))

    def _of_binop(self, node: ast.BinOp) -> Value:
        return self._combine(node.op, self.value(node.left), self.value(node.right), node)

    def _combine(self, operator: ast.operator, left: Value, right: Value, node: Any) -> Value:
        if isinstance(operator, ast.BitOr) and left.kind == "dict":
            made = Value("dict", "", self._path(), node.lineno)
            self._merge_dict(made, left)
            self._merge_dict(made, right)
            return made
        sign = {ast.Add: 1, ast.Sub: -1}.get(type(operator), 0)
        if sign and right.kind == "const" and isinstance(right.key, int):
            return _shift(left, sign * right.key)
        if sign == 1 and left.kind == "const" and isinstance(left.key, int):
            return _shift(right, left.key)
        kind = "unknown"
        if isinstance(operator, ast.Mod):
            kind = "modulo"
        made = Value(kind, deps=values.join_deps([left, right]), line=node.lineno, node=node)
        if kind == "modulo" and right.kind == "const":
            made.key = right.key
        if isinstance(operator, ast.Div | ast.Add | ast.Mod) and "path" in (left.kind, right.kind):
            made.kind = "path"
        return made

    def _of_joinedstr(self, node: ast.JoinedStr) -> Value:
        inner = []
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                inner.append(self.value(part.value))
        return Value("text", deps=values.join_deps(inner), line=node.lineno, node=node)

    def _of_lambda(self, node: ast.Lambda) -> Value:
        frame = self._frames[-1]
        outer = frame.names if frame.function else None
        return Value("function", "lambda", self._path(), node.lineno, cls=Function(node, frame.module, outer))

    def _of_listcomp(self, node: Any) -> Value:
        made = Value("list", "", self._path(), node.lineno)
        entries = self._comprehend(node)
        made.is_open = entries is None
        for number, names in enumerate(entries or [{}]):
            with self._bound(names):
                made.parts[number] = self.value(node.elt)
        if entries is None:
            made.deps = values.join_deps([*made.parts.values(), *self._iterated(node)])
            if made.parts[0].kind not in values.STATEFUL:
                made.parts = {}
        made.node = node
        return made

    _of_generatorexp = _of_listcomp

    def _of_setcomp(self, node: Any) -> Value:
        made = self._of_listcomp(node)
        made.flags.add("set")
        return made

    def _of_dictcomp(self, node: ast.DictComp) -> Value:
        made = Value("dict", "", self._path(), node.lineno, node=node)
        entries = self._comprehend(node)
        made.is_open = entries is None
        made.flags.add("comprehension")
        for names in entries or [{}]:
            with self._bound(names):
                key = self.value(node.key)
                value = self.value(node.value)
            made.deps |= values.join_deps([value])
            if key.kind == "const" and entries is not None:
                made.parts[key.key] = value
        if entries is None:
            made.deps |= values.join_deps(self._iterated(node))
        return made

    def _iterated(self, node: Any) -> list[Value]:
        return [self.value(part.iter) for part in node.generators]

    def _comprehend(self, node: Any) -> list[dict[str, Value]] | None:
        """Bind the targets of a comprehension, and return the names of each of its entries; None if the
        entries are not known."""
        generator = node.generators[0]
        iterated = self.value(generator.iter)
        entries = self._list_entries(iterated)
        if entries is None or len(node.generators) > 1 or generator.ifs:
            for part in node.generators:
                source = self.value(part.iter)
                # a comprehension reads a loader as a loop does
                self._assign(part.target, self._element(source, part.iter, None), part.iter, keep=True)
            return None
        bound = []
        for entry in entries:
            names: dict[str, Value] = {}
            _bind(generator.target, entry, names)
            bound.append(names)
        return bound

    @contextlib.contextmanager
    def _bound(self, names: dict[str, Value]) -> Any:
        frame = self._frames[-1]
        before = {name: frame.names.get(name) for name in names}
        frame.names.update(names)
        yield
        for name, value in before.items():
            if value is not None:
                frame.names[name] = value

    def _list_entries(self, iterated: Value) -> list[Value] | None:
        """Return what a loop over a dict or list gets if its entries are known and few."""
        iterated = root(iterated)
        if iterated.kind not in ("list", "dict") or iterated.is_open or "set" in iterated.flags:
            return None
        if not 0 < len(iterated.parts) <= MOST_ENTRIES:
            return None
        entries = []
        for key, value in iterated.parts.items():
            if "items" in iterated.flags:
                pair = Value("list", parts={0: Value("const", key=key), 1: value})
                entries.append(pair)
            elif iterated.kind == "list" or "values" in iterated.flags:
                entries.append(value)
            else:
                entries.append(Value("const", key=key))
        return entries

    def _element(self, iterated: Value, node: Any, loop: Loop | None) -> Value:
        """Return what the target of a loop gets."""
        base = root(iterated)
        made = Value("unknown", "", self._path(), node.lineno, deps=values.join_deps([iterated]))
        made.loops = tuple(self._loops)
        made.flags.add("element")
        if base.kind == "range" and loop is not None:
            made.kind = "loop"
            made.of = None
            loop.value = made
            loop.start = base.parts.get("start")
        elif base.kind == "enumerated":
            number = Value("loop", "", self._path(), node.lineno)
            if loop is not None:
                loop.value = number
                loop.start = base.parts.get("start")
            made.kind = "list"
            made.parts = {0: number, 1: Value(deps=values.join_deps([iterated]), loops=tuple(self._loops))}
            made.parts[1].flags.add("element")
        elif base.kind == "attribute" and base.label in ("param_groups", "parameters"):
            made.kind = "group"
            made.of = base.of
        elif base.kind == "list" and base.parts and base.is_open:
            if len(base.parts) == 1:
                return next(iter(base.parts.values()))
            made.deps |= frozenset(base.parts.values())
        elif base.kind in ("checkpoint", "field"):
            return Value("field", "", self._path(), node.lineno, of=base)
        return made

    def _read_loader(self, iterated: Value, node: Any) -> None:
        """Walk over the data set of a loader that a loop reads: it may draw random numbers."""
        for value in [iterated, *list_inner(iterated)]:
            base = root(value)
            if base.kind != "loader":
                continue
            self._event("iterate", base, {}, node)
            dataset = base.parts.get("dataset")
            if dataset is None or base in self._loaders_read:
                continue
            self._loaders_read.add(base)
            dataset = root(dataset)
            if isinstance(dataset.cls, Class):
                for name in ("__getitem__", "__iter__"):
                    method = self._find_method(dataset.cls, name)
                    if method:
                        self._call_function(method, [dataset, Value()], {}, node)

    # Calls

    def _of_call(self, node: ast.Call) -> Value:
        called = self.value(node.func)
        args: list[Value] = []
        named: dict[str, Value] = {}
        for argument in node.args:
            value = self.value(argument)
            if isinstance(argument, ast.Starred) and root(value).kind == "list" and not root(value).is_open:
                args += root(value).parts.values()
            else:
                args.append(value)
        for keyword in node.keywords:
            value = self.value(keyword.value)
            if keyword.arg is not None:
                named[keyword.arg] = value
            elif root(value).kind == "dict":
                for key, part in root(value).parts.items():
                    named[str(key)] = part
            else:
                args.append(Value("open", deps=values.join_deps([value])))
        return self._call(called, args, named, node)

    def _call(self, called: Value, args: list[Value], named: dict[str, Value], node: Any) -> Value:
        if called.kind == "function" and isinstance(called.cls, Function):
            return self._call_function(called.cls, args, named, node)
        if called.kind == "class" and isinstance(called.cls, Class):
            return self._make_instance(called.cls, args, named, node)
        if called.kind == "method" and isinstance(called.cls, Function) and called.of is not None:
            self._method_event(called.of, called.label, args, named, node)
            result = self._call_function(called.cls, [called.of, *args], named, node)
            return self._known_result(called.of, called.label, args, named, node) or result
        if called.kind == "module":
            return self._call_external(called, args, named, node)
        if isinstance(node.func, ast.Attribute) and called.kind != "unknown":
            owner = called.of
            if owner is None:
                owner = self.value(node.func.value)
            return self._call_method(owner, node.func.attr, args, named, node)
        if isinstance(node.func, ast.Attribute):
            return self._call_method(self.value(node.func.value), node.func.attr, args, named, node)
        return self._call_object(called, args, named, node)

    def _call_object(self, called: Value, args: list[Value], named: dict[str, Value], node: Any) -> Value:
        """Call an object, such as a model."""
        base = root(called)
        arguments = _number(args, named)
        if base.kind == "scaler":  # timm's scaler does backward and step
            self._event("backward", called, arguments, node)
            for value in [*args, *named.values()]:
                if kind_of(value) == "optimizer":
                    self._event("step", root(value), arguments, node)
            self._event("step", base, arguments, node)
            return Value(deps=values.join_deps(args))
        self._event("call", called, arguments, node, unparse(node.func))
        if isinstance(base.cls, Class) and base.kind not in ("model", "criterion"):
            method = self._find_method(base.cls, "__call__")
            if method:
                return self._call_function(method, [called, *args], named, node)
        if isinstance(base.cls, Class):
            method = self._find_method(base.cls, "forward")
            if method and method.node not in self._walked:
                self._call_function(method, [called, *args], named, node)
        given = [called, *args, *named.values()]
        made = Value(deps=values.join_deps(given), line=node.lineno, loops=tuple(self._loops))
        made.flags.add("from_call")
        return made

    def _call_function(
        self, function: Function, args: list[Value], named: dict[str, Value], node: Any
    ) -> Value:
        """Walk over a function of the project, and return what it returns."""
        name = getattr(function.node, "name", "lambda")
        unknown = Value(deps=values.join_deps([*args, *named.values()]), line=node.lineno)
        unknown.flags.add("from_call")
        # a function that has trained is started once: `if distributed: mp.spawn(main) else: main()`
        if function.node in self._trained and not self._loops:
            return unknown
        if function.node in self._stack or len(self._stack) >= DEEPEST or len(self.events) > MOST_EVENTS:
            self.missed.add(name)
            self._event("missed", unknown, _number(args, named), node, name)
            return unknown
        frame = Frame(function.module, {}, function.names, name, function.node, owner=function.owner)
        _bind_parameters(function.node, args, named, frame.names, self)
        self._walked.add(function.node)
        self._stack.append(function.node)
        self._frames.append(frame)
        count = len(self._conditions)
        for decorator in getattr(function.node, "decorator_list", []):
            text = unparse(decorator)
            self._conditions.append(Condition(text, Value(), True, decorator))
        try:
            if isinstance(function.node, ast.Lambda):
                frame.returned.append(self.value(function.node.body))
            else:
                self._block(function.node.body)
        finally:
            del self._conditions[count:]
            self._frames.pop()
            self._stack.pop()
        result = unknown
        for number, returned in enumerate(frame.returned):
            result = returned if number == 0 else self._merge_returned(result, returned)
        return result

    def _merge_returned(self, first: Value, second: Value) -> Value:
        if first.kind == "list" and second.kind == "list" and len(first.parts) == len(second.parts):
            made = Value("list", first.label, first.path, first.line)
            for key in first.parts:
                made.parts[key] = self._merge_returned(first.parts[key], second.parts.get(key, Value()))
            return made
        both = kind_of(first) == kind_of(second) and kind_of(first) in values.STATEFUL
        if both and root(first) is not root(second) and not _replaces(first, second):
            root(first).same = second
        # 0 for a new run, or what the name of a file tells
        if first.kind == "const" and second.kind == "unknown":
            return second
        if second.kind == "const" and first.kind == "unknown":
            return first
        return self._either(first, second)

    def _make_instance(self, cls: Class, args: list[Value], named: dict[str, Value], node: Any) -> Value:
        kind = self._kind_of_bases(cls)
        made = Value(kind or "instance", "", self._path(), node.lineno, cls=cls, loops=tuple(self._loops))
        made.options = {**_number(args, named)}
        self._event("create", made, made.options, node, cls.node.name)
        method = self._find_method(cls, "__init__")
        self._walked.add(cls.node)
        if kind == "model" and not _trains_itself(cls.node):
            return made
        if method:
            self._call_function(method, [made, *args], named, node)
        else:
            for number, value in enumerate(args):
                made.parts[number] = value
            made.parts.update(_list_fields(cls.node, args, named))
        self._describe(made, _number(args, named))
        return made

    def _kind_of_bases(self, cls: Class, depth: int = 0) -> str:
        """Return the kind of a class of the project, by its bases and then by its name."""
        for base in cls.node.bases:
            value = self._in_module(cls, base)
            if value.kind == "class" and isinstance(value.cls, Class) and depth < 6:
                kind = self._kind_of_bases(value.cls, depth + 1)
                if kind:
                    return kind
            dotted = value.label if value.kind == "module" else unparse(base)
            last = dotted.rpartition(".")[2]
            if last in ("Module", "LightningModule", "ModuleList", "Sequential") or last.endswith("Module"):
                lower = cls.node.name.lower()
                if values.kind_of_class(cls.node.name) == "ema":
                    return "ema"
                return "criterion" if "loss" in lower or "criterion" in lower else "model"
            if last in ("Optimizer", "LRScheduler", "_LRScheduler", "Sampler", "DistributedSampler"):
                if last == "Optimizer":
                    return "optimizer"
                return "scheduler" if "LR" in last else "sampler"
            if "Dataset" in last or last in ("ImageFolder", "DatasetFolder", "IterDataPipe"):
                return "dataset"
            kind = values.kind_of_class(dotted)
            if kind:
                return kind
        kind = values.kind_of_class(cls.node.name)
        if kind in ("model", "criterion"):
            return ""
        return kind

    def _in_module(self, cls: Class, node: Any) -> Value:
        self._frames.append(Frame(cls.module, cls.names or cls.module.names))
        self._muted += 1
        try:
            return self.value(node)
        finally:
            self._frames.pop()
            self._muted -= 1

    def _find_method(self, cls: Class, name: str, depth: int = 0) -> Function | None:
        for part in cls.node.body:
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and part.name == name:
                return Function(part, cls.module, cls.names, cls)
        for base in cls.node.bases:
            value = self._in_module(cls, base)
            if value.kind == "class" and isinstance(value.cls, Class) and depth < 6:
                method = self._find_method(value.cls, name, depth + 1)
                if method:
                    return method
        return None

    def _find_class_value(self, cls: Class, name: str) -> Value | None:
        for part in cls.node.body:
            if isinstance(part, ast.Assign) and any(unparse(target) == name for target in part.targets):
                value = self._in_module(cls, part.value)
                return (
                    Value("const", name, self._path(), part.lineno, key=value.key)
                    if value.kind == "const"
                    else value
                )
        return None

    def _call_method(
        self, owner: Value, name: str, args: list[Value], named: dict[str, Value], node: Any
    ) -> Value:
        """Call a method that the project does not define."""
        self._method_event(owner, name, args, named, node)
        known = self._known_result(owner, name, args, named, node)
        if known is not None:
            return known
        given = [owner, *args, *named.values()]
        made = Value("unknown", "", self._path(), node.lineno, deps=values.join_deps(given))
        made.loops = tuple(self._loops)
        made.flags.add("from_call")
        if name == "format":
            made.node = node
        return made

    def _known_result(
        self, owner: Value, name: str, args: list[Value], named: dict[str, Value], node: Any
    ) -> Value | None:
        """Return the result of a method whose meaning is known."""
        base = root(owner)
        if name == "state_dict" or (name in ("get_state", "bit_generator") and base.kind == "generator"):
            made = Value(
                "state", base.label, self._path(), node.lineno, of=base, deps=frozenset([base, owner])
            )
            prefix = _prefix_of(owner)
            if prefix:
                made.flags.add(prefix)
            return made
        if base.kind in ("checkpoint", "field") and name in ("get", "pop", "setdefault") and args:
            made = self._item(base, args[0], node)
            made.flags.add("optional")
            return made
        if base.kind in ("dict", "list"):
            return self._container_method(base, name, args, node)
        if base.kind == "generator" and name == "manual_seed":
            return owner
        if name == "prepare" or (name == "setup" and base.key == "Fabric"):
            return self._prepare(args, node, name)
        if base.key == "Accelerator" and name == "load_state":
            self._restore_registered(node)
            return None
        if name in {"parse_args", "parse_known_args"}:
            return Value(
                "args",
                "args",
                self._path(),
                node.lineno,
                flags={"namespace"} if base.label != "self" else set(),
            )
        if name in ("parameters", "named_parameters", "param_groups"):
            return Value(
                "attribute", "parameters", self._path(), node.lineno, of=base, deps=frozenset([base])
            )
        if name == "load" and args and base.key == "Fabric":
            return self._load_fabric(args, node)
        if name in _PASSED and not args and base.kind not in ("unknown", "attribute"):
            return owner
        if name in _PASSED and base.kind in (*values.STATEFUL, "loader", "criterion", "wrapped"):
            return owner
        if (
            name in _PASSED
            and len(args) >= 1
            and kind_of(args[0]) in (*values.STATEFUL, "loader", "criterion")
        ):
            return args[0]
        return None

    def _container_method(self, base: Value, name: str, args: list[Value], node: Any) -> Value | None:
        if name in ("items", "values", "keys"):
            made = Value(base.kind, base.label, base.path, base.line, parts=base.parts, is_open=base.is_open)
            made.flags = {name}
            made.deps = base.deps
            return made
        if name == "update" and args:
            self._merge_dict(base, args[0])
            # numbers that a checkpoint replaces
            if root(args[0]).kind in ("field", "checkpoint"):
                for key, part in base.parts.items():
                    if part.kind in ("const", "none"):
                        made = Value("field", str(key), self._path(), node.lineno, of=root(args[0]), key=key)
                        base.parts[key] = made
        elif name == "append" and args:
            base.parts[len(base.parts)] = args[0]
            base.is_open = base.is_open or bool(self._loops)
            base.deps |= values.join_deps(args)
        elif name == "extend":
            base.is_open = True
            base.deps |= values.join_deps(args)
        elif name in ("get", "pop", "setdefault") and args and args[0].kind == "const":
            taken = base.parts.get(args[0].key)
            if name == "pop":
                base.parts.pop(args[0].key, None)
            return taken or Value(deps=values.join_deps([base]))
        elif name == "pop":
            return Value(deps=values.join_deps([base]))
        elif name == "copy":
            return base
        elif name == "sort":
            base.flags.add("sorted")
        else:
            return None
        return Value("none")

    def _restore_registered(self, node: Any) -> None:
        """accelerator.load_state() restores what was registered: numbers in it come from the checkpoint."""
        for event in self.events:
            if event.name == "method" and event.text == "register_for_checkpointing":
                for value in event.args.values():
                    for key, part in root(value).parts.items():
                        if part.kind == "const":
                            made = Value("field", str(key), self._path(), node.lineno, key=key)
                            root(value).parts[key] = made

    def _prepare(self, args: list[Value], node: Any, name: str) -> Value:
        for value in args:
            if name == "prepare":
                root(value).flags.add("prepared")
        if len(args) == 1:
            return args[0]
        return Value("list", "", self._path(), node.lineno, parts=dict(enumerate(args)))

    def _load_fabric(self, args: list[Value], node: Any) -> Value:
        """fabric.load(path, state) restores what is in `state`; without it, it returns the checkpoint."""
        checkpoint = Value("checkpoint", "checkpoint", self._path(), node.lineno)
        self._event("load", checkpoint, {0: args[0]}, node)
        if len(args) > 1:
            state = root(args[1])
            for key, value in list(state.parts.items()):
                made = Value("field", str(key), self._path(), node.lineno, of=checkpoint, key=key)
                self._event("load_state", root(value), {0: made}, node)
                if root(value).kind not in values.STATEFUL:
                    state.parts[key] = made
        return checkpoint

    def _call_external(self, called: Value, args: list[Value], named: dict[str, Value], node: Any) -> Value:
        """Call a function or class of another package, or one that cannot be followed."""
        dotted = called.label
        last = dotted.rpartition(".")[2]
        arguments = _number(args, named)
        known = self._call_builtin(dotted, args, named, node)
        if known is not None:
            return known
        if last in _STARTERS or dotted.endswith("Process"):
            self._start(args, named, node)
        self._event("call", called, arguments, node, dotted)
        if dotted == "super":
            return self._super()
        if dotted in ("torch.load", "torch.jit.load") or last in ("load_checkpoint", "safe_torch_load"):
            checkpoint = Value("checkpoint", "", self._path(), node.lineno, options=arguments)
            self._event("load", checkpoint, arguments, node, dotted)
            return checkpoint
        if dotted == "copy.deepcopy" and args:
            return Value("copied", "", self._path(), node.lineno, of=root(args[0]), loops=tuple(self._loops))
        if last in values.WRAPPERS and args and ("torch" in dotted or "apex" in dotted):
            return self._wrap(args[0], last, node)
        kind = values.kind_of_class(dotted) or values.kind_of_factory(dotted)
        if kind:
            made = Value(kind, "", self._path(), node.lineno, loops=tuple(self._loops))
            made.label = ""
            self._describe(made, arguments)
            made.key = last
            self._event("create", made, arguments, node, dotted)
            return made
        if last in _PASSED and args and kind_of(args[0]) not in VAGUE_OR_OPTION:
            return args[0]
        made = Value(
            "unknown", "", self._path(), node.lineno, deps=values.join_deps([*args, *named.values()])
        )
        made.loops = tuple(self._loops)
        made.flags.add("from_call")
        if args and all(value.kind in ("const", "text") or "fixed" in value.flags for value in args):
            made.flags.add("fixed")
        made.key = dotted
        if last in ("Accelerator", "Fabric"):
            made.kind = "instance"
            made.key = last
        return made

    def _wrap(self, value: Value, name: str, node: Any) -> Value:
        # both branches of a condition wrap the same model
        if value.kind == "wrapped" and value.key == values.WRAPPERS[name]:
            return value
        made = Value("wrapped", "", self._path(), node.lineno, of=value, key=values.WRAPPERS[name])
        made.flags.add(name)
        return made

    def _super(self) -> Value:
        frame = self._frames[-1]
        owner = frame.names.get("self", Value())
        if frame.owner is None:
            return Value("unknown")
        for base in frame.owner.node.bases:
            value = self._in_module(frame.owner, base)
            if value.kind == "class" and isinstance(value.cls, Class):
                made = Value("instance", "super", of=owner, cls=value.cls)
                made.same = None
                made.parts = root(owner).parts
                return made
        return Value("unknown", "super")

    def _start(self, args: list[Value], named: dict[str, Value], node: Any) -> None:
        """Walk over a function that a launcher starts, such as mp.spawn(main, args=(2,))."""
        inner = list(args)
        for value in named.values():
            inner.append(value)
        given: list[Value] = []
        if "args" in named and root(named["args"]).kind == "list":
            given = [Value("rank", "rank"), *root(named["args"]).parts.values()]
        for value in inner:
            if value.kind in ("function", "method") and isinstance(value.cls, Function):
                first = [value.of] if value.kind == "method" and value.of is not None else []
                self._call_function(value.cls, [*first, *(given or args[1:])], {}, node)

    def _call_builtin(
        self, dotted: str, args: list[Value], named: dict[str, Value], node: Any
    ) -> Value | None:
        """Call a builtin function, or one of itertools and tqdm that keeps its argument."""
        last = dotted.rpartition(".")[2]
        if last in ("range", "trange") and args:
            made = Value("range", "", self._path(), node.lineno, deps=values.join_deps(args))
            made.parts["start"] = args[0] if len(args) > 1 else Value("const", key=0, line=node.lineno)
            return made
        if dotted == "itertools.count":
            made = Value("range", "", self._path(), node.lineno, deps=values.join_deps(args))
            first = Value("const", key=0, line=node.lineno)
            made.parts["start"] = args[0] if args else named.get("start", first)
            return made
        if last in ("tqdm", "reversed", "track", "progress_bar") and args:
            return args[0]
        if dotted == "enumerate" and args:
            made = Value("enumerated", "", self._path(), node.lineno, deps=frozenset([args[0]]))
            start = named.get("start") or (args[1] if len(args) > 1 else Value("const", key=0))
            made.parts["start"] = start
            return made
        if dotted == "dict":
            made = Value("dict", "", self._path(), node.lineno, parts=dict(named))
            for value in args:
                self._merge_dict(made, value)
            return made
        if dotted in ("list", "tuple", "iter") and args and root(args[0]).kind in ("list", "dict", "loader"):
            if dotted == "iter":
                self._event("iter", root(args[0]), {}, node)
                self._read_loader(args[0], node)
            return args[0]
        if dotted in ("int", "float") and args and args[0].kind in ("field", "counter", "loop", "option"):
            return args[0]
        if dotted == "getattr" and len(args) > 1 and args[1].kind == "const":
            attribute = ast.Attribute(node.args[0], str(args[1].key), ast.Load())
            return self._of_attribute(ast.copy_location(attribute, node))
        return None

    def _describe(self, made: Value, arguments: dict[Any, Value]) -> None:
        """Keep what a loader, sampler or scheduler is made of."""
        made.options = arguments
        if made.kind == "loader":
            dataset = arguments.get(0) or arguments.get("dataset")
            if dataset is not None:
                made.parts["dataset"] = dataset
            if "sampler" in arguments:
                made.parts["sampler"] = arguments["sampler"]
            if "batch_sampler" in arguments:
                made.parts["sampler"] = arguments["batch_sampler"]
        if made.kind in ("scheduler", "optimizer", "sampler", "ema"):
            first = arguments.get(0) or arguments.get("optimizer")
            if first is not None:
                made.parts["first"] = first

    def _method_event(
        self, owner: Value, name: str, args: list[Value], named: dict[str, Value], node: Any
    ) -> None:
        """List what a method call means."""
        base = root(owner)
        arguments = _number(args, named)
        if name == "load_state_dict" or (name in ("set_state", "setstate") and base.kind == "generator"):
            self._event("load_state", base, arguments, node, _prefix_of(owner))
        elif name == "step":
            for value in args:
                if base.kind == "scaler" and kind_of(value) == "optimizer":
                    self._event("step", root(value), arguments, node)
            self._event("step", base, arguments, node)
        elif name == "backward" and base.kind != "module":
            self._event("backward", base, arguments, node)
        elif name == "step_update" and base.kind == "scheduler":
            self._event("step", base, arguments, node)
        elif name == "state_dict":
            self._event("state", base, arguments, node)
        self._event("method", base, arguments, node, name)

    def _event(self, name: str, value: Value, args: dict[Any, Value], node: Any, text: str = "") -> None:
        if self._muted or len(self.events) > MOST_EVENTS:
            return
        if name == "step" and self._loops:
            self._trained.update(self._stack)
        functions = tuple(getattr(function, "name", "") for function in self._stack)
        line = getattr(node, "lineno", 0)
        conditions = tuple(self._conditions)
        event = Event(
            name,
            value,
            args,
            node,
            self._path(),
            line,
            tuple(self._loops),
            conditions,
            functions,
            len(self.events),
            text,
        )
        self.events.append(event)

    def _path(self) -> str:
        return self._frames[-1].module.source.path


VAGUE_OR_OPTION = (*values.VAGUE, "option", "module", "attribute")


def list_inner(value: Value) -> list[Value]:
    """Return the values inside enumerate(), zip() and others."""
    inner = []
    for dep in values.list_deps(value):
        if dep is not value:
            inner.append(dep)
    return inner


def _list_called(tree: ast.Module) -> set[str]:
    """Return the names of the functions that a module calls or gives to others."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            names.add(node.id)
    return names


def _place_of_entry(node: Any) -> tuple[int, int]:
    if node.name in ("main", "main_worker", "train_net", "train_main", "run"):
        return 0, node.lineno
    return 1, node.lineno


def _prefix_of(owner: Value) -> str:
    """Return what a wrapper writes before the names of a state: "prefix:module.", "" without one."""
    while owner.kind == "wrapped" and not owner.key and owner.of is not None:
        owner = owner.of
    return f"prefix:{owner.key}" if owner.kind == "wrapped" else ""


def _shift(value: Value, offset: int) -> Value:
    """Return a number plus a constant."""
    if value.kind in ("loop", "field", "shifted", "option", "counter"):
        of = value.of if value.kind == "shifted" else value
        made = Value("shifted", value.label, value.path, value.line, of=of, deps=frozenset([value]))
        made.offset = value.offset + offset if value.kind == "shifted" else offset
        return made
    if value.kind == "const" and isinstance(value.key, int):
        return Value("const", value.label, value.path, value.line, key=value.key + offset, loops=value.loops)
    return Value("unknown", deps=values.join_deps([value]), line=value.line)


def _replaces(old: Value, new: Value) -> bool:
    """Return whether a new object is made of the old one, as a scheduler of a scheduler."""
    return root(old) in values.list_deps(new) or root(old) in [root(part) for part in new.options.values()]


def _find_counted(node: Any) -> Any:
    """Return the target of `x += ...`, `x -= 1` or `x = x + 1`; None for other nodes."""
    if isinstance(node, ast.AugAssign):
        is_sum = isinstance(node.op, ast.Add | ast.Sub) and isinstance(node.target, ast.Name | ast.Attribute)
        return node.target if is_sum else None
    if not isinstance(node, ast.Assign) or len(node.targets) > 1 or not isinstance(node.value, ast.BinOp):
        return None
    target = node.targets[0]
    is_sum = isinstance(node.value.op, ast.Add) and isinstance(node.value.right, ast.Constant)
    if (
        is_sum
        and isinstance(target, ast.Name | ast.Attribute)
        and unparse(target) == unparse(node.value.left)
    ):
        return target
    return None


def _walk_loop(node: Any) -> list[ast.AST]:
    """Return the nodes in the body of a loop, without those of inner functions."""
    nodes: list[ast.AST] = []
    todo: list[ast.AST] = list(node.body)
    while todo:
        current = todo.pop()
        if isinstance(current, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            continue
        nodes.append(current)
        todo += ast.iter_child_nodes(current)
    return nodes


def _is_main_test(node: ast.expr) -> bool:
    if not isinstance(node, ast.Compare) or not isinstance(node.left, ast.Name):
        return False
    return node.left.id == "__name__" and isinstance(node.ops[0], ast.Eq)


def _is_property(node: Any) -> bool:
    return any(unparse(decorator) in ("property", "cached_property") for decorator in node.decorator_list)


def _trains_itself(node: ast.ClassDef) -> bool:
    """Return whether a module has its own optimizers, as those of GANs do."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and part.attr in ("backward", "optim", "Adam", "zero_grad"):
            return True
    return False


def _list_fields(node: ast.ClassDef, args: list[Value], named: dict[str, Value]) -> dict[Any, Value]:
    """Return the fields of a dataclass."""
    fields: dict[Any, Value] = dict(named)
    names = []
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            names.append(part.target.id)
    for name, value in zip(names, args, strict=False):
        fields[name] = value
    return fields


def _number(args: list[Value], named: dict[str, Value]) -> dict[Any, Value]:
    arguments: dict[Any, Value] = dict(enumerate(args))
    arguments.update(named)
    return arguments


def _bind(target: Any, value: Value, names: dict[str, Value]) -> None:
    if isinstance(target, ast.Name):
        names[target.id] = value
    elif isinstance(target, ast.Tuple | ast.List):
        for number, part in enumerate(target.elts):
            _bind(part, value.parts.get(number, Value()), names)


def _bind_parameters(
    node: Any, args: list[Value], named: dict[str, Value], names: dict[str, Value], tracer: Tracer
) -> None:
    """Bind the parameters of a function to the arguments of a call."""
    arguments = node.args
    is_static = any(unparse(part) == "staticmethod" for part in getattr(node, "decorator_list", []))
    parameters = [*arguments.posonlyargs, *arguments.args]
    given = list(args)
    if is_static and given and parameters and given[0].cls is not None and parameters[0].arg != "self":
        given = given[1:]
    is_open = any(value.kind == "open" for value in given)
    for number, parameter in enumerate(parameters):
        if number < len(given) and given[number].kind != "open":
            names[parameter.arg] = given[number]
    if arguments.vararg:
        rest = given[len(parameters) :]
        names[arguments.vararg.arg] = Value("list", parts=dict(enumerate(rest)))
    others = {}
    known = {parameter.arg for parameter in [*parameters, *arguments.kwonlyargs]}
    for name, value in named.items():
        if name in known:
            names[name] = value
        else:
            others[name] = value
    if arguments.kwarg:
        names[arguments.kwarg.arg] = Value("dict", parts=dict(others), is_open=is_open)
    defaults = dict(zip([part.arg for part in parameters[::-1]], arguments.defaults[::-1], strict=False))
    for part, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        defaults[part.arg] = default
    for parameter in [*parameters, *arguments.kwonlyargs]:
        if parameter.arg in names:
            continue
        default = defaults.get(parameter.arg)
        if isinstance(default, ast.Constant):
            names[parameter.arg] = tracer.value(default)
            if names[parameter.arg].kind == "const":
                names[parameter.arg].kind = "option"  # a caller may give another one
        else:
            kind = values.kind_of_name(parameter.arg)
            made = Value(kind or "unknown", parameter.arg, node=parameter)
            made.flags.add("by_name")
            if parameter.arg in ("args", "cfg", "config", "opt", "hps", "hparams", "conf", "params"):
                made.kind = "args"
            names[parameter.arg] = made

"""What a module gets from outside: imports, builtin functions, and functions of other packages.

A row of BUILTINS or PACKAGES names a function, with its package or from any, and what follows it here: the
method returns what the call returns, or None if it is another one.
"""

import ast
import contextlib
from typing import Any

from bootfile.lint import values
from bootfile.lint.methods import LISTINGS, PASSED, Methods
from bootfile.lint.record import Call, Class, Frame, Function, Module
from bootfile.lint.sources import unparse
from bootfile.lint.values import Value, kind_of, list_deps, root

VAGUE_OR_OPTION = (*values.VAGUE, "option", "module", "attribute")
# calls of these are not listed as events
BUILTINS = {
    "range": "_make_range", "trange": "_make_range", "itertools.count": "_make_count",
    "tqdm": "_keep_first", "reversed": "_keep_first", "track": "_keep_first", "progress_bar": "_keep_first",
    "enumerate": "_enumerate", "zip": "_zip", "dict": "_make_dict", "list": "_make_list",
    "tuple": "_make_list", "iter": "_iterate", "str": "_make_text", "int": "_make_number",
    "float": "_make_number", "getattr": "_get_attribute",
}  # fmt: skip
PACKAGES = {
    "super": "_super", "copy.deepcopy": "_copy", "torch.load": "_load_checkpoint",
    "torch.jit.load": "_load_checkpoint", "load_checkpoint": "_load_checkpoint",
    "safe_torch_load": "_load_checkpoint", "torch_load": "_load_checkpoint",
    **dict.fromkeys(values.WRAPPERS, "_make_wrapper"),
}  # fmt: skip
# what these return is the name of a file, for file_names.py
NAMES_FILES = (
    "join", "dirname", "abspath", "realpath", "normpath", "expanduser", "fspath", "Path", "PurePath", "open",
)  # fmt: skip
# functions of any package, by their last name
_OF_ANY = (
    "range", "trange", "tqdm", "reversed", "track", "progress_bar", "load_checkpoint", "safe_torch_load",
    "torch_load", *values.WRAPPERS,
)  # fmt: skip
# mp.spawn(main, ...): what it starts is the training
STARTERS = ("spawn", "launch", "run_main", "notebook_launcher", "debug_launcher", "wrapper")


class Functions(Methods):
    """Follows imports, and functions whose meaning is known."""

    def _call_external(self, call: Call) -> Value:
        """Call a function or class of another package, or one that cannot be followed."""
        dotted = call.name
        last = dotted.rpartition(".")[2]
        known = self._follow(BUILTINS, last, call)
        if known is not None:
            return known
        if last in STARTERS or dotted.endswith("Process"):
            self._start(call)
        self._event("call", call.called, call.arguments, call.node, dotted)
        known = self._follow(PACKAGES, last, call)
        kind = values.kind_of_class(dotted) or values.kind_of_factory(dotted)
        if known is not None or not kind:
            return known or self._call_other(call, last)
        made = self._make(kind, call.node, loops=tuple(self._loops), key=last)
        self._describe(made, call.arguments)
        self._event("create", made, call.arguments, call.node, dotted)
        return made

    def _follow(self, table: dict[str, str], last: str, call: Call) -> Value | None:
        method = table.get(call.name) or (table.get(last) if last in _OF_ANY else None)
        result: Value | None = getattr(self, method)(call) if method else None
        return result

    def _call_other(self, call: Call, last: str) -> Value:
        # `model = to_device(model)`: it is still the model
        if last in PASSED and call.args and kind_of(call.args[0]) not in VAGUE_OR_OPTION:
            return call.args[0]
        made = self._made_by_call(call.node, call.arguments.values())
        made.key = call.name
        made.node = call.node if call.name == "open" else None
        made.options = call.arguments if last in NAMES_FILES else {}
        # `os.path.join(folder, "last.pt")`: the same file each time
        is_fixed = all(value.kind in ("const", "text") or "fixed" in value.flags for value in call.args)
        made.flags |= {"fixed"} if call.args and is_fixed else set()
        made.flags |= {"listing"} if last in LISTINGS else set()
        # `sorted(files)` and `max(files)` compare texts
        is_sorted = last in ("sorted", "max") and bool(call.args)
        made.flags |= {"keyed" if call.named else "by_text"} if is_sorted else set()
        if last in ("Accelerator", "Fabric"):
            made.kind, made.key = "instance", last
        if last == "Exact" and call.name.startswith("bootfile."):
            made.kind, made.key, made.options, made.node = "instance", last, call.arguments, call.node
        return made

    # Builtins

    def _make_range(self, call: Call) -> Value | None:
        if not call.args:
            return None
        zero = [] if len(call.args) > 1 else [Value("const", key=0, line=call.node.lineno)]
        start, end = [*zero, *call.args][:2]
        return self._make("range", call.node, call.args, parts={"start": start, "end": end})

    def _make_count(self, call: Call) -> Value:
        """itertools.count(start, step): a range without an end."""
        start = call.get(0, "start") or Value("const", key=0, line=call.node.lineno)
        return self._make("range", call.node, call.args, parts={"start": start})

    def _keep_first(self, call: Call) -> Value | None:
        return call.args[0] if call.args else None

    def _enumerate(self, call: Call) -> Value | None:
        start = call.get(1, "start") or Value("const", key=0)
        made = self._make("enumerated", call.node, parts={"start": start})
        made.deps = frozenset(call.args[:1])
        return made if call.args else None

    def _zip(self, call: Call) -> Value:
        made = self._made_by_call(call.node, call.args)
        made.key, made.options = "zip", {**dict(enumerate(call.args))}
        return made

    def _make_dict(self, call: Call) -> Value:
        made = self._make("dict", call.node, parts=dict(call.named))
        for value in call.args:
            self._merge_dict(made, value)
        return made

    def _make_list(self, call: Call) -> Value | None:
        is_known = bool(call.args) and kind_of(call.args[0]) in ("list", "dict", "loader")
        return call.args[0] if is_known else None

    def _iterate(self, call: Call) -> Value | None:
        made = self._make_list(call)
        if made is not None:
            self._read_loader(made, call.node)
        return made

    def _make_text(self, call: Call) -> Value:
        deps, parts = values.join_deps(call.args), call.arguments
        return Value("text", deps=deps, line=call.node.lineno, node=call.node, options=parts)

    def _make_number(self, call: Call) -> Value | None:
        given = call.args[0] if call.args else Value()
        # `float("inf")`, `int(1e9)`
        if given.kind == "const":
            with contextlib.suppress(ValueError, TypeError, OverflowError):
                return Value("const", key=float(given.key), line=call.node.lineno, loops=tuple(self._loops))
        return given if given.kind in ("field", "counter", "loop", "option") else None

    def _get_attribute(self, call: Call) -> Value | None:
        if len(call.args) < 2 or call.args[1].kind != "const":
            return None
        attribute = ast.Attribute(call.node.args[0], str(call.args[1].key), ast.Load())
        return self.value(ast.copy_location(attribute, call.node))

    # Other packages

    def _super(self, call: Call) -> Value:
        owner, instance = self.frames[-1].owner, self.frames[-1].names.get("self", Value())
        if owner is None:
            return Value()
        # the first base of the project; those of other packages cannot be entered
        found = [self._in_module(owner, base) for base in owner.node.bases]
        classes = [value.cls for value in found if value.kind == "class" and isinstance(value.cls, Class)]
        if not classes:
            return Value("unknown", "super")
        return Value("instance", "super", of=instance, cls=classes[0], parts=root(instance).parts)

    def _copy(self, call: Call) -> Value | None:
        loops = tuple(self._loops)
        return self._make("copied", call.node, of=root(call.args[0]), loops=loops) if call.args else None

    def _load_checkpoint(self, call: Call) -> Value:
        checkpoint = self._make("checkpoint", call.node, options=call.arguments)
        self._event("load", checkpoint, call.arguments, call.node, call.name)
        return checkpoint

    def _make_wrapper(self, call: Call) -> Value | None:
        """DistributedDataParallel(model), torch.compile(model)."""
        is_known = bool(call.args) and ("torch" in call.name or "apex" in call.name)
        return self._wrap(call.args[0], call.name.rpartition(".")[2], call.node) if is_known else None

    def _start(self, call: Call) -> None:
        """Walk over a function that a launcher starts, such as mp.spawn(main, args=(2,))."""
        args = root(call.named.get("args", Value()))
        given = list(args.parts.values()) if args.kind == "list" else call.args[1:]
        # mp.spawn() gives the rank first, mp.Process() gives `args` alone
        is_ranked = args.kind == "list" and not unparse(call.node.func).endswith("Process")
        given = [Value("rank", "rank"), *given] if is_ranked else given
        # a loop that starts processes is not one of the training
        loops, self._loops = self._loops, []
        for value in [value for value in call.arguments.values() if isinstance(value.cls, Function)]:
            first = [value.of] if value.kind == "method" and value.of is not None else []
            self._call_function(value.cls, [*first, *given], {}, call.node)
        self._loops = loops

    def _read_loader(self, iterated: Value, node: Any) -> None:
        """Walk over the data set of a loader that a loop reads: it may draw random numbers."""
        inner = [value for value in list_deps(iterated) if value is not iterated]
        for loader in [root(value) for value in [iterated, *inner] if kind_of(value) == "loader"]:
            self._event("iterate", loader, {}, node)
            dataset = root(loader.parts.get("dataset", Value()))
            # once: each epoch does the same
            names = () if loader in self._loaders_read else ("__getitem__", "__iter__")
            self._loaders_read |= {loader} if "dataset" in loader.parts else set()
            for method in [self.find_method(dataset, name) for name in names]:
                if method is not None:
                    self._call_function(method, [dataset, Value()], {}, node)

    # Imports: the statements of a module of the project are walked over once

    def _run_module(self, module: Module, main: bool) -> None:
        # only the script itself runs what stands under `if __name__ == "__main__"`
        module.names["__name__"] = Value("const", key="__main__" if main else "")
        module.names["__file__"] = Value("path", "__file__")
        self.frames.append(Frame(module, module.names))
        try:
            self._block(module.source.tree.body)
        finally:
            self.frames.pop()

    def _do_import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.partition(".")[0]
            full = alias.name if alias.asname else name
            self.frames[-1].names[name] = self._import(alias.name, full, 0, node)

    def _do_importfrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        path = self.project.find(module, node.level, self._path())
        loaded = self._load(path) if path else None
        names = self.frames[-1].names
        for alias in node.names:
            full = f"{module}.{alias.name}"
            inner = self.project.find(full.lstrip("."), node.level, self._path())
            if alias.name == "*":
                names.update({**(loaded.names if loaded else {}), **names})
                continue
            # a name in a module of the project, or a module in a package of it, or of another package
            found = loaded.names.get(alias.name) if loaded else None
            if found is None and inner and self._load(inner):
                found = Value("module", full, inner, cls=self._load(inner))
            if found is None:
                self.externals.add(full)
                found = self._make("module", node, label=full, key=bool(path))
            names[alias.asname or alias.name] = found

    def _import(self, wanted: str, full: str, level: int, node: Any) -> Value:
        path = self.project.find(wanted, level, self._path())
        module = self._load(path) if path else None
        if module is not None:  # `import a.b` binds a
            cls, key = (module, None) if wanted == full else (None, True)
            return Value("module", full, path, cls=cls, key=key)
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
        around, self._loops, self._conditions = (self._loops, self._conditions), [], []
        try:
            self._run_module(module, main=False)
        finally:
            self._muted -= 1
            self._loops, self._conditions = around
        return module

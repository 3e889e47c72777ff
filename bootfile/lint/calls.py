"""Follow calls: into functions and classes of the project, or of other packages by their names."""

import ast
from typing import Any

from bootfile.lint import values
from bootfile.lint.known import LISTINGS, PASSED, Known, number_arguments
from bootfile.lint.record import MOST_EVENTS, Class, Condition, Frame, Function
from bootfile.lint.syntax import trains_itself, unparse
from bootfile.lint.values import Value, kind_of, root

DEEPEST = 14
_STARTERS = ("spawn", "launch", "run_main", "notebook_launcher", "debug_launcher", "wrapper")
VAGUE_OR_OPTION = (*values.VAGUE, "option", "module", "attribute")


class Calls(Known):
    """Follows calls."""

    def _of_call(self, node: ast.Call) -> Value:
        called = self.value(node.func)
        args: list[Value] = []
        named: dict[str, Value] = {}
        for argument in node.args:
            value = self.value(argument)
            # `f(*args)` with a known list, `f(**options)` with a known dictionary: the arguments one by one
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
        # first what the project defines, which is entered; then other packages; then methods by their names
        if called.kind == "function" and isinstance(called.cls, Function):
            return self._call_function(called.cls, args, named, node)
        if called.kind == "class" and isinstance(called.cls, Class):
            return self._make_instance(called.cls, args, named, node)
        if called.kind == "method" and isinstance(called.cls, Function) and called.of is not None:
            self._method_event(called.of, called.label, args, named, node)
            # a method of the project's own optimizer: entered, and also what the name means for any optimizer
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
        arguments = number_arguments(args, named)
        if base.kind == "scaler":  # timm's scaler does backward and step
            self._event("backward", called, arguments, node)
            for value in [*args, *named.values()]:
                if kind_of(value) == "optimizer":
                    self._event("step", root(value), arguments, node)
            self._event("step", base, arguments, node)
            return Value(deps=values.join_deps(args))
        self._event("call", called, arguments, node, unparse(node.func))
        # `trainer()` runs __call__(); `model(batch)` runs forward(), once is enough for its events
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
        # recursive, too deep or too much: the rules learn that something was missed here
        if function.node in self._stack or len(self._stack) >= DEEPEST or len(self.events) > MOST_EVENTS:
            self.missed.add(name)
            self._event("missed", unknown, number_arguments(args, named), node, name)
            return unknown
        frame = Frame(function.module, {}, function.names, name, function.node, owner=function.owner)
        bind_parameters(function.node, args, named, frame.names, self)
        for parameter, value in frame.names.items():
            if (value.kind == "const" and isinstance(value.key, bool)) or value.kind == "dict":
                frame.given[parameter] = value
        self._walked.add(function.node)
        self._stack.append(function.node)
        functions = self._functions
        self._functions = (*functions, getattr(function.node, "name", ""))
        self._frames.append(frame)
        count = len(self._conditions)
        # @torch.no_grad(), @rank_zero_only: under it the whole function is conditional
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
            self._functions = functions
        # several returns: their values are merged, as those of two branches
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
        # `return Adam(...)` in one branch, `return SGD(...)` in the other: one object
        both = kind_of(first) == kind_of(second) and kind_of(first) in values.STATEFUL
        if both and root(first) is not root(second) and not replaces(first, second):
            root(first).same = second
        # 0 for a new run, or what the name of a file tells
        if first.kind == "const" and second.kind == "unknown":
            return second
        if second.kind == "const" and first.kind == "unknown":
            return first
        return self._either(first, second)

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

    def _make_instance(self, cls: Class, args: list[Value], named: dict[str, Value], node: Any) -> Value:
        kind = self._kind_of_bases(cls)
        made = Value(kind or "instance", "", self._path(), node.lineno, cls=cls, loops=tuple(self._loops))
        made.options = {**number_arguments(args, named)}
        self._event("create", made, made.options, node, cls.node.name)
        method = self._find_method(cls, "__init__")
        self._walked.add(cls.node)
        # what a module is made of is not looked into: its state has it all
        if kind == "model" and not trains_itself(cls.node):
            return made
        if method:
            self._call_function(method, [made, *args], named, node)
        else:
            for number, value in enumerate(args):
                made.parts[number] = value
            made.parts.update(_list_fields(cls.node, args, named))
        self._describe(made, number_arguments(args, named))
        return made

    def _kind_of_bases(self, cls: Class, depth: int = 0) -> str:
        """Return the kind of a class of the project, by its bases and then by its name."""
        for base in cls.node.bases:
            value = self._in_module(cls, base)
            if value.kind == "class" and isinstance(value.cls, Class) and depth < 6:
                kind = self._kind_of_bases(value.cls, depth + 1)
                if kind:
                    return kind
            # a class of another package: its name tells the kind
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
        # no base says it: the name of the class alone, but for models, which have many other meanings
        kind = values.kind_of_class(cls.node.name)
        return "" if kind in ("model", "criterion") else kind

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
        if name in LISTINGS:
            made.flags.add("listing")
        if name == "format":
            made.node = node
        return made

    def _call_external(self, called: Value, args: list[Value], named: dict[str, Value], node: Any) -> Value:
        """Call a function or class of another package, or one that cannot be followed."""
        dotted = called.label
        last = dotted.rpartition(".")[2]
        arguments = number_arguments(args, named)
        known = self._call_builtin(dotted, args, named, node)
        if known is not None:
            return known
        # mp.spawn(main, ...): what it starts is the training
        if last in _STARTERS or dotted.endswith("Process"):
            self._start(args, named, node)
        self._event("call", called, arguments, node, dotted)
        if dotted == "super":
            return self._super()
        if dotted in ("torch.load", "torch.jit.load") or last in (
            "load_checkpoint",
            "safe_torch_load",
            "torch_load",
        ):
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
        # `model = to_device(model)`: it is still the model
        if last in PASSED and args and kind_of(args[0]) not in VAGUE_OR_OPTION:
            return args[0]
        made = Value(
            "unknown", "", self._path(), node.lineno, deps=values.join_deps([*args, *named.values()])
        )
        made.loops = tuple(self._loops)
        made.flags.add("from_call")
        # `os.path.join(folder, "last.pt")`: the same file each time
        if args and all(value.kind in ("const", "text") or "fixed" in value.flags for value in args):
            made.flags.add("fixed")
        made.key = dotted
        if last in LISTINGS:
            made.flags.add("listing")
        # `sorted(files)` and `max(files)` compare texts
        if last in ("sorted", "max") and args:
            made.flags.add("keyed" if named else "by_text")
        is_exact = last == "Exact" and dotted.startswith("bootfile.")
        if last in ("Accelerator", "Fabric") or is_exact:
            made.kind = "instance"
            made.key = last
        if is_exact:
            made.options = arguments
            made.node = node
        return made

    def _super(self) -> Value:
        frame = self._frames[-1]
        owner = frame.names.get("self", Value())
        if frame.owner is None:
            return Value("unknown")
        # the first base of the project; those of other packages cannot be entered
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
            given = list(root(named["args"]).parts.values())
            # mp.spawn() gives the rank first, mp.Process() gives `args` alone
            if not unparse(node.func).endswith("Process"):
                given.insert(0, Value("rank", "rank"))
        # a loop that starts processes is not one of the training
        loops, self._loops = self._loops, []
        for value in inner:
            if value.kind in ("function", "method") and isinstance(value.cls, Function):
                first = [value.of] if value.kind == "method" and value.of is not None else []
                self._call_function(value.cls, [*first, *(given or args[1:])], {}, node)
        self._loops = loops

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
            start = named.get("start")
            if not start and len(args) > 1:
                start = args[1]
            made.parts["start"] = start or Value("const", key=0)
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
        if dotted == "str":
            return Value("text", deps=values.join_deps(args), line=node.lineno, node=node)
        if dotted in ("int", "float") and args and args[0].kind in ("field", "counter", "loop", "option"):
            return args[0]
        if dotted == "getattr" and len(args) > 1 and args[1].kind == "const":
            attribute = ast.Attribute(node.args[0], str(args[1].key), ast.Load())
            return self.value(ast.copy_location(attribute, node))
        return None

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
            # once: each epoch does the same
            self._loaders_read.add(base)
            dataset = root(dataset)
            if isinstance(dataset.cls, Class):
                for name in ("__getitem__", "__iter__"):
                    method = self._find_method(dataset.cls, name)
                    if method:
                        self._call_function(method, [dataset, Value()], {}, node)


def list_inner(value: Value) -> list[Value]:
    """Return the values inside enumerate(), zip() and others."""
    return [dep for dep in values.list_deps(value) if dep is not value]


def replaces(old: Value, new: Value) -> bool:
    """Return whether a new object is made of the old one, as a scheduler of a scheduler."""
    return root(old) in values.list_deps(new) or root(old) in [root(part) for part in new.options.values()]


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


def bind_parameters(
    node: Any, args: list[Value], named: dict[str, Value], names: dict[str, Value], calls: Known
) -> None:
    """Bind the parameters of a function to the arguments of a call."""
    arguments = node.args
    is_static = any(unparse(part) == "staticmethod" for part in getattr(node, "decorator_list", []))
    parameters = [*arguments.posonlyargs, *arguments.args]
    given = list(args)
    # a static method gets no object, although it was called on one
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
            names[parameter.arg] = calls.value(default)
            if names[parameter.arg].kind == "const":
                names[parameter.arg].kind = "option"  # a caller may give another one
        else:
            names[parameter.arg] = _make_parameter(parameter)


def _make_parameter(parameter: ast.arg) -> Value:
    """Return the value of a parameter that no call gives: what its name tells."""
    kind = values.kind_of_name(parameter.arg)
    made = Value(kind or "unknown", parameter.arg, node=parameter)
    made.flags.add("by_name")
    if parameter.arg in ("args", "cfg", "config", "opt", "hps", "hparams", "conf", "params"):
        made.kind = "args"
    if parameter.arg in ("fabric", "accelerator"):
        made.kind = "instance"
        made.key = parameter.arg.capitalize()
    return made

"""Follow calls into the functions and classes of the project."""

import ast
import functools
from typing import Any

from bootfile.lint import values
from bootfile.lint.functions import Functions
from bootfile.lint.methods import LISTINGS
from bootfile.lint.record import MOST_EVENTS, Binding, Call, Class, Condition, Frame, Function
from bootfile.lint.sources import trains_itself, unparse
from bootfile.lint.values import Value, kind_of, root

DEEPEST = 14
_ARGUMENTS = ("args", "cfg", "config", "opt", "hps", "hparams", "conf", "params")
# methods of a path that give the same name each time
_JOINS = ("joinpath", "with_suffix", "with_name", "resolve", "absolute", "expanduser", "as_posix")
# bases of other packages -> the kind of a class of the project
_BASES = {
    "Optimizer": "optimizer", "LRScheduler": "scheduler", "_LRScheduler": "scheduler", "Sampler": "sampler",
    "DistributedSampler": "sampler", "ImageFolder": "dataset", "DatasetFolder": "dataset",
    "IterDataPipe": "dataset", "LightningModule": "model", "ModuleList": "model", "Sequential": "model",
}  # fmt: skip


class Calls(Functions):
    """Follows calls."""

    def _of_call(self, node: ast.Call) -> Value:
        called = self.value(node.func)
        args: list[Value] = []
        named: dict[str, Value] = {}
        for argument in node.args:
            value = self.value(argument)
            # `f(*args)` with a known list, `f(**options)` with a known dictionary: the arguments one by one
            is_list = isinstance(argument, ast.Starred) and kind_of(value) == "list"
            args += root(value).parts.values() if is_list and not root(value).is_open else [value]
        for keyword in node.keywords:
            value = self.value(keyword.value)
            if keyword.arg is not None:
                named[keyword.arg] = value
            elif kind_of(value) == "dict":
                named.update({str(key): part for key, part in root(value).parts.items()})
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
            method = Call(called.of, called.label, args, named, node)
            self._list_method(method)
            # a method of the project's own optimizer: entered, and also what the name means for any optimizer
            result = self._call_function(called.cls, [called.of, *args], named, node)
            return self._known_result(method) or result
        if called.kind == "module":
            return self._call_external(Call(called, called.label, args, named, node))
        if isinstance(node.func, ast.Attribute):
            is_known = called.kind != "unknown" and called.of is not None
            owner = called.of if is_known and called.of else self.value(node.func.value)
            return self._call_method(Call(owner, node.func.attr, args, named, node))
        return self._call_object(Call(called, "", args, named, node))

    def _call_method(self, call: Call) -> Value:
        """Call a method that the project does not define."""
        self._list_method(call)
        known = self._known_result(call)
        if known is not None:
            return known
        made = self._made_by_call(call.node, [call.called, *call.arguments.values()])
        made.flags |= {"listing"} if call.name in LISTINGS else set()
        made.node = call.node if call.name in ("format", "open") else None
        if call.name in ("open", "format", *_JOINS):
            made.key, made.options = call.name, {"self": call.called, **call.arguments}
        made.flags |= {"joined"} if call.name in _JOINS else set()
        return made

    def _call_object(self, call: Call) -> Value:
        """Call an object, such as a model."""
        base, called, node = call.base, call.called, call.node
        if base.kind == "scaler":  # timm's scaler does backward and step
            stepped = [root(value) for value in call.arguments.values() if kind_of(value) == "optimizer"]
            for name, value in [("backward", called), *[("step", value) for value in [*stepped, base]]]:
                self._event(name, value, call.arguments, node)
            return Value(deps=values.join_deps(call.args))
        self._event("call", called, call.arguments, node, unparse(node.func))
        # `trainer()` runs __call__(); `model(batch)` runs forward(), once is enough for its events
        is_module = base.kind in ("model", "criterion")
        method = None if is_module else self.find_method(base, "__call__")
        if method is not None:
            return self._call_function(method, [called, *call.args], call.named, node)
        forward = self.find_method(base, "forward")
        if forward is not None and forward.node not in self._walked:
            self._call_function(forward, [called, *call.args], call.named, node)
        made = self._made_by_call(node, [called, *call.arguments.values()])
        made.path = ""
        made.flags |= {"output"} if is_module else set()
        return made

    # Functions

    def _call_function(
        self, function: Function, args: list[Value], named: dict[str, Value], node: Any
    ) -> Value:
        """Walk over a function of the project, and return what it returns."""
        name = getattr(function.node, "name", "lambda")
        unknown = Value(line=node.lineno, flags={"from_call"})
        unknown.deps = values.join_deps([*args, *named.values()])
        # a function that has trained is started once: `if distributed: mp.spawn(main) else: main()`
        if function.node in self._trained and not self._loops:
            return unknown
        # recursive, too deep or too much: the rules learn that something was missed here
        if function.node in self._stack or len(self._stack) >= DEEPEST or len(self.events) > MOST_EVENTS:
            self.missed.add(name)
            self._event("missed", unknown, {**dict(enumerate(args)), **named}, node, name)
            return unknown
        frame = Frame(function.module, {}, function.names, name, function.node, owner=function.owner)
        self._bind(function.node, args, named, frame.names)
        parameters = {part.arg: part for part in ast.walk(function.node.args) if isinstance(part, ast.arg)}
        for parameter, value in frame.names.items():
            place = (parameters.get(parameter, function.node), function.module.source.path, len(self.events))
            self.bound.append(Binding(value, parameter, function.node, *place))
            # the arguments by which a call decides which branch the function takes
            if value.kind == "dict" or (value.kind == "const" and isinstance(value.key, bool)):
                frame.given[parameter] = value
        self._walked.add(function.node)
        self._stack.append(function.node)
        functions, count = self._functions, len(self._conditions)
        self._functions = (*functions, getattr(function.node, "name", ""))
        self.frames.append(frame)
        # @torch.no_grad(), @rank_zero_only: under it the whole function is conditional
        for decorator in getattr(function.node, "decorator_list", []):
            self._conditions.append(Condition(unparse(decorator), Value(), True, decorator))
        try:
            if isinstance(function.node, ast.Lambda):
                frame.returned.append(self.value(function.node.body))
            else:
                self._block(function.node.body)
        finally:
            del self._conditions[count:]
            self.frames.pop()
            self._stack.pop()
            self._functions = functions
        # several returns: their values are merged, as those of two branches
        return functools.reduce(self._merge_returned, frame.returned) if frame.returned else unknown

    def _bind(self, node: Any, args: list[Value], named: dict[str, Value], names: dict[str, Value]) -> None:
        """Bind the parameters of a function to the arguments of a call."""
        arguments = node.args
        parameters = [*arguments.posonlyargs, *arguments.args]
        every = [*parameters, *arguments.kwonlyargs]
        # a static method gets no object, although it was called on one
        is_static = any(unparse(part) == "staticmethod" for part in getattr(node, "decorator_list", []))
        given = args[1:] if is_static and args and args[0].cls is not None else args
        places = zip(parameters, given, strict=False)
        names.update({part.arg: value for part, value in places if value.kind != "open"})
        known = {part.arg for part in every}
        names.update({name: value for name, value in named.items() if name in known})
        if arguments.vararg:
            names[arguments.vararg.arg] = Value("list", parts=dict(enumerate(given[len(parameters) :])))
        if arguments.kwarg:
            others = {name: value for name, value in named.items() if name not in known}
            is_open = any(value.kind == "open" for value in given)
            names[arguments.kwarg.arg] = Value("dict", parts={**others}, is_open=is_open)
        last = parameters[len(parameters) - len(arguments.defaults) :]
        defaults = {part.arg: default for part, default in zip(last, arguments.defaults, strict=True)}
        options = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        defaults.update({part.arg: default for part, default in options})
        for part in [part for part in every if part.arg not in names]:
            names[part.arg] = self._make_parameter(part, defaults.get(part.arg))

    def _make_parameter(self, parameter: ast.arg, default: ast.expr | None) -> Value:
        """Return the value of a parameter that no call gives: its default, or what its name tells."""
        name = parameter.arg
        if isinstance(default, ast.Constant):
            made = self.value(default)
            # a caller may give another one
            made.kind = "option" if made.kind == "const" else made.kind
            return made
        if name in ("fabric", "accelerator"):
            return Value("instance", name, key=name.capitalize(), node=parameter, flags={"by_name"})
        kind = "args" if name in _ARGUMENTS else values.kind_of_name(name) or "unknown"
        return Value(kind, name, node=parameter, flags={"by_name"})

    def _merge_returned(self, first: Value, second: Value) -> Value:
        if first.kind == "list" and second.kind == "list" and len(first.parts) == len(second.parts):
            made = Value("list", first.label, first.path, first.line)
            for key, part in first.parts.items():
                made.parts[key] = self._merge_returned(part, second.parts.get(key, Value()))
            return made
        # `return Adam(...)` in one branch, `return SGD(...)` in the other: one object
        unite(first, second)
        # 0 for a new run, or what the name of a file tells
        if {first.kind, second.kind} == {"const", "unknown"}:
            return first if first.kind == "unknown" else second
        return self._either(first, second)

    def _either(self, first: Value, second: Value) -> Value:
        """Return what two branches give: the one that tells more."""
        if first.kind == "state" and second.kind == "state":
            flags = (first.flags & second.flags) | {"either"}
            deps = first.deps | second.deps
            return Value("state", first.label, first.path, first.line, of=first.of, deps=deps, flags=flags)
        is_restored = values.is_restored(second) and not values.is_restored(first)
        says_more = values.is_vague(first) and not values.is_vague(second)
        return second if is_restored or says_more else first

    # Classes

    def _make_instance(self, cls: Class, args: list[Value], named: dict[str, Value], node: Any) -> Value:
        kind = self._kind_of_bases(cls)
        made = self._make(kind or "instance", node, cls=cls, loops=tuple(self._loops))
        made.options = {**dict(enumerate(args)), **named}
        self._event("create", made, made.options, node, cls.node.name)
        method = self._find_method(cls, "__init__")
        self._walked.add(cls.node)
        # what a module is made of is not looked into: its state has it all
        if kind == "model" and not trains_itself(cls.node):
            return made
        if method:
            self._call_function(method, [made, *args], named, node)
        else:
            # a dataclass
            fields = [part.target for part in cls.node.body if isinstance(part, ast.AnnAssign)]
            places = [field.id for field in fields if isinstance(field, ast.Name)]
            made.parts.update({**made.options, **dict(zip(places, args, strict=False))})
        self._describe(made, made.options)
        return made

    def _kind_of_bases(self, cls: Class, depth: int = 0) -> str:
        """Return the kind of a class of the project, by its bases and then by its name."""
        name = cls.node.name
        for base in cls.node.bases:
            value = self._in_module(cls, base)
            is_own = value.kind == "class" and isinstance(value.cls, Class) and depth < 6
            kind = self._kind_of_bases(value.cls, depth + 1) if is_own else ""
            # a class of another package: its name tells the kind
            dotted = value.label if value.kind == "module" else unparse(base)
            last = dotted.rpartition(".")[2]
            if not kind and (last.endswith("Module") or _BASES.get(last) == "model"):
                return _kind_of_module(name)
            kind = kind or _BASES.get(last, "dataset" if "Dataset" in last else values.kind_of_class(dotted))
            if kind:
                return kind
        # no base says it: the name of the class alone, but for models, which have many other meanings
        kind = values.kind_of_class(name)
        return "" if kind in ("model", "criterion") else kind


def _kind_of_module(name: str) -> str:
    """Return the kind of a module of torch: an average of a model and a loss are modules, too."""
    is_loss = "loss" in name.lower() or "criterion" in name.lower()
    return "ema" if values.kind_of_class(name) == "ema" else "criterion" if is_loss else "model"


def replaces(old: Value, new: Value) -> bool:
    """Return whether a new object is made of the old one, as a scheduler of a scheduler."""
    return root(old) in values.list_deps(new) or root(old) in [root(part) for part in new.options.values()]


def unite(old: Value, new: Value) -> None:
    """Make one object of those that two branches make in two ways."""
    both = kind_of(old) == kind_of(new) and kind_of(old) in values.STATEFUL
    if both and root(old) is not root(new) and not replaces(old, new):
        root(old).same = new

"""What a walk over a script lists: its events, and the functions, classes and modules that it meets."""

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bootfile.lint.sources import Project, Source, unparse
from bootfile.lint.values import Loop, Value, join_deps, root

MOST_EVENTS = 60_000
MOST_STEPS = 150_000


class Condition(NamedTuple):
    """A test around a statement. text: its source. value: its value. is_true: which branch."""

    text: str
    value: Value
    is_true: bool
    node: Any


@dataclass(eq=False, slots=True)
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


class Call(NamedTuple):
    """A call that is followed. called: the function, or the object whose method it is. name: of the method,
    or of the function with its package."""

    called: Value
    name: str
    args: list[Value]
    named: dict[str, Value]
    node: Any

    @property
    def base(self) -> Value:
        """The object behind wrappers."""
        return root(self.called)

    @property
    def arguments(self) -> dict[Any, Value]:
        """The arguments by place or name."""
        return {**dict(enumerate(self.args)), **self.named}

    def get(self, place: int, name: str) -> Value | None:
        """Return an argument; None if the call does not give it."""
        return self.args[place] if len(self.args) > place else self.named.get(name)


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


@dataclass(eq=False, slots=True)
class Frame:
    """A function that is being walked over."""

    module: Module
    names: dict[str, Value]
    outer: dict[str, Value] | None = None
    function: str = ""
    node: Any = None
    returned: list[Value] = field(default_factory=list)
    shared: set[str] = field(default_factory=set)
    # parameters to which the call gives True, False or a dict
    given: dict[str, Value] = field(default_factory=dict)
    owner: Class | None = None


class Binding(NamedTuple):
    """A name that a statement or a call binds. name: with its object, "self.optimizer". function: the one
    around it; None at the top of a module. node: the statement; the parameter if a call binds it. order: how
    many events were before it."""

    value: Value
    name: str
    function: Any
    node: Any
    path: str
    order: int


class TooLarge(Exception):
    """The script has more steps than the tracer walks."""


class Recorder:
    """Lists the events of a walk over a script. events: what it does, in its order. Its subclasses follow
    calls, expressions and statements."""

    def __init__(self, source: Source, project: Project):
        self.project = project
        self.source = source
        self.events: list[Event] = []
        self.bound: list[Binding] = []
        self.all_loops: list[Loop] = []
        self.counters: list[Value] = []
        self.imported: dict[str, Module] = {}
        self.externals: set[str] = set()
        self.is_whole = True
        self.missed: set[str] = set()  # project functions that were too deep
        self._loops: list[Loop] = []
        self._conditions: list[Condition] = []
        self.frames: list[Frame] = []
        self._stack: list[Any] = []
        self._functions: tuple[str, ...] = ()  # the names of those in _stack
        self._counted: dict[Any, list[tuple[Any, Any]]] = {}  # what each loop adds to
        self._steps = 0
        self._muted = 0
        self._walked: set[Any] = set()
        self._trained: set[Any] = set()
        self._loaders_read: set[Value] = set()

    def _event(self, name: str, value: Value, args: dict[Any, Value], node: Any, text: str = "") -> None:
        if self._muted or len(self.events) > MOST_EVENTS:
            return
        # the functions that are entered now train: they are not walked a second time (calls.py)
        if name == "step" and self._loops:
            self._trained.update(self._stack)
        place = (self._path(), getattr(node, "lineno", 0), tuple(self._loops), tuple(self._conditions))
        self.events.append(Event(name, value, args, node, *place, self._functions, len(self.events), text))

    def _path(self) -> str:
        return self.frames[-1].module.source.path

    def _make(self, kind: str, node: Any, deps: Iterable[Value] = (), **fields: Any) -> Value:
        """Return a value that is made at a place of the script."""
        line = getattr(node, "lineno", 0)
        return Value(kind, fields.pop("label", ""), self._path(), line, deps=join_deps(deps), **fields)

    def _made_by_call(self, node: Any, deps: Iterable[Value]) -> Value:
        """Return the result of a call that is not followed."""
        return self._make("unknown", node, deps, loops=tuple(self._loops), flags={"from_call"})

    def _keep_binding(self, value: Value, name: str, node: Any) -> None:
        function = self.frames[-1].node
        self.bound.append(Binding(value, name, function, node, self._path(), len(self.events)))

    # what the subclasses follow
    value: Callable[[Any], Value]
    _block: Callable[[list[ast.stmt]], None]
    _call_function: Callable[[Function, list[Value], dict[str, Value], Any], Value]
    _assign: Callable[..., None]

    # Classes of the project

    def _in_module(self, cls: Class, node: Any) -> Value:
        self.frames.append(Frame(cls.module, cls.names or cls.module.names))
        # in the module of the class, and without events: nothing runs here
        self._muted += 1
        try:
            return self.value(node)
        finally:
            self.frames.pop()
            self._muted -= 1

    def _find_method(self, cls: Class, name: str, depth: int = 0) -> Function | None:
        for part in cls.node.body:
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and part.name == name:
                return Function(part, cls.module, cls.names, cls)
        for base in cls.node.bases:
            value = self._in_module(cls, base)
            is_own = value.kind == "class" and isinstance(value.cls, Class) and depth < 6
            method = self._find_method(value.cls, name, depth + 1) if is_own else None
            if method:
                return method
        return None

    def find_method(self, value: Value, name: str) -> Function | None:
        """Return a method of an object of the project; None for other objects."""
        return self._find_method(value.cls, name) if isinstance(value.cls, Class) else None

    def _find_class_value(self, cls: Class, name: str) -> Value | None:
        for part in cls.node.body:
            if isinstance(part, ast.Assign) and any(unparse(target) == name for target in part.targets):
                value = self._in_module(cls, part.value)
                # a constant gets the name and the line of the attribute, for the message
                named = Value("const", name, self._path(), part.lineno, key=value.key)
                return named if value.kind == "const" else value
            # a field of a dataclass: a caller may give another number
            is_field = isinstance(part, ast.AnnAssign) and isinstance(part.value, ast.Constant)
            if is_field and unparse(part.target) == name:  # type: ignore[attr-defined]
                return Value("option", name, self._path(), part.lineno)
        return None

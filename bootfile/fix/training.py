"""The training loop of a script and the names of its objects: what `--exact` and `--ddp` share."""

import ast
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from bootfile.fix.edits import CannotEdit, Script, require
from bootfile.lint import sources
from bootfile.lint.epoch_loop import OtherForm, explain_loader, find_epoch_loop
from bootfile.lint.facts import Facts
from bootfile.lint.record import Function
from bootfile.lint.trace import Tracer
from bootfile.lint.values import Loop, Value, root
from bootfile.lint.walk import list_parameter_owners


class Place(NamedTuple):
    """Where a loop runs. names: the values of all names there; local: those of its own function or module.
    calls: the functions around it, from the outside, each with the call that has entered it."""

    names: dict[str, Value]
    local: frozenset[str]
    calls: tuple[tuple[Any, Any], ...]


class _Recorder(Tracer):
    """A tracer that keeps the place of each loop, and the calls that enter each function."""

    def __init__(self, source: sources.Source, project: sources.Project):
        super().__init__(source, project)
        self.places: dict[Loop, Place] = {}
        self.entered: dict[Any, set[Any]] = {}
        self._calls: list[tuple[Any, Any]] = []

    def _call_function(self, function: Function, args: Any, named: Any, node: Any) -> Value:
        self._calls.append((function.node, node))
        self.entered.setdefault(function.node, set()).add(node)
        value = super()._call_function(function, args, named, node)
        self._calls.pop()
        return value

    def open_loop(self, node: Any, iterated: Value) -> Loop:
        loop = super().open_loop(node, iterated)
        frame = self.frames[-1]
        names = {**frame.module.names, **(frame.outer or {}), **frame.names}
        self.places[loop] = Place(names, frozenset(frame.names), tuple(self._calls))
        return loop


class Training:
    """The training loop of a script, and a plan of edits: subclasses have plan(), which calls miss() for what
    cannot be placed.

    outer, inner: the places of the loops over epochs and over batches, whose statements are epochs and
    batches. loader, models, optimizers: the values of the objects that train. calls: the functions between
    the loops, each with its call. Raises CannotEdit, and BadInput if lint cannot read the file.
    """

    def __init__(self, script: Script):
        self.script = script
        source = sources.read(script.path)
        self.tree, self.parents = source.tree, source.parents()
        self.tracer = _Recorder(source, sources.Project(script.path))
        self.tracer.run()
        self.facts = Facts(self.tracer)
        require(self.tracer.is_whole, "the script is too large to be read to its end")
        try:
            found = find_epoch_loop(self.facts)
        except OtherForm as error:
            raise CannotEdit(str(error)) from error
        loops = [found.epochs, found.batches]
        self.epochs: Any = loops[0].node
        self.batches: Any = loops[1].node
        self.outer, self.inner = (self.tracer.places[loop] for loop in loops)
        self.calls = self.inner.calls[len(self.outer.calls) :]
        self.loader = found.loader
        self.optimizers = [*dict.fromkeys(root(event.value) for event in found.steps)]
        owners = [_whole_module(owner) for one in self.optimizers for owner in list_parameter_owners(one)]
        named = [root(value) for value in self.outer.names.values()]
        models = [value for value in owners or named if value.kind == "model"]
        self.models = [*dict.fromkeys(models)]
        self.missing: list[str] = []
        self.notes: list[str] = []

    def run(self) -> list[str]:
        """Plan the edits, and return notes for the user. Raises CannotEdit."""
        try:
            self.plan()
        except CannotEdit as error:
            self.missing += error.lines
        if self.missing:
            raise CannotEdit(*dict.fromkeys(self.missing))
        return self.notes

    def plan(self) -> None:
        raise NotImplementedError

    def miss(self, node: Any, text: str) -> None:
        """Note what cannot be placed. node: of the syntax tree, or an event."""
        self.missing.append(f"line {getattr(node, 'lineno', 0) or node.line}: {text}")

    def expect(self, condition: Any, node: Any, text: str) -> None:
        """Note what cannot be placed if a condition is not met."""
        if not condition:
            self.miss(node, text)

    def check_loader(self) -> None:
        """Note a loader that is not a DataLoader of torch, or whose order is not known."""
        for text in explain_loader(self.facts, self.loader):
            self.miss(self.batches, text)

    def find(self, place: Place, wanted: Value) -> tuple[str, Value]:
        """Return (how an object is written at a place, its value there, such as a wrapper). Raises
        CannotEdit if it has no name there."""
        found: dict[str, Value] = {}
        for name, value in place.names.items():
            written = {name: value}
            if value.kind in ("instance", "dict") and name != "super":
                form = "{}.{}" if value.kind == "instance" else "{}[{!r}]"
                for key, part in root(value).parts.items():
                    written[form.format(name, key)] = part
            for text, part in written.items():
                if root(part) is wanted:
                    found.setdefault(text, part)
        line = (self.epochs if place is self.outer else self.batches).lineno
        require(found, f"line {line}: no name of the {wanted.kind} {wanted.label} is known here")

        def rank(text: str) -> tuple[bool, bool]:
            return re.split(r"[.\[]", text)[0] in place.local, text == wanted.label

        text = max(found, key=rank)
        return text, found[text]


def _whole_module(value: Value) -> Value:
    """Return the module of a part such as `model.head`."""
    while value.kind == "attribute" and value.of is not None:
        value = root(value.of)
    return value


def walk_own(body: list[ast.stmt], *without: Any) -> Iterator[ast.AST]:
    """Yield the nodes of statements, without what is in functions, classes and `without` among them."""
    todo: list[ast.AST] = [*reversed(body)]
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, (*sources.FUNCTIONS, ast.Lambda, ast.ClassDef, *without)):
            todo += reversed([*ast.iter_child_nodes(node)])


def last_import(script: Script) -> ast.stmt:
    """Return the last import at the top of a file, above its blocks. Raises CannotEdit if there is none."""
    above = script.text.partition("\n###")[0].count("\n") + 1
    last = None
    for node in [node for node in script.tree.body if node.lineno <= above]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            last = node
        elif last is not None and not isinstance(node, ast.Expr | ast.If | ast.Try | ast.Assign):
            break
    if last is None:
        raise CannotEdit("expected imports at the top of the file")
    return last

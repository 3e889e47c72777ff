"""The events of a script in their order, and its training loops."""

import re
from functools import cached_property
from typing import Any

from bootfile.lint.record import Event
from bootfile.lint.sources import Source
from bootfile.lint.trace import Tracer
from bootfile.lint.values import Loop, Value, kind_of, list_deps, root

_RANK = re.compile(
    r"rank|save|logs|writer|master|\bmain|_main|main_|primary|chief|process|zero|gpu|is_root|device_id|_id\b|\bid\b",
    re.IGNORECASE,
)


class Walk:
    """What a script does, in its order. loops: the outermost loops that train."""

    def __init__(self, tracer: Tracer):
        self.tracer = tracer
        self.events = tracer.events
        self.texts = " ".join(sorted(tracer.externals))
        self.sources: list[Source] = [tracer.source, *[one.source for one in tracer.imported.values()]]
        self._selected: dict[tuple[str, ...], list[Event]] = {}
        self._deps: dict[Value, set[Value]] = {}
        self._called: dict[str, list[Event]] = {}
        self.loops = self._find_training_loops()

    def select(self, *names: str) -> list[Event]:
        """Return the events with one of the names, in their order. Each question is answered once."""
        if names not in self._selected:
            self._selected[names] = [event for event in self.events if event.name in names]
        return self._selected[names]

    def in_training(self, *names: str) -> list[Event]:
        """Return the events with one of the names that are within a training loop."""
        return [event for event in self.select(*names) if self.is_in_training(event)]

    def calls(self, pattern: str) -> list[Event]:
        """Return the calls of other packages whose full name matches, and methods whose name does."""
        if pattern not in self._called:
            matches = re.compile(pattern).search
            events = self.select("call", "method")
            is_called = {text: matches(text) is not None for text in {event.text for event in events}}
            self._called[pattern] = [event for event in events if is_called[event.text]]
        return self._called[pattern]

    def imports(self, pattern: str) -> bool:
        """Return whether the script or a module of it imports a package of another project."""
        return re.search(pattern, self.texts) is not None

    def nodes(self, path: str, kind: Any) -> list[Any]:
        """Return the nodes of a kind in a module of the project."""
        return [node for source in self.sources if source.path == path for node in source.find(kind)]

    def list_deps(self, value: Value) -> set[Value]:
        """Return the value and all values from which it was computed. Each question is answered once."""
        if value not in self._deps:
            self._deps[value] = list_deps(value)
        return self._deps[value]

    # Loops

    def _find_training_loops(self) -> list[Loop]:
        """Return the outermost loops around a step of an optimizer, or else around a backward pass: a loop
        that fills memory before the training has no step."""
        trained = [event for event in self.select("step", "backward") if event.loops and _trains(event)]
        stepped = [event for event in trained if event.name == "step"]
        # a loop that makes the model is around several trainings, such as those of the folds
        outer = {
            loop
            for event in trained
            for model in list_parameter_owners(root(event.value))
            for loop in model.loops
        }
        inner = [[loop for loop in event.loops if loop not in outer] for event in stepped or trained]
        loops = list(dict.fromkeys(one[0] for one in inner if one))
        for event in self.events:
            inside = [number for number, loop in enumerate(event.loops) if loop in loops]
            event.loops = event.loops[inside[0] :] if inside else event.loops
        return loops

    def is_in_training(self, event: Event) -> bool:
        return bool(event.loops) and event.loops[0] in self.loops

    def list_trained(self) -> list[Event]:
        """Return the steps of optimizers and the backward passes of the training loops."""
        return [one for one in self.in_training("step", "backward") if kind_of(one.value) != "scheduler"]

    def is_own_state(self, value: Value) -> bool:
        """Return whether an object is made within the training loop, or is a part of another one."""
        return any(loop in self.loops for loop in value.loops)

    @cached_property
    def first_step(self) -> int:
        """The place of the first training step in the order of events."""
        trained = self.in_training("backward", "step")
        return trained[0].order if trained else len(self.events)

    def trains_within(self, event: Event) -> bool:
        """Return whether the loop of an event, such as one over a loader, trains after it."""
        depth = len(event.loops)
        trained = [other for other in self.select("backward", "step") if other.loops[:depth] == event.loops]
        is_loop = depth > 0 and event.loops[-1].node is event.node
        return is_loop and any(other.order > event.order for other in trained)

    def is_distributed(self) -> bool:
        calls = self.calls(r"\.init_process_group$|DistributedDataParallel$")
        return any(event.name == "call" for event in calls)


def _trains(event: Event) -> bool:
    """Return whether an event trains, in a loop over names that the script defines."""
    is_step = event.name == "backward" or kind_of(event.value) == "optimizer"
    read = [loop.iterated for loop in event.loops if loop.iterated is not None]
    return is_step and not any("undefined" in one.flags for first in read for one in [first, *first.deps])


def is_guarded(event: Event) -> bool:
    """Return whether only some ranks reach a place."""
    return any(_RANK.search(condition.text) for condition in event.conditions)


def is_followed(event: Event) -> bool:
    """Return whether a method is one of the project, which the trace has entered."""
    cls = root(event.value).cls
    return cls is not None and hasattr(cls, "node")


def describe(value: Value, kind: str = "") -> str:
    """Return the name of an object for a message."""
    return root(value).label or value.label or kind


def is_constant(value: Value | None, constant: Any) -> bool:
    return value is not None and value.kind in ("const", "none") and value.key is constant


def find_holder(value: Value) -> Value:
    """Return the dict or the model of which a value is an entry or a tensor."""
    for _ in range(10):
        value = root(value)
        is_view = value.kind in ("dict", "list") and value.flags & {"items", "values"}
        if value.of is not None and (value.kind in ("attribute", "state", "group") or is_view):
            value = value.of
        elif "element" in value.flags and len(value.deps) == 1:
            value = next(iter(value.deps))
        else:
            break
    return value


def split(value: Value) -> tuple[Value, int]:
    """Return (the number, what is added to it)."""
    return (value.of or value, value.offset) if value.kind == "shifted" else (value, 0)


def given_state(event: Event) -> Value:
    """Return what a call of load_state_dict() gets."""
    return event.args.get(0) or event.args.get("state_dict") or Value()


def list_parameter_owners(optimizer: Value) -> list[Value]:
    """Return the modules whose parameters an optimizer changes."""
    first = optimizer.options.get(0) or optimizer.options.get("params") or Value()
    parts = [first, *list_deps(first), *first.parts.values()]
    owners = [part.of for part in parts if part.kind == "attribute" and part.label == "parameters"]
    return [root(owner) for owner in owners if owner is not None]

"""Find the dicts that a script saves and the place where it loads them, and add what they lack."""

import ast
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bootfile.fix.edits import Script
from bootfile.fix.places import CannotEdit
from bootfile.fix.scope import Reach, Scope, list_local
from bootfile.lint.checkpoints import Save
from bootfile.lint.facts import Facts
from bootfile.lint.record import Binding, Event
from bootfile.lint.sources import unparse
from bootfile.lint.table import Finding
from bootfile.lint.values import STATEFUL, Value, root


@dataclass
class Job:
    """One repair. scripts: the files that it changes, by path; open() adds one. notes: what the user has to
    know of the new text. passed: (function, parameter) of each parameter that was added."""

    finding: Finding
    facts: Facts
    scope: Scope
    scripts: dict[str, Script]
    notes: list[str] = field(default_factory=list)
    passed: set[Any] = field(default_factory=set)

    def open(self, path: str) -> Script:
        """Return a file of the project, to change it."""
        if path not in self.scripts:
            source = next(one for one in self.facts.sources if one.path == path)
            self.scripts[path] = Script(path, source.data)
        return self.scripts[path]

    def source(self, path: str, node: ast.AST) -> str:
        return self.open(path).source(node)

    def find(self, name: str) -> Any:
        """Return a part of the evidence. Raises CannotEdit if the finding has none."""
        if self.finding.evidence.get(name) is None:
            raise CannotEdit(f"the {name} of the finding is not known")
        return self.finding.evidence[name]


class Checkpoint(NamedTuple):
    """The checkpoints of a script. dicts: (path, syntax node, value) of each dict that a restart may load.
    path, anchor: the statement after which more can be loaded. holder: the name of the loaded dict there."""

    dicts: list[tuple[str, Any, Value]]
    path: str
    anchor: ast.stmt
    holder: str
    order: int


def is_distributed(facts: Facts) -> bool:
    """Return whether the training may have several processes."""
    return facts.is_distributed() or facts.imports(r"\b(accelerate|lightning\w*|deepspeed|horovod)\b")


def find_checkpoint(job: Job) -> Checkpoint:
    """Return the dicts that hold the state of an object which the script loads, and the place of the load.
    Raises CannotEdit if they are not written as dicts in the project."""
    saved = [_saved_dict(save) for save in job.facts.restart_saves]
    dicts = [one for one in saved if one is not None]
    if not dicts:
        raise CannotEdit("the checkpoint is not a dict that the script writes")
    # the objects first: the states of a restart, and not the numbers that are only printed
    loads = [event for event in job.facts.loaded.values() if event.name == "load_state"]
    places = [(event, root(event.args.get(0, Value()))) for event in loads]
    places += [
        (event, event.value) for event in job.facts.select("read") if event.order < job.facts.first_step
    ]
    found = [(event, given) for event, given in places if given.kind == "field" and _has(dicts, given.key)]
    held = [(event, _find_holder(job, event, given)) for event, given in found]
    held = [(event, holder) for event, holder in held if holder]
    if not held:
        raise CannotEdit("no entry of the checkpoint is loaded in a way that is followed")
    last, holder = max(held, key=lambda one: (one[0].name == "load_state", one[0].order))
    function = job.scope.function(last.path, last.node)
    same = [
        event
        for event, name in held
        if name == holder
        and event.path == last.path
        and job.scope.function(event.path, event.node) is function
    ]
    anchor = _find_anchor(job, same)
    keys = {given.key for event, given in found if event in same}
    displays = [_find_display(job, one) for one in dicts if keys & one.parts.keys()]
    nodes = {node: (path, node, value) for path, node, value in displays}
    # a function that saves one object in each call has no place for another one
    if any(_has_others(value, nodes[node][2]) for _, node, value in displays):
        raise CannotEdit(f"line {displays[0][1].lineno} saves several objects in turn")
    return Checkpoint([*nodes.values()], last.path, anchor, holder, last.order)


def _has_others(first: Value, second: Value) -> bool:
    """Return whether two dicts have the states of different objects under one key."""
    keys = first.parts.keys() & second.parts.keys()
    pairs = [(root(first.parts[key]), root(second.parts[key])) for key in keys]
    owners = [(one.of, other.of) for one, other in pairs if one.kind == other.kind == "state"]
    return any(one and other and root(one) is not root(other) for one, other in owners)


def _saved_dict(save: Save) -> Value | None:
    args = save.event.args
    given = [args.get(0, args.get("obj"))] if save.event.name == "call" else []
    return next((root(value) for value in given if value is not None and root(value).kind == "dict"), None)


def _has(dicts: list[Value], key: Any) -> bool:
    return key is not None and any(key in one.parts for one in dicts)


def _find_holder(job: Job, event: Event, field: Value) -> str:
    """Return the name of the dict from which an event reads an entry; "" if it is not a plain name."""
    part: Any
    for part in ast.walk(event.node):
        is_get = (
            isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr == "get"
        )
        key = (
            part.slice if isinstance(part, ast.Subscript) else part.args[0] if is_get and part.args else None
        )
        holder = part.value if isinstance(part, ast.Subscript) else part.func.value if is_get else None
        is_plain = isinstance(holder, ast.Name | ast.Attribute) and "(" not in unparse(holder)
        if holder is not None and is_plain and isinstance(key, ast.Constant) and key.value == field.key:
            return unparse(holder)
    return ""


def _find_anchor(job: Job, events: list[Event]) -> Any:
    """Return the last statement of a load, in the block that all loads have in common."""
    path = events[0].path
    chains = [[job.scope.statement(path, one.node), *job.scope.above(path, one.node)] for one in events]
    chains = [[part for part in chain if isinstance(part, ast.stmt)] for chain in chains]
    block = job.scope.block(path, min(chains, key=len)[0])
    inside = [part for chain in chains for part in chain if part in block]
    # `return checkpoint["epoch"]`: nothing comes after it
    inside = [part for part in inside if not isinstance(part, ast.Return)]
    if not inside or any(isinstance(part, ast.For | ast.While) for part in inside):
        raise CannotEdit("the checkpoint is loaded in a loop, or in the line that returns it")
    return max(inside, key=lambda part: part.lineno)


def _find_display(job: Job, value: Value) -> tuple[str, Any, Value]:
    """Return the syntax of a dict that is saved."""
    displays = [node for node in job.facts.nodes(value.path, ast.Dict) if node.lineno == value.line]
    keys = [{getattr(key, "value", None) for key in node.keys} for node in displays]
    found = [node for node, names in zip(displays, keys, strict=True) if names & value.parts.keys()]
    calls = [node for node in job.facts.nodes(value.path, ast.Call) if node.lineno == value.line]
    found += [node for node in calls if unparse(node.func) == "dict"]
    if len(found) != 1:
        raise CannotEdit("the checkpoint is not one dict that the script writes in one place")
    return value.path, found[0], value


def find_moment(job: Job, checkpoint: Checkpoint) -> int:
    """Return when an epoch first makes a dict that is saved: what changes later is not in it, also if the
    file is written later."""
    inside = {part for _, node, _ in checkpoint.dicts for part in ast.walk(node)}
    made = [event.order for event in job.facts.events if event.node in inside]
    saved = [save.event.order for save in job.facts.restart_saves]
    first = job.facts.first_step
    return min([order for order in made if order > first] or saved)


def choose_key(checkpoint: Checkpoint, name: str) -> str:
    """Return a key that no dict of the checkpoint has."""
    key = name.rpartition(".")[2]
    taken = {str(one) for _, _, value in checkpoint.dicts for one in value.parts}
    return key if key not in taken else f"{key}_state"


def add_entry(job: Job, place: tuple[str, Any, Value], key: str, text: str) -> None:
    """Add an entry to a dict that is saved."""
    path, node, _ = place
    if isinstance(node, ast.Dict):
        job.open(path).add_entry(node, key, text)
    else:
        job.open(path).add_argument(node, f"{key}={text}")


def reach(job: Job, value: Value, path: str, node: ast.AST) -> Reach:
    """Return a name of an object at a place; a function that does not get the object gets it as a further
    argument. Raises CannotEdit if that is not safe."""
    uses = [one for one in job.facts.in_training("step", "method", "call") if root(one.value) is root(value)]
    used = " ".join(event.describe_conditions() for event in uses[:1])
    try:
        return job.scope.reach(value, path, node, used)
    except CannotEdit as error:
        function = job.scope.function(path, node)
        if function is None or function in [loop.node for loop in job.facts.loops]:
            raise
        reason = error
    given = {}
    for source in job.facts.sources:
        for call in source.find(ast.Call):
            if unparse(call.func).rpartition(".")[2] == function.name:
                with contextlib.suppress(CannotEdit):
                    given[source.path, call] = job.scope.reach(value, source.path, call, used)
    name = next((one.name.rpartition(".")[2] for one in given.values()), "")
    stateful = {one.name for one in job.facts.tracer.bound if root(one.value).kind in STATEFUL}
    others = {tuple(text for text in map(unparse, call.args) if text in stateful) for _, call in given}
    # a function that saves another object in each call has no place for this one
    if len(others) != 1 or name in list_local(function):
        raise reason
    if (function, name) not in job.passed:
        job.passed.add((function, name))
        job.open(path).add_parameter(function, f"{name}=None")
        for (place, call), one in given.items():
            is_test = one.guard and not one.guard.endswith(" is not None")
            text = f"{one.name} if {one.guard} else None" if is_test else one.name
            job.open(place).add_argument(call, f"{name}={text}")
    return Reach(name, f"{name} is not None")


def find_loop(job: Job, checkpoint: Checkpoint) -> tuple[Any, Any]:
    """Return (the statement with the load, the training loop) if both are in one block, in this order."""
    loop = job.facts.loops[0]
    around = [checkpoint.anchor, *job.scope.above(checkpoint.path, checkpoint.anchor)]
    block = job.scope.block(loop.path, loop.node) if loop.path == checkpoint.path else []
    outer: Any = next((part for part in around if part in block), None)
    if outer is None or block.index(outer) >= block.index(loop.node):
        raise CannotEdit("the checkpoint is not loaded in the function with the loop, before it")
    return outer, loop.node


def load_entry(job: Job, checkpoint: Checkpoint, target: Reach, key: str, line: str) -> None:
    """Load an entry after the others, and warn of a file without it. line: reads HOLDER[KEY] as {}."""
    test = f'{target.guard} and {checkpoint.holder}.get("{key}") is not None'
    test = test if target.guard else f'"{key}" in {checkpoint.holder}'
    otherwise = f"elif {target.guard}:" if target.guard else "else:"
    lines = [
        f"if {test}:",
        "    " + line.format(f'{checkpoint.holder}["{key}"]'),
        otherwise,
        f"    {_warn(key)}",
    ]
    job.open(checkpoint.path).insert_after(checkpoint.anchor, lines)


def load_before_loop(job: Job, checkpoint: Checkpoint, guard: str, key: str, lines: list[str]) -> None:
    """Keep an entry where the others are loaded, and use it right before the loop."""
    outer, loop = find_loop(job, checkpoint)
    script, name = job.open(checkpoint.path), key if key.endswith("states") else f"{key}_state"
    if name in script.find_bound():
        raise CannotEdit(f"the name {name} has another meaning here")
    script.insert_before(outer, [f"{name} = None"])
    load_entry(job, checkpoint, Reach(name), key, f"{name} = {{}}")
    test = f"{guard} and {name} is not None" if guard else f"{name} is not None"
    script.insert_before(loop, [f"if {test}:", *[f"    {line.replace('{}', name)}" for line in lines]])


def _warn(key: str) -> str:
    return f'print("warning: this checkpoint has no {key}")'


def check_order(job: Job, checkpoint: Checkpoint, names: Iterable[Binding]) -> None:
    """Raise CannotEdit if the script makes an object or sets a number after it has loaded the checkpoint."""
    orders = range(checkpoint.order + 1, job.facts.first_step + 1)
    later = [one for one in names if one.order in orders and one.value.kind not in ("wrapped", "counter")]
    if later:
        raise CannotEdit(
            f"{later[0].name} is set in line {later[0].node.lineno}, after the checkpoint is loaded"
        )

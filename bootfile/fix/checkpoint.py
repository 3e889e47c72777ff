"""Find the dicts that a script saves and the place where it loads them, and add what they lack."""

import ast
import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bootfile.fix.edits import Script
from bootfile.fix.places import CannotEdit
from bootfile.fix.reads import is_beside, list_reads
from bootfile.fix.scope import Reach, Scope, list_local
from bootfile.lint.checkpoints import Save
from bootfile.lint.facts import Facts
from bootfile.lint.record import Binding, Event
from bootfile.lint.sources import FUNCTIONS, unparse
from bootfile.lint.table import Finding
from bootfile.lint.values import STATEFUL, Loop, Value, root

_RESTORED = "restored"  # the name of a dict of entries, from a function that loads to the loop


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
            source = next(source for source in self.facts.sources if source.path == path)
            self.scripts[path] = Script(path, source.data)
        return self.scripts[path]

    def source(self, path: str, node: ast.AST) -> str:
        """Return the text of a node of a file."""
        return self.open(path).source(node)

    def nodes_at(self, value: Value, kind: Any) -> list[Any]:
        """Return the syntax nodes of a kind in the line where a value is made."""
        return [node for node in self.facts.nodes(value.path, kind) if node.lineno == value.line]

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
    dicts = [value for value in saved if value is not None]
    if not dicts:
        raise CannotEdit("the checkpoint is not a dict that the script writes")
    reads = list_reads(job.facts, dicts)
    # a repair before has kept entries: what it reads is not a load
    reads = [read for read in reads if read.holder != _RESTORED or not _keeps(job, read.event.path)]
    if not reads:
        raise CannotEdit("no entry of the checkpoint is loaded in a way that is followed")
    # the objects first: the states of a restart, and not the numbers that are only printed
    last = max(reads, key=lambda read: (read.event.name == "load_state", read.event.order))
    near = [read for read in reads if is_beside(job.scope, read, last)]
    anchor = _find_anchor(job, [read.event for read in near])
    keys = {read.key for read in near}
    displays = [_find_display(job, value) for value in dicts if keys & value.parts.keys()]
    # several saves may write one dict of the syntax
    by_node = {display[1]: display for display in displays}
    # a function that saves one object in each call has no place for another one
    if any(_has_others(value, by_node[node][2]) for _, node, value in displays):
        raise CannotEdit(f"line {displays[0][1].lineno} saves several objects in turn")
    return Checkpoint([*by_node.values()], last.event.path, anchor, last.holder, last.event.order)


def _has_others(first: Value, second: Value) -> bool:
    """Return whether two dicts have the states of different objects under one key."""
    for key in first.parts.keys() & second.parts.keys():
        state, other = root(first.parts[key]), root(second.parts[key])
        are_states = state.kind == other.kind == "state"
        if are_states and state.of and other.of and root(state.of) is not root(other.of):
            return True
    return False


def _saved_dict(save: Save) -> Value | None:
    """Return the dict that a call such as torch.save() writes; None if it writes something else."""
    args = save.event.args
    saved = args.get(0, args.get("obj"))
    if save.event.name != "call" or saved is None or root(saved).kind != "dict":
        return None
    return root(saved)


def _find_anchor(job: Job, events: list[Event]) -> Any:
    """Return the last statement of a load, in the block that all loads have in common."""
    path = events[0].path
    chains: list[list[ast.stmt]] = []
    for event in events:
        around = [job.scope.statement(path, event.node), *job.scope.above(path, event.node)]
        chains.append([node for node in around if isinstance(node, ast.stmt)])
    block = job.scope.block(path, min(chains, key=len)[0])
    inside: list[ast.stmt] = []
    for chain in chains:
        # `return checkpoint["epoch"]`: nothing comes after it
        inside += [part for part in chain if part in block and not isinstance(part, ast.Return)]
    if not inside or any(isinstance(part, ast.For | ast.While) for part in inside):
        raise CannotEdit("the checkpoint is loaded in a loop, or in the line that returns it")
    return max(inside, key=lambda part: part.lineno)


def _find_display(job: Job, value: Value) -> tuple[str, Any, Value]:
    """Return the syntax of a dict that is saved."""
    displays = []
    for node in job.nodes_at(value, ast.Dict):
        keys = {getattr(key, "value", None) for key in node.keys}
        if keys & value.parts.keys():
            displays.append(node)
    displays += [call for call in job.nodes_at(value, ast.Call) if unparse(call.func) == "dict"]
    if len(displays) != 1:
        raise CannotEdit("the checkpoint is not one dict that the script writes in one place")
    return value.path, displays[0], value


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
    taken = {str(other) for _, _, saved in checkpoint.dicts for other in saved.parts}
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
    in_loop = job.facts.in_training("step", "method", "call")
    uses = [event for event in in_loop if root(event.value) is root(value)]
    used = " ".join(event.describe_conditions() for event in uses[:1])
    is_needed = any(not event.conditions[event.loops[0].depth :] for event in uses)
    try:
        return job.scope.reach(value, path, node, used, job.facts.loops[0].node if is_needed else None)
    except CannotEdit as error:
        function = job.scope.function(path, node)
        if function is None or function in [loop.node for loop in job.facts.loops]:
            raise
        reason = error
    callers = _list_callers(job, function, value, used)
    name = next((reached.name.rpartition(".")[2] for reached in callers.values()), "")
    stateful = {binding.name for binding in job.facts.tracer.bound if root(binding.value).kind in STATEFUL}
    passed = {tuple(text for text in map(unparse, call.args) if text in stateful) for _, call in callers}
    # a function that saves another object in each call has no place for this one
    if len(passed) != 1 or name in list_local(function):
        raise reason
    if (function, name) not in job.passed:
        job.passed.add((function, name))
        job.open(path).add_parameter(function, f"{name}=None")
        for (caller, call), reached in callers.items():
            text = reached.name
            if reached.guard and not reached.guard.endswith(" is not None"):
                text = f"{reached.name} if {reached.guard} else None"
            job.open(caller).add_argument(call, f"{name}={text}")
    return Reach(name, f"{name} is not None")


def _list_callers(job: Job, function: Any, value: Value, used: str) -> dict[tuple[str, Any], Reach]:
    """Return (path, call) of each call of a function, with the name by which it can pass an object."""
    callers = {}
    for path, call in list_calls(job, function):
        with contextlib.suppress(CannotEdit):
            callers[path, call] = job.scope.reach(value, path, call, used)
    return callers


def list_calls(job: Job, function: Any) -> list[tuple[str, Any]]:
    """Return (path, call) of each call of a function of the project. Raises CannotEdit if it may also be
    called in another way: through a decorator, under another name, or as a value."""
    name = function.name
    problem = CannotEdit(f"it is not known what calls {name}() in line {function.lineno}")
    others = {event.node.func for event in job.facts.select("call") if isinstance(event.node, ast.Call)}
    sources = job.facts.sources
    path = next(source.path for source in sources if function in source.find(type(function)))
    is_method = job.scope.cls(path, function) is not None
    makers = [(source.path, one) for source in sources for one in source.find(FUNCTIONS) if one.name == name]
    makers = [one for one in makers if (job.scope.cls(*one) is not None) == is_method]
    if len(makers) > 1 or {*map(unparse, function.decorator_list)} - {"staticmethod", "classmethod"}:
        raise problem
    found = []
    for source in sources:
        imports = [alias for one in source.find((ast.Import, ast.ImportFrom)) for alias in one.names]
        modules = {(alias.asname or alias.name).partition(".")[0] for alias in imports}
        if any(alias.name == name and alias.asname not in (None, name) for alias in imports):
            raise problem
        calls = {call.func: call for call in source.find(ast.Call)}
        for node in source.find((ast.Name, ast.Attribute)):
            holder = unparse(node.value) if isinstance(node, ast.Attribute) else ""
            is_named = name == getattr(node, "id", getattr(node, "attr", "")) and node not in others
            # torch.save(), and vocabulary.save() of another class, are others
            is_it = is_named and (bool(holder) if is_method else not holder or holder in modules)
            if is_it and node not in calls:
                raise problem
            if is_it:
                found.append((source.path, calls[node]))
    if not found:
        raise problem
    return found


def list_in_body(job: Job, loop: Loop, event: Event) -> list[Any]:
    """Return the statements of the body of a loop that have an event, or call the function that has it."""
    around = [event.node, *job.scope.above(event.path, event.node)]
    inside = [part for part in loop.node.body if part in around]
    return inside or [part for part in loop.node.body if _calls(part, event.functions)]


def _calls(statement: ast.stmt, functions: tuple[str, ...]) -> bool:
    calls = [part for part in ast.walk(statement) if isinstance(part, ast.Call)]
    return any(unparse(call.func).rpartition(".")[2] in functions for call in calls)


def load_entry(job: Job, checkpoint: Checkpoint, target: Reach, key: str, line: str) -> None:
    """Load an entry after the others, and warn of a file without it. line: reads HOLDER[KEY] as {}."""
    test, otherwise = f'"{key}" in {checkpoint.holder}', "else:"
    if target.guard:
        test = f'{target.guard} and {checkpoint.holder}.get("{key}") is not None'
        otherwise = f"elif {target.guard}:"
    lines = [
        f"if {test}:",
        "    " + line.format(f'{checkpoint.holder}["{key}"]'),
        otherwise,
        f"    {_warn(key)}",
    ]
    job.open(checkpoint.path).insert_after(checkpoint.anchor, lines)


def load_before_loop(
    job: Job, checkpoint: Checkpoint, guard: str, key: str, lines: list[str], *needed: str
) -> None:
    """Keep an entry in a dict where the others are loaded, and use it right before the loop. needed: names of
    the file that loads, which the lines have."""
    loop, path = job.facts.loops[0], checkpoint.path
    is_top = job.scope.function(path, checkpoint.anchor) is None
    if len({one.node for one in job.facts.loops}) > 1 or (is_top and path != loop.path):
        raise CannotEdit("the checkpoint is not loaded once, before the one loop that trains")
    script, user = job.open(path), job.open(loop.path)
    if not _keeps(job, path):
        if _RESTORED in script.find_bound():
            raise CannotEdit(f"the name {_RESTORED} has another meaning here")
        insert_below_imports(job, path, [checkpoint.anchor], [f"{_RESTORED} = {{}}  # of a checkpoint"])
    if path != loop.path:
        _import_names(job, checkpoint, user, (_RESTORED, *needed))
    load_entry(job, checkpoint, Reach(_RESTORED), key, f'{_RESTORED}["{key}"] = {{}}')
    # once: a second training of this process begins by itself
    entry = f'{_RESTORED}.pop("{key}")'
    test = f'{_RESTORED}.get("{key}") is not None'
    test = f"{guard} and {test}" if guard else test
    user.insert_before(loop.node, [f"if {test}:", *[f"    {line.replace('{}', entry)}" for line in lines]])


def _keeps(job: Job, path: str) -> bool:
    """Return whether a file has or imports the dict of a repair."""
    made = re.compile(rf"{_RESTORED} = {{}}|from .* import .*\b{_RESTORED}\b")
    return any(made.match(unparse(part)) for part in job.scope.trees[path].body)


def _import_names(job: Job, checkpoint: Checkpoint, user: Script, names: tuple[str, ...]) -> None:
    """Import names of the file that loads in the file with the loop."""
    module = "." + checkpoint.path.removesuffix(".py").replace(os.sep, ".")
    function = job.scope.function(checkpoint.path, checkpoint.anchor).name
    # (the statement, the module as it is written there, the names that it gives)
    froms: list[tuple[ast.stmt, str, set[str]]] = []
    for node in user.tree.body:
        if isinstance(node, ast.ImportFrom) and module.endswith(f".{node.module}"):
            froms.append((node, "." * node.level + str(node.module), {alias.name for alias in node.names}))
        elif isinstance(node, ast.Import) and module.endswith(f".{node.names[0].name}"):
            froms.append((node, node.names[0].name, {function}))
    imported = {name for _, _, given in froms for name in given}
    if not {function, "*"} & imported:
        raise CannotEdit("the file with the loop does not import the function that loads")
    lacking = [name for name in names if name not in imported and "*" not in imported]
    if {*lacking} & user.find_bound():
        raise CannotEdit(f"a name of {', '.join(lacking)} has another meaning in {user.path}")
    if lacking:
        user.insert_after(froms[-1][0], [f"from {froms[-1][1]} import {', '.join(lacking)}"])


def insert_below_imports(job: Job, path: str, nodes: list[ast.AST], lines: list[str]) -> None:
    """Insert lines below the imports of a file, and above the statements with nodes."""
    used: list[ast.AST] = []
    for node in nodes:
        used += [node, *job.scope.above(path, node)]
    body = job.scope.trees[path].body
    first = min(number for number, part in enumerate(body) if part in used)
    made = f"{_RESTORED} = {{}}"
    imports = [
        part
        for part in body[:first]
        if isinstance(part, ast.Import | ast.ImportFrom) or unparse(part) == made
    ]
    if not imports:
        raise CannotEdit("expected imports at the top of the file")
    job.open(path).insert_after(imports[-1], lines)


def _warn(key: str) -> str:
    return f'print("warning: this checkpoint has no {key}")'


def check_order(job: Job, checkpoint: Checkpoint, names: Iterable[Binding]) -> None:
    """Raise CannotEdit if the script makes an object or sets a number after it has loaded the checkpoint."""
    orders = range(checkpoint.order + 1, job.facts.first_step + 1)
    for binding in names:
        if binding.order in orders and binding.value.kind not in ("wrapped", "counter"):
            where = f"in line {binding.node.lineno}, after the checkpoint is loaded"
            raise CannotEdit(f"{binding.name} is set {where}")

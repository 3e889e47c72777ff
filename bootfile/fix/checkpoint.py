"""Find the dicts that a script saves and the place where it loads them, and add what they lack."""

import ast
import contextlib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bootfile.fix.edits import CannotEdit, Script, require
from bootfile.fix.scope import Reach, Scope, list_local
from bootfile.lint.checkpoints import Save
from bootfile.lint.facts import Facts
from bootfile.lint.record import Binding, Event
from bootfile.lint.sources import FUNCTIONS, unparse
from bootfile.lint.table import Finding
from bootfile.lint.values import STATEFUL, Loop, Value, root

RANDOM = (
    r"^(torch|numpy\.random|random)\.(rand|randn|randint|randperm|random|shuffle|sample|choice|uniform|normal"
    r"|permutation|bernoulli|multinomial)\w*$|random_split$"
)
_RESTORED = "restored"  # the name of a dict of entries, from a function that loads to the loop


@dataclass
class Job:
    """One repair. scripts: the files that it changes, by path; open() adds one. notes: what the user has to
    know of the new text."""

    finding: Finding
    facts: Facts
    scope: Scope
    scripts: dict[str, Script]
    notes: list[str] = field(default_factory=list)

    def open(self, path: str) -> Script:
        """Return a file of the project, to change it."""
        if path not in self.scripts:
            source = next(source for source in self.facts.sources if source.path == path)
            self.scripts[path] = Script(path, source.data)
        return self.scripts[path]

    def nodes_at(self, value: Value, kind: Any) -> list[Any]:
        """Return the syntax nodes of a kind in the line where a value is made."""
        return [node for node in self.facts.nodes(value.path, kind) if node.lineno == value.line]

    def find(self, name: str) -> Any:
        """Return a part of the evidence. Raises CannotEdit if the finding has none."""
        is_known = self.finding.evidence.get(name) is not None
        require(is_known, f"the {name} of the finding is not known")
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
    require(dicts, "the checkpoint is not a dict that the script writes")
    reads = _list_reads(job.facts, dicts)
    # a repair before has kept entries: what it reads is not a load
    reads = [read for read in reads if read.holder != _RESTORED or not _keeps(job, read.event.path)]
    require(reads, "no entry of the checkpoint is loaded in a way that is followed")
    # the objects first: the states of a restart, and not the numbers that are only printed
    last = max(reads, key=lambda read: (read.event.name == "load_state", read.event.order))
    path = last.event.path
    near = [read for read in reads if (read.holder, read.event.path) == (last.holder, path)]
    function = job.scope.function(path, last.event.node)
    near = [read for read in near if job.scope.function(path, read.event.node) is function]
    anchor = _find_anchor(job, [read.event for read in near])
    keys = {read.key for read in near}
    displays = [_find_display(job, value) for value in dicts if keys & value.parts.keys()]
    # several saves may write one dict of the syntax
    by_node = {display[1]: display for display in displays}
    # a function that saves one object in each call has no place for another one
    for _, node, value in displays:
        is_one = not _has_others(value, by_node[node][2])
        require(is_one, f"line {displays[0][1].lineno} saves several objects in turn")
    return Checkpoint([*by_node.values()], path, anchor, last.holder, last.event.order)


class _Read(NamedTuple):
    """An event that reads an entry of the checkpoint. holder: the name of the loaded dict there."""

    event: Event
    key: Any
    holder: str


def _list_reads(facts: Facts, dicts: list[Value]) -> list[_Read]:
    """Return the reads of entries that saved dicts have, from a dict with a plain name."""
    loads = [event for event in facts.loaded.values() if event.name == "load_state"]
    fields = [(event, root(event.args.get(0, Value()))) for event in loads]
    fields += [(event, event.value) for event in facts.select("read") if event.order < facts.first_step]
    keys = {key for value in dicts for key in value.parts if key is not None}
    known = [(event, one.key) for event, one in fields if one.kind == "field" and one.key in keys]
    reads = [_Read(event, key, _find_holder(event, key)) for event, key in known]
    return [read for read in reads if read.holder]


def _find_holder(event: Event, key: Any) -> str:
    """Return the name of the dict from which an event reads a key, as `name[key]` or `name.get(key)`; "" if
    it is not a plain name."""
    for node in ast.walk(event.node):
        read = split_read(node, ("get",))
        is_plain = read is not None and isinstance(read[0], ast.Name | ast.Attribute)
        if read is not None and is_plain and read[1] == key and "(" not in unparse(read[0]):
            return unparse(read[0])
    return ""


def split_read(node: Any, methods: tuple[str, ...]) -> tuple[ast.expr, Any] | None:
    """Return (dict, key) of `checkpoint[key]` and of a call such as `checkpoint.get(key)`; None of others."""
    holder, key = getattr(node, "value", None), getattr(node, "slice", None)
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in methods and node.args:
        holder, key = node.func.value, node.args[0]  # type: ignore[attr-defined]
    return (holder, key.value) if holder is not None and isinstance(key, ast.Constant) else None


def _has_others(first: Value, second: Value) -> bool:
    """Return whether two dicts have the states of different objects under one key."""
    pairs = [(root(first.parts[key]), root(second.parts[key])) for key in first.parts.keys() & second.parts]
    owners: list[tuple[Any, Any]] = [
        (one.of, other.of) for one, other in pairs if one.kind == other.kind == "state"
    ]
    return any(root(one) is not root(other) for one, other in owners if one and other)


def _saved_dict(save: Save) -> Value | None:
    """Return the dict that a call such as torch.save() writes; None if it writes something else."""
    args = save.event.args
    saved: Any = args.get(0, args.get("obj"))
    is_dict = save.event.name == "call" and saved is not None and root(saved).kind == "dict"
    return root(saved) if is_dict else None


def _find_anchor(job: Job, events: list[Event]) -> Any:
    """Return the last statement of a load, in the block that all loads have in common."""
    path, inside = events[0].path, []
    chains = [[event.node, *job.scope.above(path, event.node)] for event in events]
    chains = [[node for node in chain if isinstance(node, ast.stmt)] for chain in chains]
    block = job.scope.block(path, min(chains, key=len)[0])
    for chain in chains:
        # `return checkpoint["epoch"]`: nothing comes after it
        inside += [part for part in chain if part in block and not isinstance(part, ast.Return)]
    is_plain = inside and not any(isinstance(part, ast.For | ast.While) for part in inside)
    require(is_plain, "the checkpoint is loaded in a loop, or in the line that returns it")
    return max(inside, key=lambda part: part.lineno)


def _find_display(job: Job, value: Value) -> tuple[str, Any, Value]:
    """Return the syntax of a dict that is saved."""
    displays = [
        node
        for node in job.nodes_at(value, ast.Dict)
        if {getattr(key, "value", None) for key in node.keys} & value.parts.keys()
    ]
    displays += [call for call in job.nodes_at(value, ast.Call) if unparse(call.func) == "dict"]
    require(len(displays) == 1, "the checkpoint is not one dict that the script writes in one place")
    return value.path, displays[0], value


def find_moment(job: Job, checkpoint: Checkpoint) -> int:
    """Return when an epoch first makes a dict that is saved: what changes later is not in it, also if the
    file is written later."""
    inside = {part for _, node, _ in checkpoint.dicts for part in ast.walk(node)}
    facts = job.facts
    made = [one.order for one in facts.events if one.node in inside and facts.is_in_training(one)]
    return min(made or [save.event.order for save in facts.restart_saves])


def reach(job: Job, value: Value, path: str, node: ast.AST) -> Reach:
    """Return a name of an object at a place; a function that does not get the object gets it as a further
    argument. Raises CannotEdit if that is not safe."""
    function = job.scope.function(path, node)
    try:
        return job.scope.reach(value, path, node)
    except CannotEdit:
        if function is None or function in [loop.node for loop in job.facts.loops]:
            raise
        callers: dict[tuple[str, Any], Reach] = {}
        for caller, call in list_calls(job, function):
            with contextlib.suppress(CannotEdit):
                callers[caller, call] = job.scope.reach(value, caller, call)
        name = next((reached.name.rpartition(".")[2] for reached in callers.values()), "")
        bound = job.facts.tracer.bound
        stateful = {binding.name for binding in bound if root(binding.value).kind in STATEFUL}
        passed = {tuple(text for text in map(unparse, call.args) if text in stateful) for _, call in callers}
        # a function that saves another object in each call has no place for this one
        if len(passed) != 1 or name in list_local(function):
            raise
    texts = {}
    for place, reached in callers.items():
        is_asked = reached.guard and not reached.guard.endswith(" is not None")
        texts[place] = f"{reached.name} if {reached.guard} else None" if is_asked else reached.name
    pass_argument(job, path, function, name, texts)
    return Reach(name, f"{name} is not None")


def pass_argument(job: Job, path: str, function: Any, name: str, texts: dict[tuple[str, Any], str]) -> None:
    """Give a function a further parameter. texts: what the calls give, by (path, call)."""
    job.open(path).add_parameter(function, f"{name}=None")
    for (caller, call), text in texts.items():
        job.open(caller).add_argument(call, f"{name}={text}")


def list_calls(job: Job, function: Any) -> list[tuple[str, Any]]:
    """Return (path, call) of each call of a function of the project. Raises CannotEdit if it may also be
    called in another way: through a decorator, under another name, or as a value."""
    name, sources = function.name, job.facts.sources
    problem = CannotEdit(f"it is not known what calls {name}() in line {function.lineno}")
    others = {event.node.func for event in job.facts.select("call") if isinstance(event.node, ast.Call)}
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
        calls = {call.func: call for call in source.find(ast.Call)}
        named = []
        for node in source.find((ast.Name, ast.Attribute)):
            holder = unparse(node.value) if isinstance(node, ast.Attribute) else ""
            is_named = name == getattr(node, "id", getattr(node, "attr", "")) and node not in others
            # torch.save(), and vocabulary.save() of another class, are others
            named += [node] if is_named and (holder if is_method else holder in ("", *modules)) else []
        is_renamed = any(alias.name == name and alias.asname not in (None, name) for alias in imports)
        if is_renamed or not calls.keys() >= {*named}:
            raise problem
        found += [(source.path, calls[node]) for node in named]
    if not found:
        raise problem
    return found


def list_in_body(job: Job, loop: Loop, event: Event) -> list[Any]:
    """Return the statements of the body of a loop that have an event, or call the function that has it."""
    around = [event.node, *job.scope.above(event.path, event.node)]
    inside = [part for part in loop.node.body if part in around]
    for part in [] if inside else loop.node.body:
        calls = [unparse(one.func).rpartition(".")[2] for one in ast.walk(part) if isinstance(one, ast.Call)]
        inside += [part] if {*calls} & {*event.functions[loop.calls :][:1]} else []
    return inside


def restore(
    job: Job,
    checkpoint: Checkpoint,
    names: Iterable[Binding],
    find: Callable[[str, Any], Reach],
    key: str,
    line: str,
    later: Callable[[str], list[str]] = lambda _: [],
) -> None:
    """Load an entry where the others are loaded, or before the loop if what gets it is made in between.

    names: its bindings. find: returns its name at a place. line: puts the entry {1} into {0}. later: what
    follows this line before the loop.
    """
    try:
        check_order(job, checkpoint, names)
        target = find(checkpoint.path, checkpoint.anchor)
        load_entry(job, checkpoint, target, key, line.format(target.name, "{}"))
    except CannotEdit:
        loop = job.facts.loops[0]
        target = find(loop.path, loop.node)
        lines = [line.format(target.name, "{}"), *later(target.name)]
        load_before_loop(job, checkpoint, target.guard, key, lines)


def load_entry(job: Job, checkpoint: Checkpoint, target: Reach, key: str, line: str) -> None:
    """Load an entry after the others, and warn of a file without it. line: reads HOLDER[KEY] as {}."""
    test, otherwise = f'"{key}" in {checkpoint.holder}', "else:"
    if target.guard:
        test = f'{target.guard} and {checkpoint.holder}.get("{key}") is not None'
        otherwise = f"elif {target.guard}:"
    read = line.replace("{}", f'{checkpoint.holder}["{key}"]')
    warning = f'    print("warning: this checkpoint has no {key}")'
    script = job.open(checkpoint.path)
    script.insert_after(checkpoint.anchor, [f"if {test}:", f"    {read}", otherwise, warning])


def load_before_loop(
    job: Job, checkpoint: Checkpoint, guard: str, key: str, lines: list[str], *needed: str
) -> None:
    """Keep an entry in a dict where the others are loaded, and use it right before the loop. needed: names of
    the file that loads, which the lines have."""
    loop, path = job.facts.loops[0], checkpoint.path
    is_top = job.scope.function(path, checkpoint.anchor) is None
    is_once = len({one.node for one in job.facts.loops}) == 1 and (not is_top or path == loop.path)
    require(is_once, "the checkpoint is not loaded once, before the one loop that trains")
    user = job.open(loop.path)
    keep_entry(job, checkpoint, key)
    if path != loop.path:
        _import_names(job, checkpoint, user, (_RESTORED, *needed))
    # once: a second training of this process begins by itself
    entry = f'{_RESTORED}.pop("{key}")'
    test = f'{guard} and {_RESTORED}.get("{key}") is not None'.removeprefix(" and ")
    user.insert_before(loop.node, [f"if {test}:", *[f"    {line.replace('{}', entry)}" for line in lines]])


def keep_entry(job: Job, checkpoint: Checkpoint, key: str, *lines: str) -> None:
    """Keep an entry in a dict of the file that loads, whose name is _RESTORED. lines: below that dict."""
    path, made = checkpoint.path, f"{_RESTORED} = {{}}  # entries of a checkpoint"
    if not _keeps(job, path):
        job.open(path).claim(_RESTORED)
        lines = (made, *lines)
    insert_below_imports(job, path, [checkpoint.anchor], lines)
    load_entry(job, checkpoint, Reach(_RESTORED), key, f'{_RESTORED}["{key}"] = {{}}')


def _keeps(job: Job, path: str) -> bool:
    """Return whether a file has or imports the dict of a repair."""
    made = re.compile(rf"{_RESTORED} = {{}}|from .* import .*\b{_RESTORED}\b")
    return any(made.match(unparse(part)) for part in job.scope.trees[path].body)


def _import_names(job: Job, checkpoint: Checkpoint, user: Script, names: tuple[str, ...]) -> None:
    """Import names of the file that loads in the file with the loop."""
    module = "." + checkpoint.path.removesuffix(".py").replace(os.sep, ".")
    function = job.scope.function(checkpoint.path, checkpoint.anchor).name
    froms: list[tuple[ast.stmt, str]] = []  # (the statement, the module as it is written there)
    given: set[str] = set()
    for node in user.tree.body:
        if isinstance(node, ast.ImportFrom) and module.endswith(f".{node.module}"):
            froms.append((node, "." * node.level + str(node.module)))
            given.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Import) and module.endswith(f".{node.names[0].name}"):
            froms.append((node, node.names[0].name))
            given.add(function)
    require({function, "*"} & given, "the file with the loop does not import the function that loads")
    lacking = [name for name in names if name not in given]
    user.claim(*lacking)
    if lacking:
        user.insert_after(froms[-1][0], [f"from {froms[-1][1]} import {', '.join(lacking)}"])


def insert_below_imports(job: Job, path: str, nodes: list[ast.AST], lines: Iterable[str]) -> None:
    """Insert lines below the imports of a file, and above the statements with nodes."""
    used = [part for node in nodes for part in (node, *job.scope.above(path, node))]
    body = job.scope.trees[path].body
    above = body[: min(number for number, part in enumerate(body) if part in used)]
    made = f"{_RESTORED} = {{}}"
    imports = [one for one in above if isinstance(one, ast.Import | ast.ImportFrom) or unparse(one) == made]
    require(imports, "expected imports at the top of the file")
    job.open(path).insert_after(imports[-1], lines)


def check_order(job: Job, checkpoint: Checkpoint, names: Iterable[Binding]) -> None:
    """Raise CannotEdit if the script makes an object or sets a number after it has loaded the checkpoint."""
    orders = range(checkpoint.order + 1, job.facts.first_step + 1)
    for binding in names:
        is_late = binding.order in orders and binding.value.kind not in ("wrapped", "counter")
        where = f"in line {binding.node.lineno}, after the checkpoint is loaded"
        require(not is_late, f"{binding.name} is set {where}")

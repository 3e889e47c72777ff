"""Repairs of what the loop changes and the checkpoint lacks, or has but does not give back."""

import ast
import re
from typing import Any

from bootfile.fix.checkpoint import (
    RANDOM,
    Checkpoint,
    Job,
    find_checkpoint,
    find_moment,
    insert_below_imports,
    is_distributed,
    list_in_body,
    load_before_loop,
    reach,
    restore,
)
from bootfile.fix.edits import Script, require
from bootfile.fix.repairs_numbers import save_number
from bootfile.fix.scope import Reach, list_stored
from bootfile.lint.methods import IN_PLACE
from bootfile.lint.record import Binding, Class, Event
from bootfile.lint.rules_random import find_used
from bootfile.lint.sources import FUNCTIONS, unparse
from bootfile.lint.values import Value, root
from bootfile.lint.walk import find_holder

# the key of a generator -> how its state is read and set
_GENERATORS = {
    "Generator": ("{}.get_state()", "{0}.set_state({1}.cpu())"),
    "default_rng": ("{}.bit_generator.state", "{0}.bit_generator.state = {1}"),
    "Random": ("{}.getstate()", "{0}.setstate({1})"),
}
_STATE = ("{}.state_dict()", "{0}.load_state_dict({1})")
_MOVED = "{{key: part.to({0}%s[key].device) for key, part in {1}.items()}}"
STEPS = ("", "step", "update", "update_parameters", "load_state_dict", "data", *IN_PLACE)


def save_object(job: Job) -> None:
    """Save and load the state of an object (R101, R103, R104, R105, R106, R109)."""
    value = root(job.find("value"))
    get, put = _find_form(job, value)
    checkpoint = find_checkpoint(job)
    if value.kind == "generator":
        check_random(job, checkpoint, value)
    else:
        _check_steps(job, checkpoint, value)
    names = [reach(job, value, path, node) for path, node, _ in checkpoint.dicts]
    key = names[0].name.rpartition(".")[2]
    is_taken = any(key == str(other) for _, _, saved in checkpoint.dicts for other in saved.parts)
    key += "_state" if is_taken else ""
    for (path, node, _), reached in zip(checkpoint.dicts, names, strict=True):
        text = get.format(reached.name)
        job.open(path).add_entry(node, key, f"{text} if {reached.guard} else None" if reached.guard else text)
    _load(job, checkpoint, value, key, put)


def load_object(job: Job) -> None:
    """Load the state of an object, or a counter, that is saved (R201)."""
    value = root(job.find("value"))
    if value.kind == "counter":
        save_number(job)
        return
    checkpoint = find_checkpoint(job)
    entries = [(key, root(part)) for _, _, saved in checkpoint.dicts for key, part in saved.parts.items()]
    states = [(key, part.of) for key, part in entries if part.kind == "state" and part.of is not None]
    if keys := [key for key, owner in states if root(owner) is value]:
        _load(job, checkpoint, value, keys[0], _find_form(job, value)[1])
    else:  # its state is in another file, such as that of the best weights
        save_object(job)


def _find_form(job: Job, value: Value) -> tuple[str, str]:
    """Return how the state of an object is read and set. Raises CannotEdit if it has none."""
    if value.kind == "generator":
        get, put = _GENERATORS.get(value.key, ("", ""))
        require(get, "the state of this generator is not known")
        return get, put
    facts, cls = job.facts, value.cls
    methods = [facts.tracer.find_method(value, name) for name in ("state_dict", "load_state_dict")]
    is_dict = _is_dict(value)
    reason = f"{value.label or value.kind} has no state_dict() that torch.load() accepts"
    # a class without any of both may get them from its bases
    if not is_dict and (not isinstance(cls, Class) or any(methods) or cls.node.bases):
        require(value.kind != "list" and (all(methods) or not any(methods)), reason)
        return _STATE
    # a dict of tensors, or an object with one, or with a model, that keeps nothing else
    parts = {"": value} if is_dict else {f".{name}": root(part) for name, part in value.parts.items()}
    held = [name for name, part in parts.items() if part in facts.averaged and part.kind != "list"]
    sets = [event for event in facts.in_training("set_attribute") if root(event.value) is value]
    pairs = [(event.args[0], find_holder(event.value)) for event in facts.in_training("set_item")]
    items = [(given, holder) for given, holder in pairs if holder in parts.values()]
    # a part that is filled in the loop is empty when the checkpoint is loaded
    is_kept = all((holder in facts.list_deps(given)) is (holder in facts.averaged) for given, holder in items)
    is_kept &= all(event.args[0].kind in ("dict", "list", "none") for event in sets)
    require(len(held) == 1 and is_kept, reason)
    member = held[0]
    if _is_dict(parts[member]):
        return f"{{}}{member}", f"{{0}}{member}.update({_MOVED % member})"
    return f"{{}}{member}.state_dict()", f"{{0}}{member}.load_state_dict({{1}})"


def _is_dict(value: Value) -> bool:
    """Return whether an object is a dict, or the copy of a state."""
    return value.kind == "dict" or (
        value.kind == "copied" and value.of is not None and value.of.kind == "state"
    )


def _load(job: Job, checkpoint: Checkpoint, value: Value, key: str, put: str) -> None:
    """Load a state where the others are loaded, or before the loop if the object is made in between."""
    bound = [binding for binding in job.facts.tracer.bound if root(binding.value) is value]
    made = [binding for binding in bound if not isinstance(binding.node, ast.arg)]
    # what fills a dict
    fills = job.facts.select("set_item", "method") if "update(" in put else []
    filled = {value, *map(root, value.parts.values())}
    fills = [event for event in fills if event.text not in IN_PLACE and find_holder(event.value) in filled]
    made += [Binding(value, value.label, None, event.node, event.path, event.order) for event in fills]

    def find(path: str, node: Any) -> Reach:
        return reach(job, value, path, node)

    def write_rate(name: str) -> list[str]:
        return _write_rate(value, name) if value.kind == "scheduler" else []

    restore(job, checkpoint, made, find, key, put, write_rate)


def _write_rate(value: Value, name: str) -> list[str]:
    """Return the lines that give an optimizer the learning rate of its scheduler, which has set it to the
    first one when it was made. Raises CannotEdit if it sets more than that."""
    sets_more = value.cls is not None or value.key in ("OneCycleLR", "CyclicLR")
    require(not sets_more, f"{name} is made after the optimizer is loaded, and changes it")
    groups = f"zip({name}.optimizer.param_groups, {name}.get_last_lr())"
    # the names of a comprehension are not those of the script
    line = f"[group.update(lr=rate) for group, rate in {groups}]"
    return [] if value.key == "ReduceLROnPlateau" else [line]


def _check_steps(job: Job, checkpoint: Checkpoint, value: Value) -> None:
    """Raise CannotEdit if an epoch changes an object after it has saved it."""
    moment = find_moment(job, checkpoint)
    later = []
    for event in job.facts.in_training("step", "method", "set_item", "set_attribute"):
        owner = find_holder(event.value)
        is_step = event.text in STEPS or event.name == "set_item"
        # the state of an optimizer has the learning rate, which its scheduler sets
        is_rate = event.name == "step" and owner.kind == "scheduler"
        is_rate = is_rate and root(owner.parts.get("first", Value())) is value
        later += [event] if event.order > moment and (is_rate or (owner is value and is_step)) else []
    others = [event for event in later if root(event.value).kind != "scheduler"]
    reason = f"{value.label} changes in line {later[0].line}, after the checkpoint is saved" if later else ""
    require(not others, reason)
    # a call of step() has several events
    for event in {event.node: event for event in later}.values():
        _step_before_save(job, event, moment)


def _step_before_save(job: Job, step: Event, moment: int) -> None:
    """Move a step of a schedule before the save of its epoch, which then has the learning rate of the next
    one. Raises CannotEdit if that may change a run without an interruption."""
    facts, loop = job.facts, step.loops[0]
    reason = f"{root(step.value).label} changes in line {step.line}, after the checkpoint is saved"
    between = [event for event in facts.events if moment <= event.order <= step.order]
    trained = facts.list_trained()
    places = [list_in_body(job, loop, event) for event in (trained[-1], between[0], step)]
    require(all(len(place) == 1 for place in places) and trained[-1].order <= moment, reason)
    first, last = (loop.node.body.index(place[0]) for place in places[1:])
    moved, crossed = loop.node.body[last], loop.node.body[first:last]
    texts = [unparse(part) for part in (*crossed[1:], *[event.node for event in between])]
    is_logged = any(re.search(r"param_groups|get(_last)?_lr\b", text) for text in texts)
    is_apart = places[0] != places[1] and not is_logged
    require(is_apart and _is_movable(job, step.path, moved, crossed), reason)
    job.open(step.path).move(moved, loop.node.body[first])
    note = f"line {step.line} comes before the save now, which has the learning rate of the next epoch"
    job.notes.append(note)


def _is_movable(job: Job, path: str, moved: Any, crossed: list[ast.stmt]) -> bool:
    """Return whether a statement has only steps of schedules, and does the same before other statements: the
    first one saves, and the others may not change what the step reads, or read the rate that it sets."""
    parts, inside = [*ast.walk(moved)], [part for statement in crossed for part in ast.walk(statement)]
    between = [part for statement in crossed[1:] for part in ast.walk(statement)]
    steps = [one for one in job.facts.in_training("step") if root(one.value).kind == "scheduler"]
    nodes = [one.node for one in steps]
    calls = [part for part in parts if isinstance(part, ast.Call)]
    given = " ".join(unparse(arg) for call in calls for arg in (*call.args, *call.keywords))
    used = {part.id for part in parts if isinstance(part, ast.Name)}
    set_there = list_stored(inside) | job.scope.shared(path)
    is_left = any(isinstance(part, ast.Break | ast.Continue | ast.Return) for part in inside)
    is_plain = isinstance(moved, ast.Expr | ast.If) and all(call in nodes for call in calls)
    called = {unparse(part.func) for part in between if isinstance(part, ast.Call)} - {"print", "torch.save"}
    names = {name.rpartition(".")[2] for name in called}
    functions = [one for source in job.facts.sources for one in source.find(FUNCTIONS)]
    bodies = [unparse(one) for one in functions if one.name in names]
    reads_rate = any(re.search(r"param_groups|lr\b|optim|\bglobal\b", body) for body in bodies)
    # its function may read anything
    is_free = any(
        root(one.value).key in ("LambdaLR", "MultiplicativeLR") for one in steps if one.node in parts
    )
    sets = any(isinstance(getattr(part, "ctx", None), ast.Store) for part in between)
    reads_more = is_free and bool(called or sets)
    read = [part for part in parts if part not in [node.func for node in nodes]]
    is_plain &= not (reads_rate or reads_more or job.scope.may_change(path, read, between))
    return bool(crossed) and is_plain and not is_left and "self." not in given and not used & set_there


# Random numbers


def check_random(
    job: Job, checkpoint: Checkpoint, generator: Value | None = None, is_early: bool = False
) -> None:
    """Raise CannotEdit if the state of random numbers at the save is not the one after the epoch, or if a
    restart draws from them between the load and the loop. is_early: what is saved is the state before the
    epoch, which a restart repeats."""
    facts = job.facts
    reason = "each process has its own random numbers, and the checkpoint has those of one"
    require(not is_distributed(facts), reason)
    saves = [save.event for save in facts.training_saves]
    is_whole = saves and not any(len(save.loops) > 1 for save in saves)
    require(is_whole, "the checkpoint is saved within an epoch, whose order has begun before")
    draws = [*facts.select("iterate"), *facts.calls(RANDOM)]
    moment = find_moment(job, checkpoint)
    for draw in draws:
        is_inside, where = facts.is_in_training(draw), f"in line {draw.line}"
        is_late = is_inside and draw.order > moment and not is_early
        require(not is_late, f"random numbers are drawn {where}, after the checkpoint is saved")
    for draw in draws if generator is not None else []:
        is_between = checkpoint.order < draw.order < facts.first_step and not facts.is_in_training(draw)
        require(not is_between, f"line {draw.line} may draw from it after the checkpoint is loaded")


def save_random(job: Job) -> None:
    """Save the states of the global random numbers, and restore them before the loop (R401)."""
    checkpoint = find_checkpoint(job)
    early = _find_early(job, checkpoint)
    check_random(job, checkpoint, is_early=early is not None)
    is_one_file = all(path == checkpoint.path for path, _, _ in checkpoint.dicts)
    require(is_one_file, "the checkpoint is saved in another file than the loop")
    script = job.open(checkpoint.path)
    load_before_loop(job, checkpoint, "", "random_states", ["set_random_states({})"], "set_random_states")
    text = "get_random_states()"
    if early is not None:
        script.insert_first(early, [f"random_states = {text}"])
        text = "random_states"
    for _, node, _ in checkpoint.dicts:
        script.add_entry(node, "random_states", text)
    add_random_functions(job, checkpoint)


def add_random_functions(job: Job, checkpoint: Checkpoint) -> None:
    """Add the functions that read and set all random numbers to the file of the checkpoint."""
    nodes = [checkpoint.anchor, *[node for _, node, _ in checkpoint.dicts]]
    lines = _write_functions(job.open(checkpoint.path), find_used(job.facts))
    insert_below_imports(job, checkpoint.path, nodes, lines)


def _find_early(job: Job, checkpoint: Checkpoint) -> Any:
    """Return the test in the loop that is around each save, if the loop saves before it trains, and a restart
    repeats that pass from its beginning; None otherwise."""
    facts, moment = job.facts, find_moment(job, checkpoint)
    loop, numbers = facts.loops[0], facts.in_training("set_name", "set_attribute")
    nodes = [node for path, node, _ in checkpoint.dicts if path == loop.path]
    tests = [part for part in loop.node.body if isinstance(part, ast.If) and not part.orelse]
    around = [part for part in tests if nodes and all(node in ast.walk(part) for node in nodes)]
    # the number of this pass is in the checkpoint, and not that of the next one
    saved = {value for _, _, one in checkpoint.dicts for value in one.parts.values()}
    early = [event for event in numbers if event.args[0] in saved and event.order < moment]
    counters = [value for value in saved if value.kind == "counter"]
    is_repeated = loop.value in saved or (counters and not any(event.args[0] in counters for event in early))
    drawn = [*facts.select("iterate"), *facts.calls(RANDOM)]
    before = [draw for draw in drawn if draw.order < moment and facts.is_in_training(draw)]
    is_known = around and len(nodes) == len(checkpoint.dicts) and facts.list_trained()[0].order > moment
    is_known = is_known and all(list_in_body(job, loop, draw) == around for draw in before)
    is_free = "random_states" not in job.open(loop.path).find_bound()
    is_next = any(facts.is_in_training(event) for event in facts.calls("^next$"))
    return around[0] if is_known and is_repeated and is_free and not is_next else None


def _write_functions(script: Script, used: set[str]) -> list[str]:
    """Return the lines of two functions. used: the sources of random numbers of the program; the state of
    another one would differ in each run. Raises CannotEdit if a name that they need has another meaning."""
    torch, numpy, python = (script.imported(name) for name in ("torch", "numpy", "random"))
    require(torch, "torch is not imported by its name")
    script.claim("get_random_states", "set_random_states")
    get = [f'        "torch": {torch}.get_rng_state(),', f'        "cuda": {torch}.cuda.get_rng_state_all(),']
    put = [
        f'    {torch}.set_rng_state(states["torch"].cpu())',
        f'    if len(states["cuda"]) == {torch}.cuda.device_count():',
        f'        {torch}.cuda.set_rng_state_all([state.cpu() for state in states["cuda"]])',
    ]
    if numpy and "NumPy" in used:
        # torch.load() refuses arrays of NumPy
        array = f"part.tolist() if isinstance(part, {numpy}.ndarray) else part"
        keys = f"[{array} for part in {numpy}.random.get_state()]"
        get.append(f'        "numpy": {keys},')
        put.append(f'    {numpy}.random.set_state(tuple(states["numpy"]))')
    if python and "Python" in used:
        get.append(f'        "python": {python}.getstate(),')
        put.append(f'    {python}.setstate(states["python"])')
    get = ["", "", "def get_random_states():", "    return {", *get, "    }"]
    return [*get, "", "", "def set_random_states(states):", *put]

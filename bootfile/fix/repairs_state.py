"""Repairs of what the loop changes and the checkpoint lacks, or has but does not give back."""

import ast
import re
from typing import Any

from bootfile.fix.checkpoint import (
    Checkpoint,
    Job,
    add_entry,
    check_order,
    choose_key,
    find_checkpoint,
    find_moment,
    insert_below_imports,
    is_distributed,
    list_in_body,
    load_before_loop,
    load_entry,
    reach,
)
from bootfile.fix.edits import Script
from bootfile.fix.places import CannotEdit
from bootfile.lint.record import Class, Event
from bootfile.lint.sources import FUNCTIONS, unparse
from bootfile.lint.values import Value, root

# the key of a generator -> how its state is read and set
_GENERATORS = {
    "Generator": ("{}.get_state()", "{}.set_state({}.cpu())"),
    "default_rng": ("{}.bit_generator.state", "{}.bit_generator.state = {}"),
    "Random": ("{}.getstate()", "{}.setstate({})"),
}
_STATE = ("{}.state_dict()", "{}.load_state_dict({})")
_RANDOM = (
    r"^(torch|numpy\.random|random)\.(rand|randn|randint|randperm|random|shuffle|sample|choice|uniform|normal"
    r"|permutation|bernoulli|multinomial)\w*$|random_split$"
)


def save_object(job: Job) -> None:
    """Save and load the state of an object (R101, R103, R104, R105, R106, R109)."""
    value = root(job.find("value"))
    get, put = _GENERATORS.get(value.key, ("", "")) if value.kind == "generator" else _STATE
    if not get or not _has_state(job, value):
        raise CannotEdit(f"{value.label or value.kind} has no state_dict() that torch.load() accepts")
    checkpoint = find_checkpoint(job)
    if value.kind == "generator":
        check_random(job, checkpoint, value)
    else:
        _check_steps(job, checkpoint, value)
    names = [reach(job, value, *place[:2]) for place in checkpoint.dicts]
    key = choose_key(checkpoint, names[0].name)
    for place, reached in zip(checkpoint.dicts, names, strict=True):
        text = get.format(reached.name)
        add_entry(job, place, key, f"{text} if {reached.guard} else None" if reached.guard else text)
    _load(job, checkpoint, value, key, put)


def load_object(job: Job) -> None:
    """Load the state of an object that is saved (R201)."""
    value = root(job.find("value"))
    checkpoint = find_checkpoint(job)
    keys = []
    for _, _, saved in checkpoint.dicts:
        for key, part in saved.parts.items():
            owner = root(part).of if root(part).kind == "state" else None
            if owner is not None and root(owner) is value:
                keys.append(key)
    put = _GENERATORS.get(value.key, ("", ""))[1] if value.kind == "generator" else _STATE[1]
    if not put:
        raise CannotEdit(f"{value.label or value.kind} has no state that torch.load() accepts")
    # its state is in another file, such as that of the best weights
    if not keys:
        save_object(job)
        return
    _load(job, checkpoint, value, keys[0], put)


def _load(job: Job, checkpoint: Checkpoint, value: Value, key: str, put: str) -> None:
    """Load a state where the others are loaded, or before the loop if the object is made in between."""
    bound = [binding for binding in job.facts.tracer.bound if root(binding.value) is value]
    made = [binding for binding in bound if not isinstance(binding.node, ast.arg)]
    # an error names a line of a function first
    made.sort(key=lambda binding: binding.function is None)
    try:
        check_order(job, checkpoint, made)
        target = reach(job, value, checkpoint.path, checkpoint.anchor)
        load_entry(job, checkpoint, target, key, put.replace("{}", target.name, 1))
    except CannotEdit as error:
        try:
            loop = job.facts.loops[0]
            target = reach(job, value, loop.path, loop.node)
        except CannotEdit:
            raise error from None
        lines = [put.replace("{}", target.name, 1)]
        if value.kind == "scheduler":
            lines += _write_rate(value, target.name)
        load_before_loop(job, checkpoint, target.guard, key, lines)


def _write_rate(value: Value, name: str) -> list[str]:
    """Return the lines that give an optimizer the learning rate of its scheduler, which has set it to the
    first one when it was made. Raises CannotEdit if it sets more than that."""
    if value.cls is not None or value.key in ("OneCycleLR", "CyclicLR"):
        raise CannotEdit(f"{name} is made after the optimizer is loaded, and changes it")
    if value.key == "ReduceLROnPlateau":
        return []
    groups = f"zip({name}.optimizer.param_groups, {name}.get_last_lr())"
    return [f"for group, rate in {groups}:", '    group["lr"] = rate']


def _check_steps(job: Job, checkpoint: Checkpoint, value: Value) -> None:
    """Raise CannotEdit if an epoch changes an object after it has saved it."""
    moment = find_moment(job, checkpoint)
    changes = []
    for event in job.facts.in_training("step", "method"):
        if root(event.value) is value and event.text in ("", "step", "update", "update_parameters"):
            changes.append(event)
    # the state of an optimizer has the learning rate, which its scheduler sets
    for event in job.facts.in_training("step"):
        scheduler = root(event.value)
        if scheduler.kind == "scheduler" and root(scheduler.parts.get("first", Value())) is value:
            changes.append(event)
    later = [event for event in changes if event.order > moment]
    if later and any(root(event.value).kind != "scheduler" for event in later):
        raise CannotEdit(f"{value.label} changes in line {later[0].line}, after the checkpoint is saved")
    # a call of step() has several events
    for event in {event.node: event for event in later}.values():
        _step_before_save(job, event, moment)


def _step_before_save(job: Job, step: Event, moment: int) -> None:
    """Move a step of a schedule before the save of its epoch, which then has the learning rate of the next
    one. Raises CannotEdit if that may change a run without an interruption."""
    facts, loop = job.facts, step.loops[0]
    problem = CannotEdit(
        f"{root(step.value).label} changes in line {step.line}, after the checkpoint is saved"
    )
    between = [event for event in facts.events if moment <= event.order <= step.order]
    trained = facts.list_trained()
    places = [list_in_body(job, loop, event) for event in (trained[-1], between[0], step)]
    if any(len(place) != 1 for place in places) or trained[-1].order > moment:
        raise problem
    first, last = (loop.node.body.index(place[0]) for place in places[1:])
    moved, crossed = loop.node.body[last], loop.node.body[first:last]
    texts = [unparse(part) for part in (*crossed[1:], *[event.node for event in between])]
    is_logged = any(re.search(r"param_groups|get(_last)?_lr\b", text) for text in texts)
    if places[0] == places[1] or is_logged or not _is_movable(job, step.path, moved, crossed):
        raise problem
    job.open(step.path).move(moved, loop.node.body[first])
    job.notes.append(
        f"line {step.line} comes before the save now, which has the learning rate of the next epoch"
    )


def _is_movable(job: Job, path: str, moved: Any, crossed: list[ast.stmt]) -> bool:
    """Return whether a statement has only steps of schedules, and does the same before other statements."""
    steps = [one.node for one in job.facts.in_training("step") if root(one.value).kind == "scheduler"]
    calls = [node for node in ast.walk(moved) if isinstance(node, ast.Call)]
    used = {node.id for node in ast.walk(moved) if isinstance(node, ast.Name)}
    given = " ".join(unparse(arg) for call in calls for arg in (*call.args, *call.keywords))
    inside = [node for statement in crossed for node in ast.walk(statement)]
    stored = {node.id for node in inside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    shared = {name for node in job.facts.nodes(path, ast.Global) for name in node.names}
    is_left = any(isinstance(part, ast.Break | ast.Continue | ast.Return) for part in inside)
    is_plain = isinstance(moved, ast.Expr | ast.If) and all(call in steps for call in calls)
    is_plain &= not _may_change(job, moved, crossed[1:])
    return (
        bool(crossed) and is_plain and not is_left and "self." not in given and not used & (stored | shared)
    )


def _may_change(job: Job, moved: Any, crossed: list[ast.stmt]) -> bool:
    """Return whether the statements between a save and a step may change what the step reads, or read the
    rate that it sets. A call may change an object that it gets, or whose method it is."""
    steps = [one for one in job.facts.in_training("step") if one.node in ast.walk(moved)]
    calls = [node for part in crossed for node in ast.walk(part) if isinstance(node, ast.Call)]
    calls = [call for call in calls if unparse(call.func) not in ("print", "torch.save")]
    held = [node for node in ast.walk(moved) if isinstance(node, ast.Attribute | ast.Subscript)]
    held = [node for node in held if node not in [step.node.func for step in steps]]
    read = {part.id for node in held for part in ast.walk(node) if isinstance(part, ast.Name)}
    named = {part.id for call in calls for part in ast.walk(call) if isinstance(part, ast.Name)}
    named |= {re.split(r"[.\[]", unparse(node))[0] for part in crossed for node in _list_stores(part)}
    called = {unparse(call.func).rpartition(".")[2] for call in calls}
    functions = [one for source in job.facts.sources for one in source.find(FUNCTIONS)]
    bodies = [unparse(one) for one in functions if one.name in called]
    reads_rate = any(re.search(r"param_groups|lr\b|optim|\bglobal\b", body) for body in bodies)
    # its function may read anything
    is_free = any(root(step.value).key in ("LambdaLR", "MultiplicativeLR") for step in steps)
    return bool(read & named) or reads_rate or (is_free and bool(calls or named))


def _list_stores(part: ast.AST) -> list[ast.AST]:
    """Return the names, attributes and entries that a statement sets."""
    return [node for node in ast.walk(part) if isinstance(getattr(node, "ctx", None), ast.Store)]


def _has_state(job: Job, value: Value) -> bool:
    """Return whether an object has state_dict() and load_state_dict(), as far as its class is known."""
    if not isinstance(value.cls, Class):
        return True
    methods = [job.facts.tracer.find_method(value, name) for name in ("state_dict", "load_state_dict")]
    # a class without any of both may get them from its bases
    may_inherit = not any(methods) and bool(value.cls.node.bases)
    return all(methods) or may_inherit


# Random numbers


def check_random(job: Job, checkpoint: Checkpoint, generator: Value | None = None) -> None:
    """Raise CannotEdit if the state of random numbers at the save is not the one after the epoch, or if a
    restart draws from them between the load and the loop."""
    facts = job.facts
    if is_distributed(facts):
        raise CannotEdit("each process has its own random numbers, and the checkpoint has those of one")
    saves = [save.event for save in facts.training_saves]
    if not saves or any(len(save.loops) > 1 for save in saves):
        raise CannotEdit("the checkpoint is saved within an epoch, whose order has begun before")
    draws = [*facts.select("iterate"), *facts.calls(_RANDOM)]
    moment = find_moment(job, checkpoint)
    inside = [draw for draw in draws if facts.is_in_training(draw)]
    outside = [draw for draw in draws if not facts.is_in_training(draw)]
    later = [draw for draw in inside if draw.order > moment]
    if later:
        raise CannotEdit(f"random numbers are drawn in line {later[0].line}, after the checkpoint is saved")
    between = [draw for draw in outside if checkpoint.order < draw.order < facts.first_step]
    if generator is not None and between:
        raise CannotEdit(f"line {between[0].line} may draw from it after the checkpoint is loaded")


def save_random(job: Job) -> None:
    """Save the states of the global random numbers, and restore them before the loop (R401)."""
    checkpoint = find_checkpoint(job)
    check_random(job, checkpoint)
    if any(path != checkpoint.path for path, _, _ in checkpoint.dicts):
        raise CannotEdit("the checkpoint is saved in another file than the loop")
    script = job.open(checkpoint.path)
    load_before_loop(job, checkpoint, "", "random_states", ["set_random_states({})"], "set_random_states")
    for place in checkpoint.dicts:
        add_entry(job, place, "random_states", "get_random_states()")
    nodes = [checkpoint.anchor, *[node for _, node, _ in checkpoint.dicts]]
    insert_below_imports(job, checkpoint.path, nodes, _write_functions(script))


def _write_functions(script: Script) -> list[str]:
    """Return the lines of two functions. Raises CannotEdit if a name that they need has another meaning."""
    torch, numpy, python = (script.imported(name) for name in ("torch", "numpy", "random"))
    if not torch or script.find_bound() & {"get_random_states", "set_random_states"}:
        raise CannotEdit("torch is not imported by its name, or a name of the repair has another meaning")
    get = [f'        "torch": {torch}.get_rng_state(),', f'        "cuda": {torch}.cuda.get_rng_state_all(),']
    put = [
        f'    {torch}.set_rng_state(states["torch"].cpu())',
        f'    if len(states["cuda"]) == {torch}.cuda.device_count():',
        f'        {torch}.cuda.set_rng_state_all([state.cpu() for state in states["cuda"]])',
    ]
    if numpy:
        # torch.load() refuses arrays of NumPy
        array = f"part.tolist() if isinstance(part, {numpy}.ndarray) else part"
        keys = f"[{array} for part in {numpy}.random.get_state()]"
        get.append(f'        "numpy": {keys},')
        put.append(f'    {numpy}.random.set_state(tuple(states["numpy"]))')
    if python:
        get.append(f'        "python": {python}.getstate(),')
        put.append(f'    {python}.setstate(states["python"])')
    get = ["", "", "def get_random_states():", "    return {", *get, "    }"]
    return [*get, "", "", "def set_random_states(states):", *put]

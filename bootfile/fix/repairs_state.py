"""Repairs of what the loop changes and the checkpoint lacks, or has but does not give back."""

import ast
from typing import Any

from bootfile.fix.checkpoint import (
    Checkpoint,
    Job,
    add_entry,
    check_order,
    choose_key,
    find_checkpoint,
    load_entry,
)
from bootfile.fix.places import CannotEdit
from bootfile.fix.scope import Reach
from bootfile.lint.record import Class, Event
from bootfile.lint.sources import unparse
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
    used = _describe_uses(job, value)
    target = job.scope.reach(value, checkpoint.path, checkpoint.anchor, used)
    check_order(job, checkpoint, target.name)
    key = choose_key(checkpoint, target.name)
    for place in checkpoint.dicts:
        reach = job.scope.reach(value, place[0], place[1], used)
        text = get.format(reach.name)
        add_entry(job, place, key, f"{text} if {reach.guard} else None" if reach.guard else text)
    line = put.format(target.name, f'{checkpoint.holder}["{key}"]')
    load_entry(job, checkpoint, target, key, line, "it begins again")


def load_object(job: Job) -> None:
    """Load the state of an object that is saved (R201)."""
    value = root(job.find("value"))
    checkpoint = find_checkpoint(job)
    keys = [
        key
        for _, _, saved in checkpoint.dicts
        for key, part in saved.parts.items()
        if root(part).kind == "state" and root(part).of is not None and root(root(part).of or part) is value
    ]
    put = _GENERATORS.get(value.key, ("", ""))[1] if value.kind == "generator" else _STATE[1]
    if not keys or not put:
        raise CannotEdit("the entry is not one of the dict that is loaded")
    target = job.scope.reach(value, checkpoint.path, checkpoint.anchor, _describe_uses(job, value))
    check_order(job, checkpoint, target.name)
    line = put.format(target.name, f'{checkpoint.holder}["{keys[0]}"]')
    load_entry(job, checkpoint, target, keys[0], line, "it begins again")


def save_number(job: Job) -> None:
    """Save and load a counter or a best result (R107, R108)."""
    event = job.find("event")
    is_best = job.finding.rule == "R108"
    targets = getattr(event.node, "targets", None) or [getattr(event.node, "target", None)]
    name = unparse(targets[0]) if is_best and isinstance(event, Event) else event.label
    checkpoint = find_checkpoint(job)
    places = [(path, node) for path, node, _ in checkpoint.dicts]
    for path, node in [*places, (checkpoint.path, checkpoint.anchor)]:
        function = job.scope.function(path, node)
        if path != event.path or not job.scope.is_bound(name, path, node, function):
            raise CannotEdit(f"{name} may not be bound in line {getattr(node, 'lineno', 0)} of {path}")
    check_order(job, checkpoint, name)
    _check_number(job, checkpoint, name)
    known = [str(key) for _, _, value in checkpoint.dicts for key in value.parts]
    key = name.rpartition(".")[2]
    if key not in known:
        for place in checkpoint.dicts:
            # a number of NumPy, or a tensor on a device, is more than torch.load() accepts
            add_entry(job, place, key, f"float({name})" if is_best else name)
    load_entry(job, checkpoint, Reach(name), key, f'{name} = {checkpoint.holder}["{key}"]', "it begins again")


def _check_number(job: Job, checkpoint: Checkpoint, name: str) -> None:
    """Raise CannotEdit if the loop changes a number after it has saved it."""
    saves = [save.event.order for save in job.facts.restart_saves]
    last = max(event.order for event in job.facts.events if job.facts.is_in_training(event))
    changes = [one for one in job.facts.tracer.bound if one.name == name and one.order <= last]
    later = [one for one in changes if one.order > min(saves)]
    if later:
        raise CannotEdit(f"{name} changes in line {later[0].node.lineno}, after the checkpoint is saved")


def _has_state(job: Job, value: Value) -> bool:
    """Return whether an object has state_dict() and load_state_dict(), as far as its class is known."""
    if not isinstance(value.cls, Class):
        return True
    names = ("state_dict", "load_state_dict")
    own = [job.facts.tracer.find_method(value, name) for name in names]
    return all(own) or (not any(own) and bool(value.cls.node.bases))


def _describe_uses(job: Job, value: Value) -> str:
    """Return the tests under which the training loop uses an object."""
    uses = [event for event in job.facts.in_training("step", "method", "call") if root(event.value) is value]
    return " ".join(event.describe_conditions() for event in uses[:1])


# Random numbers


def check_random(job: Job, checkpoint: Checkpoint, generator: Value | None = None) -> None:
    """Raise CannotEdit if the state of random numbers at the save is not the one after the epoch, or if a
    restart draws from them between the load and the loop."""
    facts = job.facts
    if facts.is_distributed():
        raise CannotEdit("each process has its own random numbers, and the checkpoint has those of one")
    saves = [save.event for save in facts.training_saves]
    if not saves or any(len(save.loops) > 1 for save in saves):
        raise CannotEdit("the checkpoint is saved within an epoch, whose order has begun before")
    draws = [*facts.select("iterate"), *facts.calls(_RANDOM)]
    later = [
        one for one in draws if facts.is_in_training(one) and one.order > min(save.order for save in saves)
    ]
    if later:
        raise CannotEdit(f"random numbers are drawn in line {later[0].line}, after the checkpoint is saved")
    between = [one for one in draws if checkpoint.order < one.order and not facts.is_in_training(one)]
    between = [one for one in between if one.order < facts.first_step]
    if generator is not None and between:
        raise CannotEdit(f"line {between[0].line} may draw from it after the checkpoint is loaded")


def save_random(job: Job) -> None:
    """Save the states of the global random numbers, and restore them before the loop (R401)."""
    checkpoint = find_checkpoint(job)
    check_random(job, checkpoint)
    loop = job.facts.loops[0]
    scope, path = job.scope, checkpoint.path
    around: list[Any] = [checkpoint.anchor, *scope.above(path, checkpoint.anchor)]
    block = scope.block(path, loop.node) if loop.path == path else []
    outer = next((part for part in around if part in block), None)
    if outer is None or block.index(outer) >= block.index(loop.node):
        raise CannotEdit("the checkpoint is not loaded in the function with the loop, before it")
    if any(dict_path != path for dict_path, _, _ in checkpoint.dicts):
        raise CannotEdit("the checkpoint is saved in another file than the loop")
    script = job.open(path)
    get, put = _write_states(script)
    body = script.tree.body
    imports = [number for number, part in enumerate(body) if isinstance(part, ast.Import | ast.ImportFrom)]
    script.insert_before(body[imports[-1] + 1], [*get, "", "", *put, "", ""])
    for place in checkpoint.dicts:
        add_entry(job, place, "random_states", "get_random_states()")
    script.insert_before(outer, ["random_states = None"])
    line = f'random_states = {checkpoint.holder}.get("random_states")'
    warning = '    print("warning: this checkpoint has no random_states: they begin again")'
    script.insert_after(checkpoint.anchor, [line, "if random_states is None:", warning])
    script.insert_before(loop.node, ["if random_states is not None:", "    set_random_states(random_states)"])


def _write_states(script: Any) -> tuple[list[str], list[str]]:
    torch, numpy, python = (script.imported(name) for name in ("torch", "numpy", "random"))
    taken = script.find_bound() & {"random_states", "get_random_states", "set_random_states"}
    if not torch or taken:
        raise CannotEdit("torch is not imported by its name, or a name of the repair has another meaning")
    get = [f'        "torch": {torch}.get_rng_state(),', f'        "cuda": {torch}.cuda.get_rng_state_all(),']
    put = [
        f'    {torch}.set_rng_state(states["torch"].cpu())',
        f'    if len(states["cuda"]) == {torch}.cuda.device_count():',
        f'        {torch}.cuda.set_rng_state_all([state.cpu() for state in states["cuda"]])',
    ]
    if numpy:
        # torch.load() refuses arrays of NumPy
        keys = f"[part.tolist() if hasattr(part, 'tolist') else part for part in {numpy}.random.get_state()]"
        get.append(f'        "numpy": {keys},')
        put.append(f'    {numpy}.random.set_state(tuple(states["numpy"]))')
    if python:
        get.append(f'        "python": {python}.getstate(),')
        put.append(f'    {python}.setstate(states["python"])')
    return ["def get_random_states():", "    return {", *get, "    }"], [
        "def set_random_states(states):",
        *put,
    ]

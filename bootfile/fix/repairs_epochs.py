"""Repairs of the epoch with which a restart begins, and of the order of the samples."""

import ast
from typing import Any

from bootfile.fix.checkpoint import (
    Checkpoint,
    Job,
    add_entry,
    find_checkpoint,
    load_before_loop,
)
from bootfile.fix.places import CannotEdit
from bootfile.fix.scope import Reach
from bootfile.lint.record import Event
from bootfile.lint.sources import is_listing, unparse
from bootfile.lint.values import Loop, Value, root


def shift_start(job: Job) -> None:
    """Begin with the epoch after the last one that was trained (R301)."""
    loop: Loop = job.find("event")
    start: Value = job.find("value")
    save: Event = job.find("save")
    offset = _find_offset(job, save, loop, start.key)
    # the saved number is the one of the loop plus an offset
    is_after = _find_last_step(job, loop) < save.order
    wanted = int(is_after) - offset
    reads = [node for node in job.nodes_at(start, ast.Subscript | ast.Call) if _reads(node, start.key)]
    if len(reads) != 1:
        raise CannotEdit(f"line {start.line} does not read the epoch in one place")
    node, script = reads[0], job.open(start.path)
    around: Any = job.scope.parents[start.path][node]
    added = int(job.find("added"))
    text = script.source(node)
    if wanted:
        text += f" + {wanted}" if wanted > 0 else f" - {-wanted}"
    is_sum = isinstance(around, ast.BinOp) and isinstance(around.right, ast.Constant) and around.left is node
    if added and not is_sum:
        raise CannotEdit("the number that is added to the epoch is not next to it")
    if added:
        script.replace(around, text)
    else:
        script.replace(node, text if isinstance(around, ast.Assign) else f"({text})")
    job.notes.append("the files stay the same: only what a restart makes of the saved epoch changes")


def _reads(node: Any, key: Any) -> bool:
    """Return whether a subscript, or a call of get() or pop(), reads a key."""
    read: ast.expr | None = None
    if isinstance(node, ast.Subscript):
        read = node.slice
    elif unparse(node.func).endswith((".get", ".pop")) and node.args:
        read = node.args[0]
    return isinstance(read, ast.Constant) and read.value == key


def _find_last_step(job: Job, loop: Loop) -> int:
    """Return when a loop makes its last step."""
    return [step.order for step in job.facts.list_trained() if step.loops[0] is loop][-1]


def _find_offset(job: Job, save: Event, loop: Loop, key: Any) -> int:
    """Return what the script adds to the number of a loop when it saves it."""
    entries = [entry for other in job.facts.saves if other.event is save for entry in other.entries]
    for entry in entries:
        is_shifted = entry.value.kind == "shifted"
        number = entry.value.of if is_shifted else entry.value
        if entry.name == str(key) and number is loop.value:
            return entry.value.offset if is_shifted else 0
    raise CannotEdit("the saved epoch is not the number of the loop")


def restore_start(job: Job) -> None:
    """Begin the loop with the epoch of the checkpoint (R302)."""
    loop: Loop = job.find("event")
    checkpoint = find_checkpoint(job)
    path, node = loop.path, loop.node
    target: Any = getattr(node, "target", None)
    call: Any = getattr(node, "iter", None)
    is_range = isinstance(call, ast.Call) and unparse(call.func) in ("range", "trange")
    if not is_range or not isinstance(target, ast.Name):
        raise CannotEdit("the loop is not a plain one over range()")
    saves = [save.event for save in job.facts.training_saves]
    if any(len(save.loops) > 1 or save.order < _find_last_step(job, loop) for save in saves):
        raise CannotEdit("the checkpoint is saved within an epoch, of which a part would be left out")
    key, offset = _save_epoch(job, checkpoint, loop, target.id)
    script = job.open(path)
    first = call.args[0] if len(call.args) > 1 else None
    begin = script.source(first) if first is not None else "0"
    name = _find_start(job, path, node, key)
    if not name:
        name = "start_epoch"
        if name in script.find_bound():
            raise CannotEdit(f"the name {name} has another meaning here")
        script.insert_before(node, [f"{name} = {begin}"])
        load_before_loop(job, checkpoint, "", key, [f"{name} = {{}}" + ("" if offset else " + 1")])
    if first is not None:
        script.replace(first, name)
    else:
        script.wrap(call.args[0], f"{name}, ", "")


def _save_epoch(job: Job, checkpoint: Checkpoint, loop: Loop, name: str) -> tuple[str, int]:
    """Return (key, what the script adds to it) of the number of the loop in the checkpoint. A checkpoint
    without it gets it. name: the name of the number in the loop."""
    entries = [(str(key), value) for _, _, saved in checkpoint.dicts for key, value in saved.parts.items()]
    for key, value in entries:
        if loop.value in (value, value.of):
            return key, value.offset if value.kind == "shifted" else 0
    if any(key == "epoch" for key, _ in entries):
        raise CannotEdit('the entry "epoch" of the checkpoint is another number')
    for place in checkpoint.dicts:
        if place[0] != loop.path or loop.node not in job.scope.above(loop.path, place[1]):
            raise CannotEdit("the checkpoint is written outside of the loop")
        add_entry(job, place, "epoch", name)
    return "epoch", 0


def _find_start(job: Job, path: str, loop: Any, key: str) -> str:
    """Return a name that has the number of the next epoch already; "" if there is none."""
    function = job.scope.function(path, loop)
    for binding in job.facts.tracer.bound:
        number = binding.value.of if binding.value.kind == "shifted" else None
        is_entry = number is not None and number.kind == "field" and number.key == key
        is_next = is_entry and binding.value.offset == 1
        is_here = binding.path == path and binding.function is function and "." not in binding.name
        if is_next and is_here and job.scope.is_bound(binding.name, path, loop, function):
            return binding.name
    return ""


def set_epoch(job: Job) -> None:
    """Call set_epoch() at the beginning of each epoch (R307)."""
    loop: Loop = job.find("loop")
    sampler = root(job.find("value"))
    body = loop.node.body[0]
    number = _number_of(loop)
    try:
        reached = job.scope.reach(sampler, loop.path, body)
        text = f"{reached.name}.set_epoch({number})"
    except CannotEdit:
        bound = job.facts.tracer.bound
        loaders = [root(binding.value) for binding in bound if _reads_with(binding.value, sampler)]
        reached = job.scope.reach(loaders[0], loop.path, body) if loaders else Reach("")
        text = f"{reached.name}.sampler.set_epoch({number})"
    if not reached.name:
        raise CannotEdit("the sampler has no name in the function with the loop") from None
    lines = [f"if {reached.guard}:", f"    {text}"] if reached.guard else [text]
    job.open(loop.path).insert_first(loop.node, lines)
    job.notes.append("each epoch has another order now, also without a restart")


def _reads_with(value: Value, sampler: Value) -> bool:
    """Return whether a value is a loader with a sampler."""
    return root(value).kind == "loader" and root(root(value).parts.get("sampler", Value())) is sampler


def _number_of(loop: Loop) -> str:
    """Return the name of the number of the epoch. Raises CannotEdit if the loop has none."""
    target = getattr(loop.node, "target", None)
    if not isinstance(target, ast.Name) or loop.value is None:
        raise CannotEdit("the loop has no number of the epoch")
    return target.id


def vary_epoch(job: Job) -> None:
    """Give set_epoch() the number of the epoch (R308)."""
    event: Event = job.find("event")
    arguments = [*event.node.args, *[keyword.value for keyword in event.node.keywords]]
    loop: Loop = job.find("loop")
    if event.path != loop.path or loop.node not in job.scope.above(event.path, event.node):
        raise CannotEdit("set_epoch() is not called in the loop over epochs itself")
    job.open(event.path).replace(arguments[0], _number_of(loop))
    job.notes.append("each epoch has another order now, also without a restart")


def sort_listing(job: Job) -> None:
    """Sort the names of files (R402)."""
    node: Any = job.find("event")
    path = job.finding.path
    cls = job.scope.cls(path, node)
    # lint names the first one of a class
    for call in ast.walk(cls):
        if not isinstance(call, ast.Call) or not is_listing(call):
            continue
        if call is node or isinstance(job.scope.parents[path][call], ast.Assign):
            end = ", key=lambda entry: entry.name)" if unparse(call.func).endswith("scandir") else ")"
            job.open(path).wrap(call, "sorted(", end)
    job.notes.append("the samples have another order now, also without a restart")


def seed_order(job: Job) -> None:
    """Give a loader that shuffles an order of the epoch (R305)."""
    event: Event = job.find("event")
    loader = root(job.find("value"))
    loop = event.loops[0]
    number = _number_of(loop)
    if "prepared" in loader.flags:
        name = job.scope.reach(loader, loop.path, loop.node.body[0]).name
        job.open(loop.path).insert_first(loop.node, [f"{name}.set_epoch({number})"])
        return
    calls = [call for call in job.nodes_at(loader, ast.Call) if unparse(call.func).endswith("DataLoader")]
    scope, path = job.scope, loop.path
    is_one = len(calls) == 1 and loader.path == path
    if not is_one or scope.function(path, calls[0]) is not scope.function(path, loop.node):
        raise CannotEdit("the loader is not made in one call in the function with the loop")
    script, made = job.open(path), scope.statement(path, calls[0])
    torch = script.imported("torch")
    block = scope.block(path, made)
    if not torch or "order" in script.find_bound() or loop.node not in block or made not in block:
        raise CannotEdit("the loader may not be bound, or a name of the repair has another meaning")
    script.add_argument(calls[0], "generator=order")
    script.insert_before(made, [f"order = {torch}.Generator()"])
    script.insert_first(loop.node, [f"order.manual_seed({number})"])
    job.notes.append("each epoch has the order of its number now, also without a restart")

"""Repairs of the epoch with which a restart begins, and of the order of the samples."""

import ast
from typing import Any

from bootfile.fix.checkpoint import Job, add_entry, find_checkpoint, find_loop, load_entry
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
    steps = [one.order for one in job.facts.select("step", "backward") if one.loops and one.loops[0] is loop]
    offset = _find_offset(job, save, loop, start.key)
    # the saved number is the one of the loop plus an offset
    wanted = (1 if steps[-1] < save.order else 0) - offset
    reads = [
        node for node in job.facts.nodes(start.path, ast.Subscript | ast.Call) if node.lineno == start.line
    ]
    reads = [node for node in reads if _reads(node, start.key)]
    if len(reads) != 1:
        raise CannotEdit(f"line {start.line} does not read the epoch in one place")
    node, script = reads[0], job.open(start.path)
    around: Any = job.scope.parents[start.path][node]
    added = int(job.find("added"))
    text = script.source(node) + (f" + {wanted}" if wanted > 0 else f" - {-wanted}" if wanted else "")
    is_sum = isinstance(around, ast.BinOp) and isinstance(around.right, ast.Constant) and around.left is node
    if added and not is_sum:
        raise CannotEdit("the number that is added to the epoch is not next to it")
    script.replace(
        around if added else node, text if isinstance(around, ast.Assign) or added else f"({text})"
    )
    job.notes.append("the files stay the same: only what a restart makes of the saved epoch changes")


def _reads(node: Any, key: Any) -> bool:
    is_get = isinstance(node, ast.Call) and unparse(node.func).endswith((".get", ".pop")) and node.args
    place = node.slice if isinstance(node, ast.Subscript) else node.args[0] if is_get else None
    return isinstance(place, ast.Constant) and place.value == key


def _find_offset(job: Job, save: Event, loop: Loop, key: Any) -> int:
    """Return what the script adds to the number of a loop when it saves it."""
    found = [entry.value for one in job.facts.saves if one.event is save for entry in one.entries]
    named = [entry.name for one in job.facts.saves if one.event is save for entry in one.entries]
    for name, value in zip(named, found, strict=True):
        number = value.of if value.kind == "shifted" else value
        if name == str(key) and number is loop.value:
            return value.offset if value.kind == "shifted" else 0
    raise CannotEdit("the saved epoch is not the number of the loop")


def restore_start(job: Job) -> None:
    """Begin the loop with the epoch of the checkpoint (R302)."""
    loop: Loop = job.find("event")
    checkpoint = find_checkpoint(job)
    path, node = loop.path, loop.node
    target, call = getattr(node, "target", None), getattr(node, "iter", None)
    if (
        not isinstance(call, ast.Call)
        or not isinstance(target, ast.Name)
        or unparse(call.func) not in ("range", "trange")
    ):
        raise CannotEdit("the loop is not a plain one over range()")
    saves = [save.event for save in job.facts.training_saves]
    steps = [one.order for one in job.facts.select("step", "backward") if one.loops and one.loops[0] is loop]
    if any(len(save.loops) > 1 or save.order < steps[-1] for save in saves):
        raise CannotEdit("the checkpoint is saved within an epoch, of which a part would be left out")
    scope = job.scope
    outer, _ = find_loop(job, checkpoint)
    name, key, offset = "start_epoch", "epoch", 0
    entries = [(str(key), value) for _, _, saved in checkpoint.dicts for key, value in saved.parts.items()]
    numbers = [(key, value) for key, value in entries if loop.value in (value, value.of)]
    if numbers:
        key, value = numbers[0]
        offset = value.offset if value.kind == "shifted" else 0
    elif any(key == "epoch" for key, _ in entries):
        raise CannotEdit('the entry "epoch" of the checkpoint is another number')
    for place in checkpoint.dicts if not numbers else ():
        if place[0] != path or node not in scope.above(path, place[1]):
            raise CannotEdit("the checkpoint is written outside of the loop")
        add_entry(job, place, key, target.id)
    script = job.open(path)
    known = _find_start(job, path, node, key)
    first = call.args[0] if len(call.args) > 1 else None
    begin = script.source(first) if first is not None else "0"
    if known:
        name = known
    else:
        if name in script.find_bound():
            raise CannotEdit(f"the name {name} has another meaning here")
        script.insert_before(outer, [f"{name} = {begin}"])
        load_entry(job, checkpoint, Reach(name), key, f"{name} = {{}}" + ("" if offset else " + 1"))
    if first is not None:
        script.replace(first, name)
    else:
        script.wrap(call.args[0], f"{name}, ", "")


def _find_start(job: Job, path: str, loop: Any, key: str) -> str:
    """Return a name that has the number of the next epoch already; "" if there is none."""
    function = job.scope.function(path, loop)
    for one in job.facts.tracer.bound:
        number = one.value.of if one.value.kind == "shifted" else None
        is_next = (
            number is not None and number.kind == "field" and number.key == key and one.value.offset == 1
        )
        is_here = one.path == path and one.function is function and "." not in one.name
        if is_next and is_here and job.scope.is_bound(one.name, path, loop, function):
            return one.name
    return ""


def set_epoch(job: Job) -> None:
    """Call set_epoch() at the beginning of each epoch (R307)."""
    loop: Loop = job.find("loop")
    sampler = root(job.find("value"))
    body = loop.node.body[0]
    number = _number_of(loop)
    try:
        name = job.scope.reach(sampler, loop.path, body)
        text = f"{name.name}.set_epoch({number})"
    except CannotEdit:
        loaders = [root(one.value) for one in job.facts.tracer.bound if _reads_with(one.value, sampler)]
        name = job.scope.reach(loaders[0], loop.path, body) if loaders else Reach("")
        text = f"{name.name}.sampler.set_epoch({number})"
    if not name.name:
        raise CannotEdit("the sampler has no name in the function with the loop") from None
    job.open(loop.path).insert_first(
        loop.node, [f"if {name.guard}:", f"    {text}"] if name.guard else [text]
    )
    job.notes.append("each epoch has another order now, also without a restart")


def _reads_with(value: Value, sampler: Value) -> bool:
    return root(value).kind == "loader" and root(root(value).parts.get("sampler", Value())) is sampler


def _number_of(loop: Loop) -> str:
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
    same = [one for one in ast.walk(cls) if isinstance(one, ast.Call) and is_listing(one)]
    for one in [one for one in same if one is node or isinstance(job.scope.parents[path][one], ast.Assign)]:
        end = ", key=lambda entry: entry.name)" if unparse(one.func).endswith("scandir") else ")"
        job.open(path).wrap(one, "sorted(", end)
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
    calls = [node for node in job.facts.nodes(loader.path, ast.Call) if node.lineno == loader.line]
    calls = [node for node in calls if unparse(node.func).endswith("DataLoader")]
    scope, path = job.scope, loop.path
    if (
        len(calls) != 1
        or loader.path != path
        or scope.function(path, calls[0]) is not scope.function(path, loop.node)
    ):
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

"""Repairs of the epoch with which a restart begins, of the order of the samples, and of the moment of a save:
at SIGTERM, and not between two steps of the optimizer."""

import ast
from typing import Any

from bootfile.fix.checkpoint import (
    RANDOM,
    Checkpoint,
    Job,
    find_checkpoint,
    find_moment,
    is_distributed,
    keep_entry,
    list_in_body,
    load_before_loop,
    split_read,
)
from bootfile.fix.edits import CannotEdit, require
from bootfile.fix.numbers import find_needs
from bootfile.fix.repairs_state import STEPS, add_random_functions
from bootfile.fix.scope import list_stored
from bootfile.lint.record import Event
from bootfile.lint.rules_files import is_checkpoint
from bootfile.lint.sources import is_listing, is_modulo, unparse
from bootfile.lint.values import Loop, Value, root
from bootfile.lint.walk import find_holder, split

_OF_ITS_OWN = {"generator", "sampler", "batch_sampler", "persistent_workers", 3, 4}
_ORDER = "each epoch has another order now, also without a restart"


def shift_start(job: Job) -> None:
    """Begin with the epoch after the last one that was trained (R301)."""
    loop: Loop = job.find("event")
    start: Value = job.find("value")
    save: Event = job.find("save")
    require(isinstance(loop, Loop), "a step is counted after it is saved")
    is_after = _find_last_step(job, loop) < save.order
    _set_start(job, start, int(is_after) - _find_offset(job, save, loop, start.key), int(job.find("added")))
    job.notes.append("the files stay the same: only what a restart makes of the saved epoch changes")


def _set_start(job: Job, start: Value, wanted: int, added: int) -> None:
    """Add a number to the epoch that is read from the checkpoint, in place of another one."""
    reads = [(node, split_read(node, ("get", "pop"))) for node in job.nodes_at(start, ast.expr)]
    reads = [(node, read) for node, read in reads if read is not None and read[1] == start.key]
    require(len(reads) == 1, f"line {start.line} does not read the epoch in one place")
    node, script = reads[0][0], job.open(start.path)
    around: Any = job.scope.parents[start.path][node]
    text = script.source(node)
    if wanted:
        text += f" + {wanted}" if wanted > 0 else f" - {-wanted}"
    is_sum = isinstance(around, ast.BinOp) and isinstance(around.right, ast.Constant) and around.left is node
    require(not added or is_sum, "the number that is added to the epoch is not next to it")
    is_alone = added or isinstance(around, ast.Assign)
    script.replace(around if added else node, text if is_alone else f"({text})")


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
    call: Any = getattr(node, "iter", None)
    is_range = isinstance(call, ast.Call) and unparse(call.func) in ("range", "trange")
    is_plain = is_range and len(call.args) < 3 and isinstance(getattr(node, "target", None), ast.Name)
    require(is_plain, "the loop is not a plain one over range()")
    saves = [save.event for save in job.facts.training_saves]
    is_part = any(len(save.loops) > 1 or save.order < _find_last_step(job, loop) for save in saves)
    require(not is_part, "the checkpoint is saved within an epoch, of which a part would be left out")
    key, offset = _save_epoch(job, checkpoint, loop)
    require(offset in (0, 1), "the saved epoch is neither the last one nor the next one")
    script = job.open(path)
    first = call.args[0] if len(call.args) > 1 else None
    begin = script.source(first) if first is not None else "0"
    name = "" if offset else _find_start(job, path, node, key)
    if not name:
        name = "start_epoch"
        script.claim(name)
        script.insert_before(node, [f"{name} = {begin}"])
        load_before_loop(job, checkpoint, "", key, [f"{name} = {{}}" + " + 1" * (1 - offset)])
    if first is not None:
        script.replace(first, name)
    else:
        script.wrap(call.args[0], f"{name}, ", "")


def _save_epoch(job: Job, checkpoint: Checkpoint, loop: Loop) -> tuple[str, int]:
    """Return (key, what the script adds to it) of the number of the loop in the checkpoint. A checkpoint
    without it gets it."""
    entries = [(str(key), value) for _, _, saved in checkpoint.dicts for key, value in saved.parts.items()]
    for key, value in entries:
        if loop.value in (value, value.of):
            return key, value.offset if value.kind == "shifted" else 0
    is_free = all(key != "epoch" for key, _ in entries)
    require(is_free, 'the entry "epoch" of the checkpoint is another number')
    for path, node, _ in checkpoint.dicts:
        is_inside = path == loop.path and loop.node in job.scope.above(loop.path, node)
        require(is_inside, "the checkpoint is written outside of the loop")
        job.open(path).add_entry(node, "epoch", loop.node.target.id)
    return "epoch", 0


def _find_start(job: Job, path: str, loop: Any, key: str) -> str:
    """Return a name that has the number of the next epoch already; "" if there is none."""
    function = job.scope.function(path, loop)
    for one in job.facts.tracer.bound:
        number = one.value.of if one.value.kind == "shifted" and one.value.offset == 1 else None
        is_entry = number is not None and (number.kind, number.key) == ("field", key)
        is_here = one.path == path and one.function is function and "." not in one.name
        if is_entry and is_here and job.scope.is_bound(one.name, path, loop, function):
            return one.name
    return ""


def skip_batches(job: Job) -> None:
    """Continue within an epoch: skip its first batches in the same order, with the random numbers (R303)."""
    save: Event = job.find("save")
    facts = job.facts
    require(len(save.loops) == 2, "the checkpoint is not saved in a loop over batches in one over epochs")
    loop, inner = save.loops
    read = [event for event in facts.in_training("iterate") if event.node is inner.node]
    loaders = [root(event.value) for event in read]
    options = loaders[0].options if loaders else {}
    is_drawn = loaders and loaders[0].cls is None and not options.keys() & _OF_ITS_OWN
    is_drawn = is_drawn and not any(value.kind == "open" for value in options.values())
    require(is_drawn and not is_distributed(facts), "the order of the loader is not drawn here")
    checkpoint = find_checkpoint(job)
    places = {checkpoint.path, inner.path, *[path for path, _, _ in checkpoint.dicts]}
    saves = [one.event for one in facts.training_saves if is_checkpoint(one)]
    is_one = len(places) == 1 and all(event.loops == save.loops for event in saves)
    require(is_one, "checkpoints are also saved elsewhere, or in another file")
    # what the epoch does before its first batch is done again, and what a batch does after the save is lost
    moment = find_moment(job, checkpoint)
    changes = [*facts.in_training("step", "iterate"), *facts.calls(RANDOM)]
    changes += [
        one for one in facts.in_training("set_name", "set_attribute") if one.args[0].kind == "counter"
    ]
    others = [
        one for one in facts.in_training("method", "set_item") if one.text in STEPS or one.name != "method"
    ]
    changes += [event for event in others if find_holder(event.value) in facts.changed]
    inside = [event for event in changes if event.loops[:1] == (loop,) and event not in read]
    nodes = {*ast.walk(inner.node)}
    early = [one for one in inside if one.loops == (loop,) and one.order < read[0].order]
    early = [one for one in early if one.node not in nodes]
    late = [event for event in inside if event.loops[:2] == save.loops and event.order > moment]
    for event in (early + late)[:1]:
        raise CannotEdit(f"line {event.line} would be done twice, or left out, by a restart within an epoch")
    # a restart may have no batch left
    kept = {value.label for _, _, saved in checkpoint.dicts for value in saved.parts.values()}
    for node, text in find_needs(inner.node, job.scope.parents[inner.path], kept):
        raise CannotEdit(f"line {getattr(node, 'lineno', 0)}: {text}")
    start, added = split(loop.start or Value())
    require(start.kind == "field", "the loop does not begin with an epoch of the checkpoint")
    wanted = -_find_offset(job, save, loop, start.key)
    if wanted != added:
        _set_start(job, start, wanted, added)
    script = job.open(inner.path)
    script.claim("position", "progress")
    keep_entry(job, checkpoint, "position", "progress = {}  # within an epoch")
    add_random_functions(job, checkpoint)
    entry = '{**progress, "random_states": get_random_states()}'
    for _, node, _ in checkpoint.dicts:
        script.add_entry(node, "position", entry)
    script.insert_before(inner.node, [
        'position = restored.pop("position", None)',
        "if position:",
        '    set_random_states(position["begin"])',
        'progress.update(begin=get_random_states(), batches=0)',
    ])  # fmt: skip
    script.insert_first(inner.node, [
        'progress["batches"] += 1',
        'if position and progress["batches"] <= position["batches"]:',
        '    if progress["batches"] == position["batches"]:',
        '        set_random_states(position["random_states"])',
        "    continue",
    ])  # fmt: skip


def set_epoch(job: Job) -> None:
    """Call set_epoch() at the beginning of each epoch (R307)."""
    loop: Loop = job.find("loop")
    sampler = root(job.find("value"))
    body = loop.node.body[0]
    number = _number_of(loop)
    try:
        reached, owner = job.scope.reach(sampler, loop.path, body), ""
    except CannotEdit:
        values = [root(binding.value) for binding in job.facts.tracer.bound]
        loaders = [one for one in values if one.kind == "loader" and _get_sampler(one) is sampler]
        require(loaders, "the sampler has no name in the function with the loop")
        reached, owner = job.scope.reach(loaders[0], loop.path, body), ".sampler"
    text = f"{reached.name}{owner}.set_epoch({number})"
    lines = [f"if {reached.guard}:", f"    {text}"] if reached.guard else [text]
    job.open(loop.path).insert_first(loop.node, lines)
    job.notes.append(_ORDER)


def _get_sampler(loader: Value) -> Value:
    return root(loader.parts.get("sampler", Value()))


def _number_of(loop: Loop) -> str:
    """Return the name of the number of the epoch. Raises CannotEdit if the loop has none."""
    target = getattr(loop.node, "target", None)
    is_name = isinstance(target, ast.Name) and loop.value is not None
    require(is_name, "the loop has no number of the epoch")
    return str(target.id)  # type: ignore[union-attr]


def vary_epoch(job: Job) -> None:
    """Give set_epoch() the number of the epoch (R308)."""
    event: Event = job.find("event")
    arguments = [*event.node.args, *[keyword.value for keyword in event.node.keywords]]
    loop: Loop = job.find("loop")
    is_inside = event.path == loop.path and loop.node in job.scope.above(event.path, event.node)
    require(is_inside, "set_epoch() is not called in the loop over epochs itself")
    job.open(event.path).replace(arguments[0], _number_of(loop))
    job.notes.append(_ORDER)


def sort_listing(job: Job) -> None:
    """Sort the names of files (R402)."""
    node: Any = job.find("event")
    path = job.finding.path
    cls = job.scope.cls(path, node)
    # lint names the first one of a class
    for call in [part for part in ast.walk(cls) if isinstance(part, ast.Call) and is_listing(part)]:
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
    is_one = is_one and scope.function(path, calls[0]) is scope.function(path, loop.node)
    require(is_one, "the loader is not made in one call in the function with the loop")
    script, made = job.open(path), scope.statement(path, calls[0])
    torch = script.imported("torch")
    is_bound = {made, loop.node} <= {*scope.block(path, made)}
    require(torch and is_bound, "the loader may not be bound, or torch is not imported by its name")
    script.claim("order")
    script.add_argument(calls[0], "generator=order")
    script.insert_before(made, [f"order = {torch}.Generator()"])
    script.insert_first(loop.node, [f"order.manual_seed({number})"])
    job.notes.append("each epoch has the order of its number now, also without a restart")


def save_at_sigterm(job: Job) -> None:
    """Save at the end of the epoch in which SIGTERM comes, and exit (R801)."""
    facts = job.facts
    is_one = not is_distributed(facts) and len(facts.loops) == 1 and facts.fullest_save is not None
    require(is_one, "the processes would have to agree on the epoch after which they exit")
    # of the calls that write the whole checkpoint, the one that the fewest tests decide about
    whole = facts.fullest_save.event.node  # type: ignore[union-attr]
    calls = [one.event for one in facts.training_saves if one.event.node is whole]
    require(calls, "the checkpoint is saved after the last epoch only")
    save: Event = min(calls, key=lambda one: len(one.conditions))
    loop = save.loops[0]
    inside = list_in_body(job, loop, save)
    inside = [part for part in inside if isinstance(part, ast.Expr)] or inside
    last = loop.node.body[-1]
    is_ended = isinstance(last, ast.Break | ast.Continue | ast.Return | ast.Raise)
    reason = "the place of the save in the loop is not known, or the epoch does not end there"
    require(inside and not is_ended, reason)
    # the tests between the loop and the save
    depth = min(len(one.conditions) for one in facts.events if one.loops[:1] == (loop,))
    tests = [one for one in save.conditions[depth:] if isinstance(one.node, ast.If)]
    script = job.open(loop.path)
    test = tests[0].node.test if len(tests) == 1 and tests[0].node in inside and tests[0].is_true else None
    # `if args.save and epoch % 5 == 0` may mean that nothing is to be saved
    is_rhythm = isinstance(test, ast.Compare) or isinstance(getattr(test, "op", None), ast.Or)
    must_stop = "sigterm.is_set()"
    if test is not None and is_rhythm and is_modulo(test):
        # the flag is read once in an epoch: a signal after the test waits for the next one
        script.wrap(test, "(", ") or must_stop")
        script.insert_before(tests[0].node, [f"must_stop = {must_stop}"])
        must_stop = "must_stop"
    else:
        require(not tests, "a condition decides whether an epoch is saved")
    signal, system, threading = (script.add_import(name) for name in ("signal", "sys", "threading"))
    script.claim("sigterm", "must_stop")
    handler = f"{signal}.signal({signal}.SIGTERM, lambda *_: sigterm.set())"
    comment = "# SIGTERM: save at the end of the epoch, and exit"
    script.insert_before(loop.node, [comment, f"sigterm = {threading}.Event()", handler])
    script.insert_after(last, [f"if {must_stop}:", f"    {system}.exit(128 + {signal}.SIGTERM)"])


def save_after_step(job: Job) -> None:
    """Save after a step of the optimizer (R602)."""
    save, step = job.find("save"), job.find("step")
    scope = job.scope
    tests = [one for one in step.conditions if isinstance(one.node, ast.If)]
    around: Any = scope.parents[save.path][scope.statement(save.path, save.node)]
    is_tested = isinstance(around, ast.If) and not around.orelse
    is_one_loop = save.path == step.path and tests and is_tested
    require(is_one_loop, "the tests of the step and of the save are not in one loop")
    test = tests[-1]
    names = {part.id for part in ast.walk(test.node.test) if isinstance(part, ast.Name)}
    inner = save.loops[-1]
    body = inner.node.body
    changed = list_stored(node for statement in body for node in ast.walk(statement))
    is_in_body = inner.node is step.loops[-1].node and test.node in body and around in body
    is_same = is_in_body and not names & changed
    require(is_same, "the test of the step may have another result where the script saves")
    script = job.open(save.path)
    script.claim("save_is_due")
    text = unparse(test.node.test) if test.is_true else f"not ({unparse(test.node.test)})"
    text = f"({text})" if isinstance(test.node.test, ast.BoolOp) and test.is_true else text
    script.insert_before(inner.node, ["save_is_due = False"])
    script.insert_before(around, [f"save_is_due = save_is_due or {unparse(around.test)}"])
    script.replace(around.test, f"save_is_due and {text}")
    script.insert_first(around, ["save_is_due = False"])
    job.notes.append("the checkpoint is saved at the next step of the optimizer")

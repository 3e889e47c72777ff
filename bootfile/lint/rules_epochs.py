"""Rules about epochs: with which one does a restart begin, and which samples does it read?"""

import ast
import re
from collections.abc import Iterator

from bootfile.lint import values
from bootfile.lint.carried import SETS
from bootfile.lint.checkpoints import Save
from bootfile.lint.facts import Facts, of_a_restart
from bootfile.lint.rules_files import path_of
from bootfile.lint.sources import unparse
from bootfile.lint.table import Finding, at, name_line
from bootfile.lint.values import Loop, Value, kind_of, list_deps, root
from bootfile.lint.walk import split

_COUNTS = re.compile(r"step|iter|epoch|batch|^it$|^i$", re.IGNORECASE)
_NUMBER = re.compile(r"epoch|step|iter|progress|^(\w*_)?train\w*_state$|^state$")
_READS_ENTRY = re.compile(r"\[['\"]|\.get\(")


def check(facts: Facts) -> Iterator[Finding]:
    """Yield the findings about epochs and the batches that a restart skips."""
    for find in (
        _find_wrong_epoch,
        _find_wrong_file,
        _find_planned,
        _find_wrong_step,
        _find_first_epoch,
        _find_moved_end,
    ):
        yield from of_a_restart(find(facts), facts)


# R301: the saved number plus what is added to it


def _find_wrong_epoch(facts: Facts) -> Iterator[Finding]:
    for loop in facts.loops:
        start, added = split(loop.start or Value())
        is_field = start.kind == "field" and start.key is not None and loop.value is not None
        is_one = is_field and not _has_several_starts(facts, loop)
        for save in [save for save in facts.training_saves if is_one and save.event.loops[0] is loop]:
            # the saved number is that of the loop plus an offset; a restart begins `added` after it
            for offset in _list_offsets(save, str(start.key), loop.value):
                if message := _judge(facts, loop, save, offset + added):
                    yield at(loop, "R301", message, value=start, save=save.event, added=added)
                    return


def _find_wrong_file(facts: Facts) -> Iterator[Finding]:
    """Find an epoch in the name of a file, with which a restart loads it, that is not the next one."""
    for loop in facts.loops:
        start, added = split(loop.start or Value())
        paths = [value for load in facts.loads for value in load.args.values()]
        read = [_find_offset(path, start) for path in paths if start.label and loop.value is not None]
        for save in [save for save in facts.training_saves if save.event.loops[0] is loop]:
            written = _find_offset(path_of(save.event), loop.value or Value())
            for offset in [one for one in read if one is not None and written is not None]:
                if message := _judge(facts, loop, save, (written or 0) - offset + added):
                    yield at(loop, "R301", message, value=start, save=save.event, added=added)
                    return


def _find_offset(path: Value, number: Value) -> int | None:
    """Return what is added to a number in a path; None if the path does not have it."""
    parts = [split(part) for part in list_deps(path)]
    # an option is another value wherever it is read
    named = (number.kind, number.label) if number.label and number.kind in ("option", "attribute") else None
    offsets = [added for part, added in parts if part is number or (part.kind, part.label) == named]
    return max(offsets, key=abs, default=None)


def _list_offsets(save: Save, key: str, number: Value | None) -> list[int]:
    """Return what a checkpoint adds to a number that it has under a key; [] if it does not have it."""
    saved = [split(entry.value) for entry in save.entries if entry.name == key]
    return [offset for value, offset in saved if value is number]


def _has_several_starts(facts: Facts, loop: Loop) -> bool:
    """Return whether branches set the first number to that of the next epoch, or of the same one."""
    bounds = getattr(getattr(loop.node, "iter", None), "args", [])
    name = unparse(bounds[0]) if bounds else ""
    sets = [part for part in facts.nodes(loop.path, ast.Assign) if unparse(part.targets[0]) == name]
    return len({text for text in (unparse(part.value) for part in sets) if _READS_ENTRY.search(text)}) > 1


def _judge(facts: Facts, loop: Loop, save: Save, total: int) -> str:
    """Return the message about a checkpoint and the loop that continues `total` after its number; "" if the
    two agree."""
    event = save.event
    steps = [step for step in facts.list_trained() if step.loops[0] is loop]
    # within the loop over batches, a restart may skip those that were read
    is_inner = len(event.loops) > 1 and any(event.loops[1] in step.loops for step in steps)
    if not steps or is_inner:
        return ""
    where = name_line(event, loop)
    is_after = steps[-1].order < event.order
    if is_after and total == 0:
        return f"the epoch that {where} saves after its end is trained again after a restart"
    if is_after and total > 1:
        return f"a restart skips an epoch: {total} are added to the one that {where} saves"
    is_skipped = steps[0].order > event.order and total == 1
    text = f"{where} saves the epoch before it is trained, and a restart begins with the next one"
    return text if is_skipped else ""


def _find_planned(facts: Facts) -> Iterator[Finding]:
    """Find a checkpoint whose number of the epoch is that of the last one that is planned."""
    for loop in facts.loops:
        start, _ = split(loop.start or Value())
        ends = facts.list_deps(loop.iterated or Value()) - facts.list_deps(loop.start or Value())
        for save in facts.training_saves if start.kind == "field" else ():
            numbers = [entry.value for entry in save.entries if entry.name == str(start.key)]
            if any(number.kind == "option" and number in ends for number in numbers):
                message = f"{name_line(save.event, loop)} saves the number of all epochs as that of this one"
                yield at(loop, "R301", message, value=start, save=save.event)
                return


def _find_wrong_step(facts: Facts) -> Iterator[Finding]:
    """Find a counter that a checkpoint has before the step that it follows is counted."""
    for counter in facts.tracer.counters:
        start, added = split(counter.of or Value())
        counts = [one for one in facts.in_training("set_name", "set_attribute") if one.args[0] is counter]
        counts = [one for one in counts if isinstance(one.node, ast.AugAssign | ast.Assign)]
        if start.kind != "field" or len({one.line for one in counts}) != 1:
            continue
        count = counts[-1]
        near = [step for step in facts.in_training("step") if step.loops == count.loops]
        same = [step for step in near if step.conditions == count.conditions]
        steps = [step for step in same if kind_of(step.value) == "optimizer"]
        for save in facts.training_saves if steps else ():
            offsets = _list_offsets(save, str(start.key), counter)
            is_early = steps[-1].order < save.event.order < count.order and save.event.loops == count.loops
            if offsets and is_early and offsets[0] + added == 0:
                message = f"{counter.label} is counted after {name_line(save.event, count)} has saved it"
                message += ": a restart does this step again"
                yield at(count, "R301", message, value=start, save=save.event)
                return


# R302: a loop that begins with its first epoch after a restart


def _find_first_epoch(facts: Facts) -> Iterator[Finding]:
    loads = [*facts.loaded.values(), *facts.calls("^load_state$")]
    if (facts.restores_all and not facts.is_accelerated) or not loads:
        return
    for loop in facts.loops:
        later = [save for save in facts.restart_saves if save.event.order > facts.first_step]
        saves = [save for save in later if loop in (save.event.loops or (loop,))]
        # of several loops, that of the objects that are loaded
        steps = [step for step in facts.select("step") if step.loops and step.loops[0] is loop]
        stepped = {root(step.value) for step in steps}
        is_of_load = len(facts.loops) == 1 or bool(stepped & facts.loaded.keys())
        # `for epoch in range(...)` from a constant: a loop that begins with a variable may be restored
        is_first = _counts_from_constant(loop) and not _finds_its_place(facts, loop)
        if not saves or not is_of_load or not is_first or loop.start is None:
            continue
        last = max(loads, key=lambda event: event.order)
        message = f"the loop begins with {loop.start.key} at each start, also after "
        message += f"{name_line(last, loop)} has loaded a checkpoint"
        # without the number in the checkpoint, the script may have another way to know it
        saved = {dep for save in saves for entry in save.entries for dep in list_deps(entry.value)}
        yield at(loop, "R302", message, loop.value not in saved, value=loop.value, load=loads)


def _counts_from_constant(loop: Loop) -> bool:
    """Return whether a loop is over range() from a number that the script writes to a known end."""
    if loop.start is None or loop.iterated is None or kind_of(loop.iterated) != "range":
        return False
    is_number = loop.start.kind == "const" and type(loop.start.key) is int
    # the number of epochs that are left, or an end that may follow from the checkpoint
    bounds = getattr(getattr(loop.node, "iter", None), "args", [])
    is_rest = any(isinstance(bound, ast.BinOp) and isinstance(bound.op, ast.Sub) for bound in bounds)
    ends = list_deps(loop.iterated)
    is_open = any(dep.kind == "unknown" or "restored" in dep.flags for dep in ends)
    return is_number and not is_rest and not is_open


def _finds_its_place(facts: Facts, loop: Loop) -> bool:
    """Return whether a restored number has another way into the loop."""
    # `if epoch < start_epoch: continue`
    tests = [event for event in facts.select("test") if event.loops and event.loops[0] is loop]
    is_skipped = any(values.is_restored(test.value) and loop.value in list_deps(test.value) for test in tests)
    if is_skipped or _adds_offset(loop):
        return True
    # a counter in the loop that continues from the step in the name of a file
    lines = range(loop.line, loop.node.end_lineno + 1)
    counted = [one for one in facts.tracer.counters if one.path == loop.path and one.line in lines]
    counters = [one for one in counted if one.of and one.of.kind not in ("const", "none", "counter")]
    if any(_COUNTS.search(counter.label) for counter in counters):
        return True
    # the whole file is read in a way that is not followed, or the number is used in the loop
    reads = {event.value for event in facts.select("read")}
    read = {value for value in reads if value.key is None or _NUMBER.search(str(value.key))}
    inside = [event for event in facts.events if read and event.loops and event.loops[0] is loop]
    # an assignment replaces what the name was before, and does not use it
    given = [[event.args[0]] if event.name in SETS else event.args.values() for event in inside]
    return any(read & list_deps(value) for of_event in given for value in of_event)


def _adds_offset(loop: Loop) -> bool:
    """Return whether the loop adds a variable to its number, as `step = number + first_step`."""
    number = unparse(getattr(loop.node, "target", loop.node))
    sums = [node for node in ast.walk(loop.node) if isinstance(getattr(node, "op", None), ast.Add)]
    pairs = [{unparse(node.left), unparse(node.right)} for node in sums if isinstance(node, ast.BinOp)]
    return any(number in pair and not any(map(str.isdigit, pair)) for pair in pairs)


# R310: an end that moves with the beginning


def _find_moved_end(facts: Facts) -> Iterator[Finding]:
    """Find `for epoch in range(start, start + epochs)`."""
    for loop in facts.loops:
        end = root(loop.iterated or Value()).parts.get("end", Value())
        sums = [dep for dep in facts.list_deps(end) if isinstance(getattr(dep.node, "op", None), ast.Add)]
        is_moved = any(len(dep.deps) > 1 and values.is_restored(dep) for dep in sums)
        # the same with a constant, of which more than one is added
        first, added = split(end)
        is_moved = is_moved or (added > 1 and first in facts.list_deps(loop.start or Value()))
        if is_moved and loop.start is not None and values.is_restored(loop.start):
            message = "each restart trains all epochs again: the end of the loop moves with its beginning"
            yield at(loop, "R310", message, value=loop.start)

"""Rules about the order of a restart, epochs and steps, and the order of the data."""

import ast
import re
from collections.abc import Iterator
from typing import Any

from bootfile.lint import values
from bootfile.lint.facts import Facts, describe, is_constant, reads_restored
from bootfile.lint.findings import Finding, as_hints, at, name_line
from bootfile.lint.record import Event
from bootfile.lint.syntax import unparse
from bootfile.lint.values import Loop, Value, kind_of, list_deps, root

_PLACE = re.compile(r"resum|restart|start_|restor|checkpoint|ckpt|_state|loaded", re.IGNORECASE)
_COUNTS = re.compile(r"step|iter|epoch|batch|^it$|^i$", re.IGNORECASE)
_DIVISIONS = (ast.FloorDiv, ast.Div, ast.Mod)
_LENGTH = "{} depends on len() of a loader, which is another number with another number of ranks"
_KNOWS_PADDING = re.compile(
    rb"\[:\s*len\(|gather_for_metrics|not divisible|aux_val|total_size|% *(num_tasks|world_size)"
)
# made for a restored optimizer, these begin with the rate that it has; the others set their first one
_KEEP_RATE = {
    "ReduceLROnPlateau", "StepLR", "MultiStepLR", "ExponentialLR", "CosineAnnealingLR", "PolynomialLR",
    "MultiplicativeLR",
}  # fmt: skip
_SCHEDULE_SAFE = ("last_epoch", "last_step")


def check(facts: Facts) -> Iterator[Finding]:
    """Yield the findings about the order of a restart, about epochs and about samplers."""
    if not facts.loops:
        return
    yield from _find_set_epoch(facts)
    yield from _find_padding(facts)
    if facts.intent and facts.is_sure:
        yield from _find_all(facts)
    elif facts.intent:
        yield from as_hints(_find_all(facts))


def _find_all(facts: Facts) -> Iterator[Finding]:
    yield from _find_late_scheduler(facts)
    yield from _find_moved_model(facts)
    yield from _find_early_iterator(facts)
    yield from _find_wrong_epoch(facts)
    yield from _find_first_epoch(facts)
    yield from _find_skips(facts)
    yield from _find_length_of_ranks(facts)


# Loaded after it was used


def _find_late_scheduler(facts: Facts) -> Iterator[Finding]:
    """Find a scheduler that is made after the state of its optimizer was loaded."""
    for event in facts.select("create"):
        scheduler = root(event.value)
        if scheduler.kind != "scheduler" or facts.is_in_training(event) or scheduler.cls is not None:
            continue
        # a class, not a function such as get_cosine_schedule(), which may do anything
        if not isinstance(scheduler.key, str) or not scheduler.key[0].isupper():
            continue
        if any(name in scheduler.options for name in _SCHEDULE_SAFE):
            continue
        optimizer = root(scheduler.options.get(0) or scheduler.options.get("optimizer") or Value())
        loaded = facts.loaded.get(optimizer)
        if optimizer.kind != "optimizer" or loaded is None or loaded.order > event.order:
            continue
        # no harm: it keeps the rate, belongs to another branch, or is told its place
        if scheduler.key in _KEEP_RATE or _is_exclusive(loaded, event) or _knows_place(event):
            continue
        if _is_loaded_again(facts, optimizer, event.order):
            continue
        message = (
            f"{describe(scheduler, 'the scheduler')} is made after {name_line(loaded, event)} has "
            "loaded the state of "
            f"{describe(optimizer, 'the optimizer')}: it sets the first learning rate"
        )
        # what the first steps do with the rate depends on the class
        yield at(event, "R203", message, True)


def _knows_place(event: Event) -> bool:
    """Return whether a scheduler is made with the steps before the restart, or in a branch that depends on
    what was loaded."""
    scheduler = root(event.value)
    for number, argument in scheduler.options.items():
        # `Scheduler(optimizer, start_step)`
        if number not in (0, "optimizer") and reads_restored(argument):
            return True
    for condition in event.conditions:
        # `if resume: ... else: ...`: the script has thought of both cases
        is_choice = isinstance(condition.node, ast.If) and condition.node.orelse
        if is_choice and (values.is_restored(condition.value) or _PLACE.search(condition.text)):
            return True
    return False


def _is_exclusive(first: Event, second: Event) -> bool:
    """Return whether two places are in different branches of one condition."""
    branches = {id(condition.node): condition.is_true for condition in first.conditions}
    for condition in second.conditions:
        if branches.get(id(condition.node), condition.is_true) != condition.is_true:
            return True
    return False


def _is_loaded_again(facts: Facts, optimizer: Value, order: int) -> bool:
    for event in facts.select("load_state"):
        if root(event.value) is optimizer and event.order > order and not facts.is_in_training(event):
            return True
    return False


def _find_moved_model(facts: Facts) -> Iterator[Finding]:
    """Find a model that moves to the GPU after the state of its optimizer was loaded."""
    first = facts.first_step()
    for optimizer, loaded in facts.loaded.items():
        if optimizer.kind != "optimizer":
            continue
        given = optimizer.options.get(0) or optimizer.options.get("params")
        if given is None:
            continue
        models = set()
        for dep in [given, *list_deps(given)]:
            if dep.kind == "attribute" and dep.label == "parameters" and dep.of is not None:
                models.add(root(dep.of))
        for event in facts.select("method"):
            # `model.cuda()`, `model.to(device)`
            is_move = event.text == "cuda" or (event.text == "to" and _names_device(event))
            if not is_move or root(event.value) not in models or not loaded.order < event.order < first:
                continue
            # the move is in another branch, or repeats one from before the load
            if _is_exclusive(loaded, event) or _moved_before(facts, event, loaded.order):
                continue
            if _moves_state(facts):
                continue
            message = (
                f"{describe(event.value, 'the model')} moves after {name_line(loaded, event)} has "
                "loaded the state of "
                f"{describe(optimizer, 'the optimizer')}, which stays on the old device"
            )
            yield at(event, "R202", message)
            break


def _names_device(event: Event) -> bool:
    text = " ".join(unparse(part) for part in getattr(event.node, "args", []))
    return bool(re.search(r"device|cuda|gpu|rank", text))


def _moves_state(facts: Facts) -> bool:
    """Return whether the script moves the state itself: `for state in optimizer.state.values(): ...`."""
    sources = [facts.tracer.source, *[module.source for module in facts.tracer.imported.values()]]
    return any(re.search(rb"in \S*opt\w*\.state\b(?!_dict)", source.data) for source in sources)


def _moved_before(facts: Facts, event: Event, order: int) -> bool:
    for other in facts.select("method"):
        if other.order < order and other.text in ("cuda", "to") and root(other.value) is root(event.value):
            return True
    return False


def _find_early_iterator(facts: Facts) -> Iterator[Finding]:
    """Find iter(loader) before the state is loaded on which the order depends."""
    for event in facts.select("iter"):
        loader = root(event.value)
        if loader.kind != "loader" or facts.is_in_training(event):
            continue
        sampler = root(loader.parts.get("sampler", Value()))
        generator = root(loader.options.get("generator", Value()))
        for value, loaded in facts.loaded.items():
            # iter() has drawn the order already: the loaded state comes too late for it
            if value in (loader, sampler, generator) and loaded.order > event.order:
                message = (
                    f"iter({describe(loader, 'loader')}) is called before {name_line(loaded, event)} "
                    "loads the state of "
                    f"{describe(value)}"
                )
                yield at(event, "R204", message)


# Epochs and steps


def _find_wrong_epoch(facts: Facts) -> Iterator[Finding]:
    """Find a restart that repeats or skips an epoch: the saved number plus what is added to it."""
    for loop in facts.loops:
        if loop.value is None or loop.start is None:
            continue
        start, added = _split(loop.start)
        if start is None or start.kind != "field" or start.key is None or _has_several_starts(facts, loop):
            continue
        for save in facts.saves:
            if not save.event.loops or save.event.loops[0] is not loop:
                continue
            for entry in save.entries:
                # the saved number is that of the loop plus `offset`; a restart begins `added` after it
                number, offset = _split(entry.value)
                if number is not loop.value or entry.key.rpartition(".")[2] != str(start.key):
                    continue
                finding = _judge(facts, loop, save.event, offset + added, start)
                if finding is not None:
                    yield finding
                    return


def _has_several_starts(facts: Facts, loop: Loop) -> bool:
    """Return whether branches set the first number to that of the next epoch, or of the same one."""
    bounds = getattr(getattr(loop.node, "iter", None), "args", [])
    if not bounds:
        return False
    name = unparse(bounds[0])
    numbers = set()
    for source in [facts.tracer.source, *[module.source for module in facts.tracer.imported.values()]]:
        if source.path != loop.path:
            continue
        for part in ast.walk(source.tree):
            is_set = isinstance(part, ast.Assign) and unparse(part.targets[0]) == name
            value = getattr(part, "value", None)
            if is_set and value is not None and re.search(r"\[['\"]|\.get\(", unparse(value)):
                numbers.add(unparse(value))
    return len(numbers) > 1


def _split(value: Value) -> tuple[Value | None, int]:
    """Return (the number, what is added to it)."""
    return (value.of, value.offset) if value.kind == "shifted" else (value, 0)


def _judge(facts: Facts, loop: Loop, save: Event, total: int, start: Value) -> Finding | None:
    steps = [event for event in facts.select("step", "backward") if event.loops and event.loops[0] is loop]
    if not steps:
        return None
    # three places of a save: within the loop over batches, after the training of an epoch, before it
    after = steps[-1].order < save.order
    inner = [event for event in steps if len(save.loops) > 1 and save.loops[1] in event.loops]
    trained = [event for event in steps if event.order < save.order]
    if inner:
        # `{"epoch": epoch}` in the middle of an epoch, and `range(start + 1, ...)` after it
        if total == 1 and not _skips_batches(facts, loop):
            text = (
                f"the checkpoint is saved within an epoch, but a restart begins with epoch {start.key} + 1: "
                "the rest is lost"
            )
            return at(save, "R303", text)
        return None
    if after and total == 0:
        text = f"the epoch that {name_line(save, loop)} saves after its end is trained again after a restart"
        return at(loop, "R301", text)
    if after and total > 1:
        return at(
            loop,
            "R301",
            f"a restart skips an epoch: {total} are added to the one that {name_line(save, loop)} saves",
        )
    if not trained and total == 1:
        text = (
            f"{name_line(save, loop)} saves the epoch before it is trained, and a restart begins with "
            "the next one"
        )
        return at(loop, "R301", text)
    return None


def _skips_batches(facts: Facts, loop: Loop) -> bool:
    for event in facts.select("test"):
        if event.loops and event.loops[0] is loop and values.is_restored(event.value):
            return True
    return any(True for _ in facts.calls("skip_first_batches|islice"))


def _find_first_epoch(facts: Facts) -> Iterator[Finding]:
    """Find a loop that begins with its first epoch after a restart."""
    if (
        (facts.restores_all and not facts.is_accelerated)
        or facts.intent != "optimizer"
        or len(facts.loops) != 1
    ):
        return
    loop = facts.loops[0]
    # `for epoch in range(...)` from a constant: a loop that begins with a variable may be restored
    if loop.start is None or loop.value is None or not is_constant_number(loop.start):
        return
    if loop.iterated is None or kind_of(loop.iterated) != "range" or not facts.training_saves():
        return
    # the number of epochs that are left
    bounds = getattr(getattr(loop.node, "iter", None), "args", [])
    if any(isinstance(bound, ast.BinOp) and isinstance(bound.op, ast.Sub) for bound in bounds):
        return
    # `range(remaining)`: its end may follow from the checkpoint
    if any(dep.kind == "unknown" or "restored" in dep.flags for dep in list_deps(loop.iterated)):
        return
    if _adds_offset(loop) or _counts_on(facts, loop):
        return
    for event in facts.select("test"):
        is_inside = bool(event.loops) and event.loops[0] is loop
        # `if epoch < start_epoch: continue`
        if is_inside and values.is_restored(event.value) and loop.value in list_deps(event.value):
            return
    # the whole file is read in a way that is not followed, or the number has another way into the loop
    for event in facts.select("read"):
        key = event.value.key
        may_be_number = key is None or re.search("epoch|step|iter|progress|state", str(key)) is not None
        if may_be_number and _is_used_in_loop(facts, event.value, loop):
            return
    loads = [*facts.loaded.values(), *facts.calls("^load_state$")]
    message = f"the loop begins with {loop.start.key} at each start"
    if loads:
        message += f", also after {name_line(max(loads, key=_order_of), loop)} has loaded a checkpoint"
    # without the number in the checkpoint, the script may have another way to know it
    yield at(loop, "R302", message, not _saves_number(facts, loop))


def _adds_offset(loop: Loop) -> bool:
    """Return whether the loop adds a variable to its number, as `step = number + first_step`."""
    number = unparse(getattr(loop.node, "target", loop.node))
    for part in ast.walk(loop.node):
        if not isinstance(part, ast.BinOp) or not isinstance(part.op, ast.Add):
            continue
        for one, other in ((part.left, part.right), (part.right, part.left)):
            if unparse(one) == number and isinstance(other, ast.Name | ast.Attribute | ast.Subscript):
                return True
    return False


def _counts_on(facts: Facts, loop: Loop) -> bool:
    """Return whether the loop counts on from a number that is not 0 at each start, such as the step in the
    name of a file: its own number is only a label."""
    for counter in facts.tracer.counters:
        first = counter.of
        is_known = first is None or first.kind in ("const", "none", "counter")
        if not is_known and _COUNTS.search(counter.label) and _is_inside(loop, counter):
            return True
    return False


def _is_inside(loop: Loop, value: Value) -> bool:
    last = getattr(loop.node, "end_lineno", 0) or 0
    return value.path == loop.path and loop.line <= value.line <= last


def _saves_number(facts: Facts, loop: Loop) -> bool:
    """Return whether a checkpoint has the number of the loop."""
    for save in facts.training_saves():
        for entry in save.entries:
            if loop.value is not None and loop.value in list_deps(entry.value):
                return True
    return False


def _is_used_in_loop(facts: Facts, value: Value, loop: Loop) -> bool:
    for event in facts.events:
        if not event.loops or event.loops[0] is not loop:
            continue
        for argument in event.args.values():
            if value in list_deps(argument):
                return True
    return False


def _order_of(event: Event) -> int:
    return event.order


def is_constant_number(value: Value) -> bool:
    return value.kind == "const" and isinstance(value.key, int) and not isinstance(value.key, bool)


def _find_skips(facts: Facts) -> Iterator[Finding]:
    """Find batches that are skipped in each epoch, or in another order than before."""
    for event, loader in _list_skips(facts):
        outer = event.loops[0]
        # `if i < start_batch: continue` in each epoch: only the first one of a restart has such batches
        if event.name == "test" and len(event.loops) > 1 and not _is_first_only(event, outer):
            yield at(
                event,
                "R304",
                f"the batches are skipped in each epoch, not only in the first one: {event.text}",
            )
        base = root(loader)
        is_shuffled = base.kind == "loader" and is_constant(base.options.get("shuffle"), True)
        # torch draws a new order at the restart: the skipped batches are other ones
        if is_shuffled and "generator" not in base.options and not _has_same_order(facts, event):
            message = (
                f"batches are skipped in an order that is not the one before the restart: {describe(base)} "
                "shuffles"
            )
            yield at(event, "R305", message)
    yield from _find_accelerate_skips(facts)


def _list_skips(facts: Facts) -> Iterator[tuple[Event, Value]]:
    for event in facts.select("test"):
        if (
            not facts.is_in_training(event)
            or not isinstance(event.node, ast.If)
            or not values.is_restored(event.value)
        ):
            continue
        # `if i < start: continue`, with a number of the checkpoint
        if not event.node.body or not isinstance(event.node.body[-1], ast.Continue):
            continue
        inner = event.loops[-1]
        if inner.value is None or inner.value not in list_deps(event.value) or inner.iterated is None:
            continue
        for value in [inner.iterated, *list_deps(inner.iterated)]:
            if kind_of(value) == "loader":
                yield event, value
                break
    # `for batch in islice(loader, start, None)`
    for event in facts.calls(r"itertools\.islice$"):
        given = event.args.get(0, Value())
        if (
            facts.is_in_training(event)
            and kind_of(given) == "loader"
            and values.is_restored(event.args.get(1, Value()))
        ):
            yield event, given


def _is_first_only(event: Event, outer: Loop) -> bool:
    """Return whether a skip ends with the first epoch: it compares the epoch, or the number is set to 0."""
    test = event.node.test
    if outer.value is not None and outer.value in list_deps(event.value):
        return True
    for condition in event.conditions:
        if outer.value is not None and outer.value in list_deps(condition.value):
            return True
    names = {
        unparse(part) for part in ast.walk(test) if isinstance(part, ast.Name | ast.Attribute | ast.Subscript)
    }
    # the number of batches to skip is set to 0 after the first epoch
    for part in ast.walk(outer.node):
        targets: list[Any] = []
        if isinstance(part, ast.Assign):
            targets = part.targets
        elif isinstance(part, ast.AugAssign):
            targets = [part.target]
        if any(unparse(target) in names for target in targets) and unparse(test):
            inner = {unparse(target) for target in targets}
            if inner & names - {unparse(getattr(event.loops[-1].node, "target", test))}:
                return True
    return False


def _is_restored_number(value: Value | None) -> bool:
    return value is not None and values.is_restored(value)


def _ends_with_first(event: Event, number: ast.expr) -> bool:
    """Return whether the number of skipped batches is set again in the loop, or belongs to one epoch."""
    outer = event.loops[0]
    for condition in event.conditions:
        if outer.value is not None and outer.value in list_deps(condition.value):
            return True
    # the number itself, or a name in the test: `if not is_skipped: ...; is_skipped = True`
    names = {unparse(number)}
    for condition in event.conditions:
        for part in ast.walk(getattr(condition.node, "test", None) or ast.Pass()):
            if isinstance(part, ast.Name | ast.Attribute):
                names.add(unparse(part))
    for part in ast.walk(outer.node):
        if isinstance(part, ast.Assign) and any(unparse(target) in names for target in part.targets):
            return True
    return False


def _has_same_order(facts: Facts, event: Event) -> bool:
    """Return whether the order is set by a seed in the loop, or by restored random numbers."""
    for other in facts.calls(r"manual_seed|seed_everything|set_seed|set_rng_state|set_epoch|random\.seed"):
        if facts.is_in_training(other) or other.text.endswith("set_rng_state"):
            return True
    return facts.restores_all


def _find_accelerate_skips(facts: Facts) -> Iterator[Finding]:
    for event in facts.calls(r"skip_first_batches$"):
        arguments = getattr(event.node, "args", [])
        is_restored = _is_restored_number(event.args.get(1))
        if not facts.is_in_training(event) or len(arguments) < 2 or not is_restored:
            continue
        # as R304 for a skip that is written by hand
        if not _ends_with_first(event, arguments[1]):
            text = f"the batches are skipped in each epoch, not only in the first one: {unparse(event.node)}"
            yield at(event, "R304", text)
    if any(facts.is_in_training(event) for event in facts.calls(r"^set_epoch$")):
        return
    for event in facts.calls(r"skip_first_batches$"):
        if not facts.is_in_training(event):
            continue
        loader = root(event.args.get(0, Value()))
        if is_constant(loader.options.get("shuffle"), False):
            continue
        is_hint = not is_constant(loader.options.get("shuffle"), True)
        text = "skip_first_batches() skips in the order of another epoch: the loop does not call set_epoch()"
        yield at(event, "R306", text, is_hint)


def _find_length_of_ranks(facts: Facts) -> Iterator[Finding]:
    """Find an epoch or step of a restart that is computed from the length of the loader of a rank."""
    # the script compares the number of ranks
    for event in facts.select("read"):
        if re.search("world|rank|process|replica|samples", str(event.value.key or "")):
            return
    for loop in facts.loops:
        if loop.start is not None and _divides_by_length(loop.start):
            yield at(loop, "R309", _LENGTH.format("the first epoch"), True)
            return
    for event in [*facts.select("test"), *facts.calls(r"skip_first_batches$|islice$")]:
        if not facts.is_in_training(event):
            continue
        for value in [event.value, *event.args.values()]:
            if event.loops[-1].value is not value and _divides_by_length(value):
                yield at(event, "R309", _LENGTH.format("the number of batches that are skipped"), True)
                return


def _divides_by_length(value: Value) -> bool:
    """Return whether a value is a restored number divided by len() of a loader that each rank has."""
    for dep in list_deps(value):
        # `start_step // len(loader)`, `divmod(start_step, len(loader))`
        is_division = isinstance(dep.node, ast.BinOp) and isinstance(dep.node.op, _DIVISIONS)
        if not is_division and dep.key != "divmod":
            continue
        if not values.is_restored(dep):
            continue
        for inner in list_deps(dep):
            if inner.key == "len" and any(_is_of_rank(part) for part in list_deps(inner)):
                return True
    return False


def _is_of_rank(value: Value) -> bool:
    """Return whether a loader has the samples of one rank."""
    loader = root(value)
    if loader.kind != "loader":
        return False
    sampler = root(loader.parts.get("sampler", Value()))
    return "prepared" in loader.flags or sampler.key == "DistributedSampler"


def _find_padding(facts: Facts) -> Iterator[Finding]:
    """Find an evaluation of all ranks in which samples that fill the last batch count twice."""
    sources = {path: module.source for path, module in facts.tracer.imported.items()}
    sources[facts.tracer.source.path] = facts.tracer.source
    # the evaluation of COCO counts each image once
    if any(b"pycocotools" in source.data for source in sources.values()):
        return
    for event in facts.select("iterate"):
        loader = root(event.value)
        sampler = root(loader.parts.get("sampler", Value()))
        if sampler.kind != "sampler" or sampler.key != "DistributedSampler" or sampler.cls is not None:
            continue
        # drop_last repeats no sample, it leaves some out
        if "drop_last" in sampler.options or 5 in sampler.options or not _reads_only(facts, event):
            continue
        for call in facts.calls(r"(^|\.)(all_reduce|reduce|all_gather\w*|gather)$"):
            # a sum over ranks that follows the loop, in the same function or in one that it calls
            is_same = call.functions[: len(event.functions)] == event.functions
            is_later = call.order > event.order and call.loops[: len(event.loops) - 1] == event.loops[:-1]
            places = {facts.tracer.source.path, event.path, call.path, loader.path}
            is_known = any(path in sources and _KNOWS_PADDING.search(sources[path].data) for path in places)
            if is_same and is_later and not is_known:
                name = describe(sampler, "the sampler")
                where = name_line(call, event)
                message = (
                    f"{name} repeats samples so that all ranks have as many, and the figure of {where} "
                    "counts them twice"
                )
                yield at(event, "R603", message, True)
                return


def _reads_only(facts: Facts, event: Event) -> bool:
    """Return whether a loop over a loader evaluates: it does not train, and does not compute gradients."""
    depth = len(event.loops)
    if not depth or event.loops[-1].node is not event.node:
        return False
    for other in facts.select("backward", "step"):
        if other.loops[:depth] == event.loops:
            return False
    around = " ".join([event.describe_conditions(), *event.functions])
    return re.search("no_grad|inference_mode|eval|val|test", around) is not None


# Samplers


def _find_set_epoch(facts: Facts) -> Iterator[Finding]:
    """Find a DistributedSampler whose set_epoch() is not called, or with a wrong argument."""
    # a loader of Bootfile calls it
    if facts.uses(r"\bbootfile\b"):
        return
    calls = [event for event in facts.calls(r"^set_epoch$") if event.name == "method"]
    for event in facts.select("iterate"):
        loader = root(event.value)
        if not facts.is_in_training(event) or "prepared" in loader.flags:
            continue
        sampler = root(loader.parts.get("sampler", Value()))
        if sampler.kind != "sampler" or sampler.key != "DistributedSampler" or not _trains_in(facts, event):
            continue
        shuffle = sampler.options.get("shuffle") or sampler.options.get(3)
        if shuffle is not None and not is_constant(shuffle, True):
            continue
        # a call for an object that is not known may be one for this sampler
        mine = [call for call in calls if root(call.value) is sampler or _is_followed_value(call.value)]
        if not mine:
            where = ""
            if calls:
                where = (
                    f": {name_line(calls[0], sampler)} calls that of "
                    f"{describe(calls[0].value, 'another object')}"
                )
            text = (
                f"set_epoch() of {describe(sampler, 'the sampler')} is not called: each epoch has the same "
                f"order{where}"
            )
            # what is called may be one of several loaders
            yield at(sampler, "R307", text, bool(calls))
            return
    for call in calls:
        # R308: a call with a number that does not change from epoch to epoch
        given = call.args.get(0) or call.args.get("epoch")
        if given is None or not facts.is_in_training(call):
            continue
        kinds = {dep.kind for dep in list_deps(given)}
        # an evaluation may read the loader in its first order
        if any(other.text == "set_epoch" and _varies_with_epoch(other, call) for other in calls):
            continue
        is_fixed = given.kind in ("const", "field", "option") and not kinds & {"loop", "counter", "shifted"}
        if is_fixed and root(call.value).kind in ("sampler", "loader", "unknown"):
            # only a number that is written there: a name may be counted in a way that is not followed
            node = getattr(call.node, "args", None) or [keyword.value for keyword in call.node.keywords]
            text = f"set_epoch() gets the same number in each epoch: {unparse(call.node)}"
            yield at(call, "R308", text, not isinstance(node[0], ast.Constant))
            return


def _varies_with_epoch(other: Event, call: Event) -> bool:
    """Return whether another call gives the same object the number of the epoch."""
    owner = unparse(getattr(other.node, "func", other.node))
    if other is call or owner != unparse(getattr(call.node, "func", call.node)):
        return False
    given = other.args.get(0) or other.args.get("epoch") or Value()
    return any(dep.kind in ("loop", "counter", "shifted") for dep in list_deps(given))


def _is_followed_value(value: Value) -> bool:
    """Return whether an object is not known well enough to be another sampler."""
    base = root(value)
    if base.kind == "attribute":
        return True
    return base.kind in ("unknown", "instance", "loader", "option", "none") or "by_name" in base.flags


def _trains_in(facts: Facts, event: Event) -> bool:
    """Return whether a loop over a loader trains, within a loop over epochs."""
    depth = len(event.loops)
    if depth < 2 or event.loops[-1].node is not event.node:
        return False
    for other in facts.select("backward", "step"):
        if other.order > event.order and other.loops[:depth] == event.loops:
            return True
    return False

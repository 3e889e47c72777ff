"""Rules about the place of a save or load among the steps and batches of the training: what it loses, and
whether a restart from within an epoch reads the other batches, and only those."""

import ast
import re
from collections.abc import Iterator
from typing import Any

from bootfile.lint import values
from bootfile.lint.carried import ORDERS, conditions_within, is_branch, is_result
from bootfile.lint.facts import Facts, of_a_restart
from bootfile.lint.record import Condition, Event
from bootfile.lint.rules_files import is_checkpoint, varies
from bootfile.lint.sources import is_modulo, unparse
from bootfile.lint.table import Finding, at, name_line
from bootfile.lint.values import Value, kind_of, list_deps, root
from bootfile.lint.walk import describe, is_constant, split

_AT_ANY_TIME = re.compile(r"time|signal|sigterm|preempt|interrupt|terminat", re.IGNORECASE)
_ACCUMULATES = re.compile(r"with \w+\.accumulate\(")
_SETS_ORDER = r"manual_seed|seed_everything|set_seed|set_rng_state|set_epoch|random\.seed"
_HANDLES_SIGNALS = r"(^| )(signal|submitit|bootfile)\b"


def check(facts: Facts) -> Iterator[Finding]:
    """Yield the findings about the places of saves and loads."""
    for find in (_find_lost_gradients, _find_no_signal):
        yield from find(facts) if facts.is_continued else ()
    for find in (_find_within, _find_skips):
        yield from of_a_restart(find(facts), facts)


# R602: a checkpoint between two steps of the optimizer, which loses the gradients since the first


def _find_lost_gradients(facts: Facts) -> Iterator[Finding]:
    steps = [event for event in facts.in_training("step") if root(event.value).kind == "optimizer"]
    saves = [save.event for save in facts.training_saves if is_checkpoint(save)]
    for step in steps:
        tests = [condition for condition in step.conditions if _lets_step(condition)]
        same = [other for other in steps if root(other.value) is root(step.value)]
        others = [other for other in same if other.loops == step.loops]
        # the innermost test that lets the optimizer step, such as `if (i + 1) % 4 == 0`
        test = tests[-1] if tests else None
        # gradients that are made where the step is are summed over no other batches
        passes = [event for event in facts.in_training("backward") if event.loops == step.loops]
        is_apart = test is not None and all(_is_under(one, test) is test.is_true for one in passes)
        is_apart = is_apart and passes != []
        if test is None or is_apart or any(_is_under(other, test) is None for other in others):
            continue
        # `number % 1`: each batch is a step
        is_each = any(dep.kind == "modulo" and dep.key == 1 for dep in list_deps(test.value))
        here = [] if is_each else [save for save in saves if save.loops == step.loops]
        for save in [save for save in here if not _waits(save, step, test)]:
            counted = [one for one in save.conditions if one.is_true and _counts_batches(one)]
            counted = [one for one in counted if not _AT_ANY_TIME.search(one.text)]
            when = f": {counted[-1].text}" if counted else ""
            where = name_line(step, save)
            text = f"a checkpoint can be saved between two steps of the optimizer ({where}){when}"
            yield at(save, "R602", text, save=save, step=step)
            return


def _is_under(event: Event, test: Condition) -> bool | None:
    """Return which branch of a test an event is in; None if it is in neither."""
    return next((one.is_true for one in event.conditions if one.node is test.node), None)


def _lets_step(condition: Condition) -> bool:
    """Return whether the optimizer is stepped once in several batches: `if number % 4 == 0`, the other branch
    of `if number % 4 != 0` with no_sync(), or accelerate's accumulate()."""
    test = getattr(condition.node, "test", None)
    if is_modulo(test):
        is_negative = isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotEq)
        return condition.is_true is not is_negative
    is_accumulated = _ACCUMULATES.match(condition.text) is not None
    return is_accumulated or _resets_number(condition) or _counts_batches(condition)


def _resets_number(condition: Condition) -> bool:
    """Return whether a branch sets the number that its test compares to 0: `if waiting == 4: waiting = 0`."""
    left = getattr(getattr(condition.node, "test", None), "left", None)
    branch = getattr(condition.node, "body" if condition.is_true else "orelse", None)
    texts = [unparse(part) for part in branch] if isinstance(branch, list) else []
    return left is not None and f"{unparse(left)} = 0" in texts


def _counts_batches(condition: Condition) -> bool:
    """Return whether a test has the rest of a division, or a name that was set to such a test before."""
    is_test = isinstance(condition.node, ast.If | ast.IfExp)
    return is_test and (is_modulo(condition.node.test) or _find_modulo(condition.value) is not None)


def _find_modulo(value: Value, depth: int = 0) -> Value | None:
    """Return the rest of a division that a test compares: `is_last = number % 4 == 0`, `if not is_last`."""
    is_test = value.kind in ("compared", "unknown") and "from_call" not in value.flags and depth <= 3
    inner = [_find_modulo(dep, depth + 1) for dep in value.deps] if is_test else []
    return value if value.kind == "modulo" else next((one for one in inner if one is not None), None)


def _waits(save: Event, step: Event, test: Condition) -> bool:
    """Return whether a save comes only after a step of the optimizer, as far as that is known."""
    others = [condition for condition in save.conditions if condition.node is not test.node]
    # within the loop, it depends on nothing, on the time or on a signal
    first = save.loops[-1].line
    tests = [one for one in others if isinstance(one.node, ast.If) and one.node.lineno > first]
    if _is_under(save, test) is test.is_true or all(_AT_ANY_TIME.search(one.text) for one in tests):
        return _is_under(save, test) is test.is_true or save.path != step.path
    modulo = _find_modulo(test.value)
    is_tested = any(test.text in one.text or modulo in list_deps(one.value) for one in others)
    if is_tested or "sync_gradients" in unparse(step.loops[0].node):
        return True
    counted = [condition for condition in others if condition.is_true and _counts_batches(condition)]
    return not counted or _counts_steps(counted[-1].value, test) or _is_multiple(counted[-1], test)


def _counts_steps(value: Value, test: Condition) -> bool:
    """Return whether a number counts the steps of the optimizer, and not the batches: it is counted in the
    branch with the step, or has a name such as `trainer.global_step`. value: what the condition of a save
    compares. test: the condition of the step."""
    branch = getattr(test.node, "body" if test.is_true else "orelse", None) or [test.node]
    # `opt.step() if number % 4 == 0 else None` has one expression
    parts = branch if isinstance(branch, list) else [branch]
    lines = range(parts[0].lineno, parts[-1].end_lineno + 1)
    # the block of accumulate() runs for every batch: a number that is counted in it counts batches
    is_block = test.text.startswith("with ")
    deps = list_deps(value)
    is_counted = any(dep.kind == "counter" and dep.line in lines and not is_block for dep in deps)
    # a value whose assignment was not found: only its name tells what it counts
    opaque = [dep for dep in deps if dep.kind in ("unknown", "attribute", "option") and not dep.deps]
    return is_counted or any(re.search("step|update", dep.label) for dep in opaque)


def _is_multiple(save: Condition, step: Condition) -> bool:
    """Return whether each checkpoint is at a step, as `number % 8 == 0` and `number % 4 == 0`. An option of
    the save may be right; a constant cannot follow an option."""
    saved, stepped = _read_modulo(save), _read_modulo(step)
    if saved is None or stepped is None or saved[::2] != stepped[::2]:
        return False
    if isinstance(saved[1], int) and isinstance(stepped[1], int):
        return stepped[1] != 0 and saved[1] % stepped[1] == 0
    return not isinstance(saved[1], int)


def _read_modulo(condition: Condition) -> tuple[str, Any, str] | None:
    """Return (number, divisor, rest) of a test such as `step % 4 == 0`; None for other tests. It is the test
    of the condition itself, or that of a name in it: `due = step % 4 == 0`."""
    tests = [getattr(condition.node, "test", None), *[dep.node for dep in list_deps(condition.value)]]
    for test in tests:
        is_equal = isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq | ast.NotEq)
        left = test.left if is_equal else None
        if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod):
            divisor = left.right.value if isinstance(left.right, ast.Constant) else unparse(left.right)
            return unparse(left.left), divisor, unparse(test.comparators[0])
    return None


# R801: a hint about a whole script


def _find_no_signal(facts: Facts) -> Iterator[Finding]:
    """Find a script that saves at the ends of epochs only, and does not handle SIGTERM."""
    saves = [save.event for save in facts.restart_saves if save.event.order > facts.first_step]
    # `backward()` in a loop over batches in a loop over epochs, and all saves in the outer one or after it
    deepest = max((len(event.loops) for event in facts.select("backward")), default=0)
    is_outer = deepest > 1 and all(len(save.loops) < 2 for save in saves)
    if saves and is_outer and not facts.imports(_HANDLES_SIGNALS):
        when = "at the ends of epochs" if saves[0].loops else "after the last epoch"
        text = f"checkpoints are saved {when} only, and no handler saves one at SIGTERM"
        yield at(saves[0], "R801", text, save=saves[0])


# R303: a checkpoint within an epoch


def _find_within(facts: Facts) -> Iterator[Finding]:
    """Find a checkpoint between two batches, with which a restart begins an epoch at its first batch."""
    skips: list[Any] = [*_list_skips(facts)]
    skips += facts.calls(r"islice$|skip|fast_forward|advance|state_dict_loader")
    skips += [event for event in facts.in_training("test") if _skips_by_number(facts, event)]
    loaded = {value.kind for value in facts.loaded} & {"loader", "sampler", "dataset"}
    if facts.restores_all or skips or loaded or facts.imports(r"(^| )(torchdata|bootfile)\b"):
        return
    for save in facts.training_saves:
        event = save.event
        steps = [step for step in facts.in_training("step", "backward") if step.loops[:2] == event.loops[:2]]
        # the last batch of an epoch is its end, if the test has nothing else
        tests = [test.text for test in event.conditions if " or " not in test.text]
        is_last = any("len(" in text or "last" in text for text in tests)
        is_between = bool(steps) and not is_last and _is_in_data_loop(facts, event)
        # the file that is loaded has one name, and this one has others
        is_other = varies(facts, save) and not _chooses_file(facts)
        # the file of the best result is not that of a restart
        if not is_between or is_other or _is_of_best(facts, event) or not is_checkpoint(save):
            continue
        start, added = split(event.loops[0].start or Value())
        # a loop over steps begins with the next step
        is_next = start.kind == "field" and added == 1 and len(event.loops) > 1
        begins = "with the next one: the rest is left out" if is_next else "an epoch with its first batch"
        message = f"a restart from a checkpoint within an epoch begins {begins}"
        yield at(event, "R303", message, save=event)
        return


def _skips_by_number(facts: Facts, event: Event) -> bool:
    """Return whether a test skips a batch by a counter: `if waiting > 0: waiting -= 1; continue`."""
    if not isinstance(getattr(event.node, "body", [None])[-1], ast.Continue):
        return False
    deps = facts.list_deps(event.value)
    is_counted = any(dep.kind in ("counter", "field") or "restored" in dep.flags for dep in deps)
    return is_counted and not any(dep.kind == "modulo" for dep in deps)


def _is_in_data_loop(facts: Facts, event: Event) -> bool:
    """Return whether the second loop around an event reads data."""
    read = [facts.list_deps(loop.iterated or Value()) for loop in event.loops[1:2]]
    # `batch = next(iterator)` in a loop over steps
    nexts = [call for call in facts.calls(r"^next$") if call.loops == event.loops]
    read += [facts.list_deps(value) for call in nexts for value in call.args.values()]
    return any(kind_of(value) in ("loader", "dataset") for deps in read for value in deps)


def _chooses_file(facts: Facts) -> bool:
    """Return whether a restart loads a file of any name: one of an option, or of a list of files."""
    paths = [root(load.args.get(0, Value())) for load in facts.restart_loads()]
    # a path that is not put together here comes from the user
    if any(path.kind in ("attribute", "unknown") and not path.options for path in paths):
        return True
    deps = [dep for path in paths for dep in list_deps(path)]
    return any(dep.kind in ("option", "args", "loop") or "listing" in dep.flags for dep in deps)


def _is_of_best(facts: Facts, event: Event) -> bool:
    """Return whether a test in the loop compares a result before an event."""
    branches = [test for test in conditions_within(event) if is_branch(test)]
    deps = [dep for test in branches for dep in facts.list_deps(test.value)]
    tests = [dep for dep in deps if dep.kind == "compared" and isinstance(dep.node.ops[0], ORDERS)]
    return any(is_result(facts, test) for test in tests)


# R305: batches that are skipped in an order that is not the one before the restart


def _find_skips(facts: Facts) -> Iterator[Finding]:
    orders = facts.calls(_SETS_ORDER)
    is_kept = any(facts.is_in_training(event) or event.text.endswith("set_rng_state") for event in orders)
    # accelerate restores the order of the first epoch, unless set_epoch() tells it the number
    is_kept = is_kept or (facts.restores_all and not facts.is_accelerated)
    for event, loader in _list_skips(facts) if not is_kept else ():
        options = root(loader).options
        # torch draws a new order at the restart: the skipped batches are other ones
        if is_constant(options.get("shuffle"), True) and "generator" not in options:
            message = "batches are skipped in an order that is not the one before the restart: "
            message += f"{describe(loader)} shuffles"
            yield at(event, "R305", message, value=loader)


def _list_skips(facts: Facts) -> Iterator[tuple[Event, Value]]:
    """Yield where batches are skipped by a number of the checkpoint, and the loader."""
    for event in facts.in_training("test"):
        # `if number < start: continue`
        inner = event.loops[-1]
        is_skip = isinstance(event.node, ast.If) and isinstance(event.node.body[-1], ast.Continue)
        is_of_loop = inner.value is not None and inner.value in list_deps(event.value)
        if is_skip and is_of_loop and values.is_restored(event.value):
            read = [inner.iterated or Value(), *list_deps(inner.iterated or Value())]
            yield from [(event, value) for value in read if kind_of(value) == "loader"][:1]
    # `for batch in islice(loader, start, None)`, accelerate's skip_first_batches(loader, start)
    for event in facts.calls(r"itertools\.islice$|skip_first_batches$"):
        loader, start = event.args.get(0, Value()), event.args.get(1, Value())
        is_restored = facts.is_in_training(event) and values.is_restored(start)
        if is_restored and kind_of(loader) == "loader":
            yield event, loader

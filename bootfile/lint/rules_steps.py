"""Rules about the place of a save or load among the steps of the training."""

import ast
import re
from collections.abc import Iterator
from typing import Any

from bootfile.lint.facts import Facts
from bootfile.lint.record import Condition, Event
from bootfile.lint.rules_files import is_checkpoint
from bootfile.lint.sources import is_modulo, unparse
from bootfile.lint.table import Finding, at, name_line
from bootfile.lint.values import Value, list_deps, root

_AT_ANY_TIME = re.compile(r"time|signal|sigterm|preempt|interrupt|terminat", re.IGNORECASE)
_ACCUMULATES = re.compile(r"with \w+\.accumulate\(")
_HANDLES_SIGNALS = r"(^| )(signal|submitit|bootfile)\b"


def check(facts: Facts) -> Iterator[Finding]:
    """Yield the findings about the places of saves and loads."""
    if facts.loops and facts.intent:
        yield from _find_lost_gradients(facts)
        yield from _find_no_signal(facts)


# R602: a checkpoint between two steps of the optimizer, which loses the gradients since the first


def _find_lost_gradients(facts: Facts) -> Iterator[Finding]:
    steps = [event for event in facts.in_training("step") if root(event.value).kind == "optimizer"]
    saves = [save.event for save in facts.training_saves if is_checkpoint(save)]
    for step in steps:
        tests = [condition for condition in step.conditions if _lets_step(condition)]
        others = [
            other for other in steps if root(other.value) is root(step.value) and other.loops == step.loops
        ]
        # the innermost test that lets the optimizer step, such as `if (i + 1) % 4 == 0`
        test = tests[-1] if tests else None
        if test is None or any(_is_under(other, test) is None for other in others):
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
    test: Any = getattr(condition.node, "test", None)
    branch: Any = getattr(condition.node, "body" if condition.is_true else "orelse", None)
    is_branch = isinstance(test, ast.Compare) and isinstance(branch, list)
    assigns = [part for part in branch if isinstance(part, ast.Assign)] if is_branch else []
    return any(f"{unparse(test.left)} = 0" == unparse(part) for part in assigns)


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
    if not isinstance(branch, list):  # that of `opt.step() if number % 4 == 0 else None`
        branch = [branch]
    lines = range(branch[0].lineno, (branch[-1].end_lineno or 0) + 1)
    # the block of accumulate() runs for every batch: a number that is counted in it counts batches
    is_block = test.text.startswith("with ")
    for dep in list_deps(value):
        # a value whose assignment was not found: only its name tells what it counts
        is_opaque = dep.kind in ("unknown", "attribute", "option") and not dep.deps
        is_counted = dep.kind == "counter" and dep.line in lines and not is_block
        if is_counted or (is_opaque and re.search("step|update", dep.label)):
            return True
    return False


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
    """Return (number, divisor, rest) of a test such as `step % 4 == 0`; None for other tests."""
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
    saves = [save.event for save in facts.training_saves]
    # `backward()` in a loop over batches in a loop over epochs, and all saves in the outer one
    deepest = max((len(event.loops) for event in facts.select("backward")), default=0)
    is_outer = deepest > 1 and all(len(save.loops) == 1 for save in saves)
    if saves and is_outer and not facts.imports(_HANDLES_SIGNALS):
        text = "checkpoints are saved at the ends of epochs only, and no handler saves one at SIGTERM"
        yield at(saves[0], "R801", text, save=saves[0])

"""Rules about counters and best results that begin again at each start, although the training depends on
them."""

import ast
import re
from collections.abc import Iterator
from collections.abc import Set as AbstractSet

from bootfile.lint import values
from bootfile.lint.facts import Facts, of_a_restart
from bootfile.lint.record import Event
from bootfile.lint.table import Finding, at, name_line
from bootfile.lint.values import Value, list_deps, root

_BEST_NAME = re.compile(
    r"(^|_)(best|highest|lowest|top|record)|best(_|$)|^(min|max)_(\w*_)?(loss|acc|val)", re.IGNORECASE
)
_OFFSET = re.compile(
    r"resum|restart|start_(step|epoch|iter)|offset|restor|previous|step_start", re.IGNORECASE
)
_PATIENCE = re.compile(r"patien|not?_improv|wait|stop|bad_epoch|trigger|early", re.IGNORECASE)
_SETS_RATE = re.compile(r"\[['\"]lr['\"]\]$")
_SETS = ("set_name", "set_attribute", "set_item")
_OBJECTS = ("state", "optimizer", "model", "scheduler")
# how the training uses a counter -> the words of the finding
_USES = {
    "stop": "early stopping depends",
    "rate": "the learning rate depends",
    "order": "the order of the samples depends",
}


def check(facts: Facts) -> Iterator[Finding]:
    """Yield the findings about counters and best results."""
    if not facts.saves_all:
        yield from of_a_restart(_find_best(facts), facts)
    if not facts.saves_all and not facts.restores_all:
        yield from of_a_restart(_find_counters(facts), facts)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _is_plain_number(value: Value | None) -> bool:
    """Return whether a value is a number that the script writes."""
    return value is not None and value.kind == "const" and not isinstance(value.key, str | bool)


# R108: a best result that begins again, so that a worse one replaces the best file


def _find_best(facts: Facts) -> Iterator[Finding]:
    seen: set[str] = set()
    for event in facts.in_training("set_name", "set_attribute"):
        name = event.text
        is_best = name not in seen and _BEST_NAME.search(name) is not None
        old = _find_old(facts, event) if is_best and not _is_of_first_stage(facts, event) else None
        # `if acc > best_acc: best_acc = acc`: without such a test the name holds something else
        pattern = re.compile(rf"(\b|_){re.escape(_last(name))}|is_best|improved")
        if old is None or not any(pattern.search(condition.text) for condition in event.conditions):
            continue
        seen.add(name)
        # it has to begin with a number, before the training loop
        is_number = _is_plain_number(old) and not values.is_restored(old)
        is_first = is_number and not any(loop in facts.loops for loop in old.loops)
        if not is_first or _is_value_restored(facts, name, is_best=True) or not _decides_a_save(facts, event):
            continue
        holders = [save for save in facts.saves if any(_last(name) in entry.key for entry in save.entries)]
        where = "and not in the checkpoint"
        if holders:
            where = f"although the checkpoint of {name_line(holders[-1].event, event)} has it"
        message = f"{name} begins with {old.key} at each start, {where}"
        yield at(event, "R108", message, value=old, save=[save.event for save in holders])


def _is_of_first_stage(facts: Facts, event: Event) -> bool:
    """Return whether an event is in a stage before the one whose checkpoints a restart loads."""
    fullest = facts.fullest_save
    if len(facts.loops) < 2 or fullest is None or len(fullest.entries) < 2:
        return False
    return facts.is_in_training(fullest.event) and fullest.event.loops[0] is not event.loops[0]


def _find_old(facts: Facts, event: Event) -> Value | None:
    """Return the value that a name or attribute had before the training loop; None if it is not known."""
    if event.name == "set_name":
        return event.args.get(0)
    # an attribute has no old value in the event: it is the first assignment before the loop
    before = [one for one in facts.select("set_attribute") if one.order < event.order]
    for earlier in before:
        is_same = earlier.text == event.text and not facts.is_in_training(earlier)
        if is_same and values.is_restored(earlier.args[0]):
            return None
        if is_same and root(event.value) is root(earlier.value):
            return earlier.args[0]
    return None


def _decides_a_save(facts: Facts, event: Event) -> bool:
    """Return whether a file is written under the innermost condition that also changes the best result: one
    that is only printed does no harm."""
    nodes = [condition.node for condition in event.conditions if condition.is_true]
    for save in facts.saves:
        tests = save.event.conditions
        is_shared = any(test.is_true and test.node in nodes for test in tests)
        if is_shared and any(test.node is nodes[-1] for test in tests):
            return True
    return False


def _is_value_restored(
    facts: Facts, name: str, is_best: bool = False, others: AbstractSet[str] = frozenset()
) -> bool:
    """Return whether a name gets a value of a checkpoint anywhere. is_best: the checkpoint may call it by
    another name for the best result. others: keys of other numbers."""
    last = _last(name)
    for event in facts.select(*_SETS):
        given = [event.args.get(0, Value()), event.value if event.name == "set_name" else Value()]
        if _last(event.text) == last and any(map(values.is_restored, given)):
            return True
    # the script reads an entry of nearly the same name: it may come back in a way that is not followed
    keys = {str(event.value.key or "") for event in facts.select("read")} - {""}
    keys = {key for key in keys if key == last or key not in others}
    return any(key in last or last in key or (is_best and _BEST_NAME.search(key)) for key in keys)


# R107: a counter on which the training depends


def _find_counters(facts: Facts) -> Iterator[Finding]:
    seen: set[tuple[str, int]] = set()
    for event in facts.select("test", "method", "set_item"):
        is_loop_test = bool(event.loops) and event.loops[-1] in facts.loops
        use, given = _describe_use(event) if is_loop_test or facts.is_in_training(event) else ("", Value())
        counters = [dep for dep in list_deps(given) if use and dep.kind == "counter"]
        for counter in sorted(counters, key=lambda value: value.line):
            place = (counter.path, counter.line)
            # `if step > max_steps: break` ends a run, too; only early stopping counts bad epochs
            is_end = use == "stop" and not _PATIENCE.search(counter.label)
            if place in seen or is_end or not _begins_again(facts, counter) or _has_offset(event, counter):
                continue
            seen.add(place)
            if _may_come_back(facts, counter, use):
                continue
            name = counter.label
            message = (
                f"{name} begins again at each start and is not in the checkpoint, but {_USES[use]} on it"
            )
            # a schedule may have another way to find its place
            yield at(counter, "R107", message, use == "rate", value=counter, use=event)


def _describe_use(event: Event) -> tuple[str, Value]:
    """Return (what an event uses a number for, the number); "" if the training does not depend on it."""
    # `if counter >= patience: break`
    body = getattr(event.node, "body", []) if event.name == "test" and event.value.kind == "compared" else []
    if any(isinstance(part, ast.Break | ast.Return) for part in body):
        return "stop", event.value
    # `group["lr"] = rate * step / warmup`
    if event.name == "set_item" and _SETS_RATE.search(event.text):
        return "rate", event.args[0]
    # `sampler.set_epoch(passes)`, with a number of its own
    if event.name == "method" and event.text == "set_epoch":
        return "order", event.args.get(0) or event.args.get("epoch") or Value()
    return "", Value()


def _begins_again(facts: Facts, counter: Value) -> bool:
    """Return whether a counter is a constant at the start of the training."""
    first = counter.of or Value()
    # a counter of a counter, as of nested loops: what it was before the outermost one
    for _ in range(5):
        first = first.of if first.kind in ("counter", "shifted") and first.of is not None else first
    is_inner = any(loop in facts.loops for loop in first.loops)
    return _is_plain_number(first) and not is_inner and not values.is_restored(counter)


def _has_offset(event: Event, counter: Value) -> bool:
    """Return whether a use adds the number before the restart to a counter."""
    given = event.args[0] if event.name == "set_item" else event.value
    others = [dep for dep in list_deps(given) if dep is not counter and dep.kind not in _OBJECTS]
    return any(_OFFSET.search(dep.label) for dep in others)


def _may_come_back(facts: Facts, counter: Value, use: str) -> bool:
    """Return whether a checkpoint has a counter, or a loop brings it to its value again."""
    # a number that is read for the training loop is not that of a sampler of its own
    starts = [dep for loop in facts.loops for dep in list_deps(loop.start or Value()) if dep.kind == "field"]
    others = {str(dep.key) for dep in starts if dep.key is not None} if use == "order" else set()
    entries = [entry for save in facts.saves for entry in save.entries]
    is_entry = any(entry.value.label == counter.label and facts.is_read(entry.name) for entry in entries)
    if is_entry or _is_value_restored(facts, counter.label, others=others):
        return True
    # `while step >= milestones[index]: index += 1` catches up
    pattern = re.compile(rf"\b{re.escape(counter.label)}\b")
    loops = [event for event in facts.in_training("test") if isinstance(event.node, ast.While)]
    inner = [event for event in loops if event.loops[0].node is not event.node and event.path == counter.path]
    around = [event for event in inner if event.node.lineno <= counter.line <= (event.node.end_lineno or 0)]
    return any(pattern.search(event.text) for event in around)

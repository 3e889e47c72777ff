"""Rules about numbers that a loop carries from one pass to the next, that begin again at each start, and on
which the training depends: best results, counters, learning rates."""

import ast
import re
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from bootfile.lint import values
from bootfile.lint.facts import Facts, of_a_restart
from bootfile.lint.record import Condition, Event
from bootfile.lint.rules_files import path_of
from bootfile.lint.sources import find_counted
from bootfile.lint.table import Finding, at, name_line
from bootfile.lint.values import Value

_BEST_KEY = re.compile(r"best|highest|lowest|top|record", re.IGNORECASE)
_OFFSET = re.compile(
    r"resum|restart|start_(step|epoch|iter)|offset|restor|previous|step_start|begin", re.IGNORECASE
)
_SETS_RATE = re.compile(r"\[['\"]lr['\"]\]$")
_SETS = ("set_name", "set_attribute", "set_item")
_EXTREME = re.compile(r"(^|\.)(min|max|amin|amax)$")
_OBJECTS = ("state", "optimizer", "model", "scheduler")
_COPIES = r"shutil\.copy\w*$"
_LOGS = re.compile(r"add_scalars?$|(^|\.)log(_metrics)?$")
_TELLS_TIME = re.compile(r"time|perf_counter|monotonic|datetime|now")
# how the training uses a number -> the words of the finding; the first that fits is reported
_WORDS = {
    "stop": "early stopping depends",
    "order": "the order of the samples depends",
    "rate": "the learning rate depends",
    "end": "the end of the training depends",
    "names": "the name of the checkpoint depends",
    "log": "the log depends",
}
_ORDERS = ast.Lt | ast.Gt | ast.LtE | ast.GtE


class Carried(NamedTuple):
    """A number that a training loop carries from one pass to the next. start: what it is before the loop.
    sets: the assignments in the loop."""

    start: Value
    sets: list[Event]

    @property
    def name(self) -> str:
        return self.sets[0].value.label if self.start.kind == "list" else self.sets[0].text

    @property
    def is_counter(self) -> bool:
        """Whether the loop adds constants to it."""
        counts = [event for event in self.sets if find_counted(event.node) is not None]
        return bool(counts) and not any("sum" in event.args[0].flags for event in counts)


class Use(NamedTuple):
    """A place at which the training depends on numbers. kind: a key of _WORDS. given: what it uses."""

    kind: str
    event: Event
    given: Value


def check(facts: Facts) -> Iterator[Finding]:
    """Yield the findings about counters and best results."""
    yield from of_a_restart(_find_early(facts), facts)
    yield from of_a_restart(_find_only_best(facts), facts)
    if facts.saves_all:
        return
    carried = _list_carried(facts)
    yield from of_a_restart(_find_best(facts, carried), facts)
    if not facts.restores_all:
        yield from of_a_restart(_find_counters(facts, carried), facts)


def _list_carried(facts: Facts) -> list[Carried]:
    """Return the numbers that the training loops carry, and that begin again at each start."""
    of_start: dict[Value, list[Event]] = {}
    for event in facts.in_training(*_SETS):
        start = _first_of(event)
        # a name of a function that the loop calls is a new one at each call
        is_local = event.name == "set_name" and len(event.functions) > event.loops[0].calls
        is_outer = values.is_start(start) and not any(loop in facts.loops for loop in start.loops)
        is_outer = is_outer and not is_local
        # an option such as --start_epoch is the number of the restart
        if is_outer and not (start.kind == "option" and _OFFSET.search(start.label)):
            of_start.setdefault(start, []).append(event)
    # `history.append(loss)`, `if loss < min(history)`
    for event in facts.in_training("method"):
        is_list = event.text == "append" and event.value.kind == "list" and 0 in event.args
        if is_list and event.value.label and not any(loop in facts.loops for loop in event.value.loops):
            of_start.setdefault(event.value, []).append(event)
    return [Carried(start, sets) for start, sets in of_start.items()]


def _first_of(event: Event) -> Value:
    """Return what a number was before the loops that change it."""
    value, name = event.args[1], _last(event.text)
    for _ in range(6):
        is_changed = value.kind in ("counter", "shifted", "unknown") and _last(value.label) == name
        value = value.of if is_changed and value.of is not None else value
    return value


def _conditions_within(event: Event) -> list[Condition]:
    """Return the tests around an event that are within its outermost loop."""
    return list(event.conditions[event.loops[0].depth :])


# R108: a best result that begins again, so that a worse one replaces the best file


def _find_best(facts: Facts, carried: list[Carried]) -> Iterator[Finding]:
    # a copy of the last checkpoint is a file of the best one, too
    writes = [save.event for save in facts.training_saves]
    writes += [event for event in facts.calls(_COPIES) if facts.is_in_training(event)]
    for one in carried:
        name = one.name
        results = [event for event in one.sets if _keeps_best(facts, event, one.start)]
        event = results[0] if results else None
        if event is None or _is_of_first_stage(facts, event) or not _decides(facts, one.start, writes):
            continue
        if _is_value_restored(facts, one, is_best=True):
            continue
        holders = [save for save in facts.saves if any(_last(name) in entry.key for entry in save.entries)]
        where = "and not in the checkpoint"
        if holders:
            where = f"although the checkpoint of {name_line(holders[-1].event, event)} has it"
        start = "no results" if one.start.kind == "list" else one.start.key
        message = f"{name} begins with {start} at each start, {where}"
        yield at(event, "R108", message, value=one.start, save=[save.event for save in holders])


def _find_only_best(facts: Facts) -> Iterator[Finding]:
    """Find a script that saves only when a result is better than the one before, whatever its start."""
    saves = [save.event for save in facts.training_saves]
    pairs = [(event, _first_of(event)) for event in facts.in_training(*_SETS) if event.args[1].label]
    olds = {old for event, old in pairs if _keeps_best(facts, event, old)}
    tests = [test.value for save in saves for test in _conditions_within(save)]
    # `if epoch % 10 == 0 or is_best`
    is_regular = any(dep.kind == "modulo" for test in tests for dep in facts.list_deps(test))
    is_best = all(any(_decides(facts, old, [save]) for old in olds) for save in saves)
    if saves and is_best and not is_regular and not facts.saves_all:
        yield at(saves[0], "R704", "a checkpoint is saved only when a result improves", save=saves[0])


def _find_early(facts: Facts) -> Iterator[Finding]:
    """Find a checkpoint that has the best result before that of the epoch is compared with it."""
    trained = facts.in_training("step", "backward")
    for event in facts.in_training(*_SETS):
        old = event.args[1]
        is_best = bool(old.label) and _keeps_best(facts, event, old) and not facts.is_own_state(old)
        for save in facts.training_saves if is_best else ():
            is_before = trained[-1].order < save.event.order < event.order and save.event.loops == event.loops
            if is_before and any(entry.value is old for entry in save.entries):
                where = name_line(save.event, event)
                message = f"{where} saves {event.text} before it gets the result of the epoch"
                yield at(event, "R108", message, value=old, save=[save.event])
                return


def _keeps_best(facts: Facts, event: Event, start: Value) -> bool:
    """Return whether an assignment keeps the better one of two results: `if acc > best: best = acc`, `best =
    max(acc, best)`, `history.append(acc)`."""
    new = event.args[0]
    # a function that returns the better one has the test in it
    tests = [new, *[test.value for test in _conditions_within(event)]]
    is_tested = any(_is_compared(facts, start, test) for test in tests)
    is_extreme = _EXTREME.search(str(new.key)) is not None and start in facts.list_deps(new)
    return (is_tested or is_extreme or start.kind == "list") and is_result(facts, new)


def is_result(facts: Facts, value: Value) -> bool:
    """Return whether a value comes from what the training computes, and not from counters, options or the
    clock."""
    deps = facts.list_deps(value)
    if any(_TELLS_TIME.search(f"{dep.key} {dep.label}") for dep in deps if "from_call" in dep.flags):
        return False
    plain = ("const", "none", "option", "args", "range", "module", "list", "compared", *values.NUMBERS)
    return any(
        "from_call" in dep.flags or "sum" in dep.flags or (dep.kind not in plain and not dep.deps)
        for dep in deps
    )


def _decides(facts: Facts, start: Value, writes: list[Event]) -> bool:
    """Return whether a file is written only if a result is better than a number that began with `start`."""
    for write in writes:
        for test in _conditions_within(write):
            # what follows `if ...: break` is not a branch
            has_branch = test.is_true or bool(getattr(test.node, "orelse", []))
            if has_branch and _is_compared(facts, start, test.value):
                return True
    return False


def _is_compared(facts: Facts, start: Value, value: Value) -> bool:
    """Return whether a test compares a number, or the smallest or largest of a list, with another one."""
    for compared in [dep for dep in facts.list_deps(value) if dep.kind == "compared"]:
        deps = facts.list_deps(compared)
        is_extreme = any(_EXTREME.search(str(dep.key)) for dep in deps)
        # `if loss == min(losses)`
        is_ordered = isinstance(compared.node.ops[0], _ORDERS) or is_extreme
        if start in deps and is_ordered and (start.kind != "list" or is_extreme):
            return True
    return False


def _is_of_first_stage(facts: Facts, event: Event) -> bool:
    """Return whether an event is in a stage before the one whose checkpoints a restart loads."""
    fullest = facts.fullest_save
    if len(facts.loops) < 2 or fullest is None or len(fullest.entries) < 2:
        return False
    return facts.is_in_training(fullest.event) and fullest.event.loops[0] is not event.loops[0]


def _last(name: str) -> str:
    return re.split(r"[.\[]", name.rstrip("]"))[-1].strip("'\"")


def _is_value_restored(
    facts: Facts, one: Carried, is_best: bool = False, others: AbstractSet[str] = frozenset()
) -> bool:
    """Return whether a name gets a value of a checkpoint anywhere. is_best: the checkpoint may call it by
    another name for the best result. others: keys of other numbers."""
    last = _last(one.name)
    sets = [event for event in facts.select(*_SETS) if not facts.is_in_training(event)]
    restored = [event for event in sets if _last(event.text) == last and values.is_restored(event.args[0])]
    # the same name in another function is another one
    here = [event.functions for event in one.sets if event.name == "set_name"]
    if any(event.name != "set_name" or not here or event.functions in here for event in restored):
        return True
    # the script reads an entry of nearly the same name, and what it does with it is not followed
    reads = {event.value for event in facts.select("read")}
    keys = {str(value.key or "") for value in reads - _list_followed(facts)} - {""}
    keys = {key for key in keys if key == last or key not in others}
    return any(key in last or last in key or (is_best and _BEST_KEY.search(key)) for key in keys)


def _list_followed(facts: Facts) -> set[Value]:
    """Return the entries of checkpoints that names, attributes or objects get."""
    sets = [event.args[0] for event in facts.select(*_SETS)]
    given = [value for event in facts.select("load_state") for value in event.args.values()]
    return {dep for value in (*sets, *given) for dep in facts.list_deps(value) if dep.kind == "field"}


# R107: a number on which the training depends


def _find_counters(facts: Facts, carried: list[Carried]) -> Iterator[Finding]:
    events = facts.in_training("test", "method", "call", "set_item")
    uses = [use for event in events for use in _list_uses(event)]
    uses += [Use("names", save.event, path_of(save.event)) for save in facts.training_saves]
    for one in carried:
        used = [use for use in uses if one.start in facts.list_deps(use.given) and _matters(facts, one, use)]
        used = [use for use in used if not _has_offset(facts, use, one)]
        if not used:
            continue
        first = min(used, key=lambda use: list(_WORDS).index(use.kind))
        if _may_come_back(facts, one, first):
            continue
        where = "begins again at each start and is not in the checkpoint"
        message = f"{one.name} {where}, but {_WORDS[first.kind]} on it"
        # a schedule may have another way to find its place
        is_hint = first.kind == "log" or (first.kind == "rate" and one.is_counter)
        counter = next((event.value for event in one.sets if event.value.kind == "counter"), one.start)
        yield at(one.sets[0], "R107", message, is_hint, value=counter, use=first.event)


def _list_uses(event: Event) -> Iterator[Use]:
    """Yield what an event uses a number for, if the training may depend on it."""
    if event.name == "test":
        yield from _list_ends(event)
    # `group["lr"] = rate * step / warmup`
    elif event.name == "set_item" and _SETS_RATE.search(event.text):
        yield Use("rate", event, event.args[0])
    # `sampler.set_epoch(passes)`, with a number of its own
    elif event.name == "method" and event.text == "set_epoch":
        yield Use("order", event, event.args.get(0) or event.args.get("epoch") or Value())
    elif event.name != "set_item" and _LOGS.search(event.text):
        yield from (Use("log", event, value) for value in event.args.values())


def _list_ends(event: Event) -> Iterator[Use]:
    """Yield a test that ends a loop: `if counter >= patience: break`, `while step < last`."""
    is_loop = isinstance(event.node, ast.While)
    body = [] if is_loop else getattr(event.node, "body", [])
    if is_loop or any(isinstance(part, ast.Break | ast.Return) for part in body):
        yield Use("stop", event, event.value)
        yield Use("end", event, event.value)


def _matters(facts: Facts, one: Carried, use: Use) -> bool:
    """Return whether the training depends on a number by a use of this kind."""
    sets = [event for event in one.sets if find_counted(event.node) is None]
    sets = [event for event in sets if not values.is_restored(event.args[0]) or event.args[0].kind == "loop"]
    # early stopping sets its number back, or to the epoch of the best result, at some times only
    is_set_back = bool(sets) and all(_conditions_within(event) for event in sets)
    is_number = one.is_counter or any(event.args[0].kind in values.NUMBERS for event in sets)
    if use.kind in ("stop", "end") and not _is_compared(facts, one.start, use.given):
        return False
    if use.kind == "stop":
        return is_set_back and is_number
    if use.kind == "end":
        # the epochs of one start, beside the number of all
        loops = {loop for event in one.sets for loop in event.loops if find_counted(event.node) is not None}
        is_beside = any(values.is_restored(loop.start) for loop in loops if loop.start and len(loops) == 1)
        return one.is_counter and not sets and not is_beside
    return use.kind in ("rate", "order") or (one.is_counter and not sets)


def _has_offset(facts: Facts, use: Use, one: Carried) -> bool:
    """Return whether a use adds the number before the restart to a counter."""
    others = [dep for dep in facts.list_deps(use.given) if dep.kind not in (*_OBJECTS, "counter")]
    return any(_OFFSET.search(dep.label) for dep in others if dep is not one.start)


def _may_come_back(facts: Facts, one: Carried, use: Use) -> bool:
    """Return whether a checkpoint has a number, or a loop brings it to its value again."""
    # a number that is read for the training loop is not that of a sampler of its own
    starts = [
        dep for loop in facts.loops for dep in facts.list_deps(loop.start or Value()) if dep.kind == "field"
    ]
    others = {str(dep.key) for dep in starts if dep.key is not None} if use.kind == "order" else set()
    if _is_value_restored(facts, one, others=others):
        return True
    # `while step >= milestones[index]: index += 1` catches up
    loops = [event for event in facts.in_training("test") if isinstance(event.node, ast.While)]
    inner = [event.node for event in loops if event.loops[0].node is not event.node]
    lines = [event.line for event in one.sets if find_counted(event.node) is not None]
    is_caught_up = any(node.lineno <= line <= (node.end_lineno or 0) for node in inner for line in lines)
    return is_caught_up and use.kind == "rate"

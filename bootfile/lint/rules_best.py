"""Rules about the best result: a worse one replaces the best file, or only the best one is saved."""

from collections.abc import Iterator

from bootfile.lint.carried import (
    EXTREME,
    SETS,
    Carried,
    conditions_within,
    first_of,
    is_compared,
    is_restored,
    is_result,
    last_part,
    list_carried,
)
from bootfile.lint.facts import Facts, of_a_restart
from bootfile.lint.record import Event
from bootfile.lint.table import Finding, at, name_line
from bootfile.lint.values import Value

_COPIES = r"shutil\.copy\w*$"


def check(facts: Facts) -> Iterator[Finding]:
    """Yield the findings about best results."""
    yield from of_a_restart(_find_early(facts), facts)
    if not facts.saves_all:
        yield from of_a_restart(_find_best(facts, list_carried(facts)), facts)
        yield from of_a_restart(_find_only_best(facts), facts)


# R108: a best result that begins again, so that a worse one replaces the best file


def _find_best(facts: Facts, carried: list[Carried]) -> Iterator[Finding]:
    # a copy of the last checkpoint is a file of the best one, too
    writes = [save.event for save in facts.training_saves]
    writes += [event for event in facts.calls(_COPIES) if facts.is_in_training(event)]
    for number in carried:
        start = number.start
        event = next((event for event in number.sets if _keeps_best(facts, event, start)), None)
        if event is None or _is_of_first_stage(facts, event) or not _decides(facts, start, writes):
            continue
        if is_restored(facts, number, is_best=True):
            continue
        name, first = event.text, start.key
        if start.kind == "list":
            name, first = number.name, "no results"
        key = last_part(name)
        holders = [save.event for save in facts.saves if any(key in entry.key for entry in save.entries)]
        where = "and not in the checkpoint"
        if holders:
            where = f"although the checkpoint of {name_line(holders[-1], event)} has it"
        message = f"{name} begins with {first} at each start, {where}"
        yield at(event, "R108", message, value=start, save=holders)


def _find_early(facts: Facts) -> Iterator[Finding]:
    """Find a checkpoint that has the best result before that of the epoch is compared with it."""
    trained = facts.list_trained()
    for event in facts.in_training(*SETS):
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
    tests = [new, *[test.value for test in conditions_within(event)]]
    is_tested = any(is_compared(facts, start, test) for test in tests)
    is_extreme = EXTREME.search(str(new.key)) is not None and start in facts.list_deps(new)
    return (is_tested or is_extreme or start.kind == "list") and is_result(facts, new)


def _decides(facts: Facts, start: Value, writes: list[Event]) -> bool:
    """Return whether a file is written only if a result is better than a number that began with `start`."""
    for write in writes:
        for test in conditions_within(write):
            # what follows `if ...: break` has this test as a false one, and is not a branch of it
            has_branch = test.is_true or bool(getattr(test.node, "orelse", []))
            if has_branch and is_compared(facts, start, test.value):
                return True
    return False


def _is_of_first_stage(facts: Facts, event: Event) -> bool:
    """Return whether an event is in a stage before the one whose checkpoints a restart loads."""
    fullest = facts.fullest_save
    if len(facts.loops) < 2 or fullest is None or len(fullest.entries) < 2:
        return False
    return facts.is_in_training(fullest.event) and fullest.event.loops[0] is not event.loops[0]


# R704: checkpoints only when a result improves


def _find_only_best(facts: Facts) -> Iterator[Finding]:
    """Find a script that saves only when a result is better than the one before, whatever its start."""
    saves = [save.event for save in facts.training_saves]
    pairs = [(event, first_of(event)) for event in facts.in_training(*SETS) if event.args[1].label]
    olds = {old for event, old in pairs if _keeps_best(facts, event, old)}
    tests = [test.value for save in saves for test in conditions_within(save)]
    # `if epoch % 10 == 0 or is_best`
    is_regular = any(dep.kind == "modulo" for test in tests for dep in facts.list_deps(test))
    is_best = all(any(_decides(facts, old, [save]) for old in olds) for save in saves)
    if saves and is_best and not is_regular:
        yield at(saves[0], "R704", "a checkpoint is saved only when a result improves", save=saves[0])

"""Rules about numbers that a loop carries from one pass to the next, that begin again at each start, and on
which the training depends: counters, learning rates and best results."""

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from bootfile.lint import values
from bootfile.lint.carried import (
    EXTREME,
    OFFSET,
    SETS,
    Carried,
    conditions_within,
    first_of,
    is_branch,
    is_compared,
    is_restored,
    is_result,
    last_part,
    list_carried,
)
from bootfile.lint.facts import Facts, of_a_restart
from bootfile.lint.record import Event
from bootfile.lint.rules_files import is_file_of, is_renamed, path_of
from bootfile.lint.rules_random import SOURCES
from bootfile.lint.sources import find_counted, unparse
from bootfile.lint.table import Finding, at, name_line
from bootfile.lint.values import Value, kind_of, list_deps

_SETS_RATE = re.compile(r"\[['\"]lr['\"]\]$")
_OBJECTS = ("state", "optimizer", "model", "scheduler")
_FILES = r"(^|\.)(savez?|savetxt|savemat|dumps?|DataFrame|to_csv|writerows?|scatter|plot(_\w+)?)$"
_COPIES = r"shutil\.copy\w*$"
_DRAWS = re.compile("|".join(source.draws for source in SOURCES))
_LEAVES = re.compile(r"(break|return|raise)\b|(sys\.)?exit\(|quit\(")
_LOGS = re.compile(r"add_scalars?$|(^|\.)log(_metrics)?$")
# how the training uses a number -> the words of the finding; the first that fits is reported
_WORDS = {
    "stop": "early stopping depends",
    "order": "the order of the samples depends",
    "rate": "the learning rate depends",
    "end": "the end of the training depends",
    "choice": "a random choice depends",
    "names": "the name of the checkpoint depends",
    "log": "the log depends",
    "figures": "a file of all epochs depends",
}


class Use(NamedTuple):
    """A place at which the training depends on numbers. kind: a key of _WORDS. given: what it uses."""

    kind: str
    event: Event
    given: Value


def check(facts: Facts) -> Iterator[Finding]:
    """Yield the findings about counters, learning rates and best results."""
    yield from of_a_restart(_find_early(facts), facts)
    if not facts.saves_all:
        yield from of_a_restart(_find_best(facts, list_carried(facts)), facts)
        yield from of_a_restart(_find_last(facts), facts)
        yield from of_a_restart(_find_only_best(facts), facts)
    if not facts.saves_all and not facts.restores_all:
        yield from of_a_restart(_find_counters(facts, list_carried(facts)), facts)


# R107: a number on which the training depends


def _find_counters(facts: Facts, carried: list[Carried]) -> Iterator[Finding]:
    events = facts.in_training("test", "method", "call", "set_item")
    uses = [use for event in events for use in _list_uses(event)]
    uses += [Use("names", save.event, path_of(save.event)) for save in facts.training_saves]
    # `np.save("losses.npy", losses)`
    writes = [event for event in facts.calls(_FILES) if event.order > facts.first_step]
    uses += [Use("figures", event, value) for event in writes for value in event.args.values()]
    entries = [entry for save in facts.saves for entry in save.entries]
    is_told = False
    for number in carried:
        of_number = [use for use in uses if number.start in facts.list_deps(use.given)]
        needed = [use for use in of_number if _matters(facts, number, use)]
        used = [use for use in needed if not _has_offset(facts, use, number)]
        first = min(used, key=lambda use: list(_WORDS).index(use.kind), default=None)
        # one that is saved and not loaded is a matter of R201
        is_saved = any(number.start in (entry.value.of, entry.value) for entry in entries)
        if first is None or is_saved or _may_come_back(facts, number, first):
            continue
        is_figure = first.kind == "figures"
        if is_figure and (is_told or _has_values(facts, number)):
            continue
        is_told = is_told or is_figure
        where = "begins again at each start and is not in the checkpoint"
        message = f"{number.name} {where}, but {_WORDS[first.kind]} on it"
        # a schedule may have another way to find its place
        is_hint = first.kind in ("log", "figures") or (first.kind == "rate" and number.is_counter)
        counter = next((event.value for event in number.sets if event.value.kind == "counter"), number.start)
        yield at(number.sets[0], "R107", message, is_hint, value=counter, use=first.event)


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
    """Yield a test that ends a loop, `if counter >= patience: break` or `while step < last`, as the end of
    early stopping and as the end of the training: _matters() chooses; and one with a random number."""
    body = event.node.body + event.node.orelse if isinstance(event.node, ast.If) else []
    if isinstance(event.node, ast.While) or any(_LEAVES.match(unparse(part)) for part in body):
        yield Use("stop", event, event.value)
        yield Use("end", event, event.value)
    # `if random.random() < epsilon`
    tests = [dep for dep in list_deps(event.value) if dep.kind == "compared"]
    drawn = [dep for test in tests for dep in test.deps if "from_call" in dep.flags]
    if any(_DRAWS.search(str(dep.key)) or any(map(_is_generator, dep.deps)) for dep in drawn):
        yield Use("choice", event, event.value)


def _is_generator(value: Value) -> bool:
    return kind_of(value) == "generator"


def _matters(facts: Facts, number: Carried, use: Use) -> bool:
    """Return whether the training depends on a number by a use of this kind."""
    sets = [event for event in number.sets if find_counted(event.node) is None]
    sets = [event for event in sets if not values.is_restored(event.args[0]) or event.args[0].kind == "loop"]
    if use.kind in ("stop", "end") and not is_compared(facts, number.start, use.given, number.is_counter):
        return False
    if use.kind == "choice":
        return is_compared(facts, number.start, use.given)
    if use.kind == "stop":
        # early stopping sets its number back, or to the epoch of the best result, at some times only
        is_number = number.is_counter or any(event.args[0].kind in values.NUMBERS for event in sets)
        return is_number and sets != [] and all(conditions_within(event) for event in sets)
    if use.kind == "end":
        # the epochs of one start, in addition to the number of all
        loops = {loop for event in number.counts for loop in event.loops}
        is_beside = any(values.is_restored(loop.start) for loop in loops if loop.start and len(loops) == 1)
        return number.is_counter and not sets and not is_beside
    if number.start.kind == "list":
        return use.kind == "figures"
    return use.kind in ("rate", "order") or (number.is_counter and not sets)


def _has_values(facts: Facts, number: Carried) -> bool:
    """Return whether another branch gives the name of a list values, such as those of a file."""
    sets = [event for event in facts.select(*SETS) if event.text.rpartition(".")[2] == number.name]
    return any(event.args[0] is not number.start for event in sets)


def _has_offset(facts: Facts, use: Use, number: Carried) -> bool:
    """Return whether a use adds the number before the restart to a counter."""
    others = [dep for dep in facts.list_deps(use.given) if dep.kind not in (*_OBJECTS, "counter")]
    return any(OFFSET.search(dep.label) for dep in others if dep is not number.start)


def _may_come_back(facts: Facts, number: Carried, use: Use) -> bool:
    """Return whether a checkpoint has a number, or a loop brings it to its value again."""
    # a number that is read for the training loop is not that of a sampler of its own
    loops = facts.loops if use.kind == "order" else []
    starts = [dep for loop in loops for dep in facts.list_deps(loop.start or Value()) if dep.kind == "field"]
    if is_restored(facts, number, others=frozenset(str(dep.key) for dep in starts)):
        return True
    # `while step >= milestones[index]: index += 1` catches up
    inner = [event.loops[1:] for event in number.counts]
    is_caught_up = any(isinstance(loop.node, ast.While) for loops in inner for loop in loops)
    return is_caught_up and use.kind == "rate"


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
        name, first = (number.name, "no results") if start.kind == "list" else (event.text, start.key)
        key = last_part(name)
        holders = [save.event for save in facts.saves if any(key in entry.key for entry in save.entries)]
        where = "and not in the checkpoint"
        if holders:
            where = f"although the checkpoint of {name_line(holders[-1], event)} has it"
        yield at(
            event, "R108", f"{name} begins with {first} at each start, {where}", value=start, save=holders
        )


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


def _find_last(facts: Facts) -> Iterator[Finding]:
    """Find a best result that begins with the last one, which the checkpoint has under its key."""
    for event in facts.in_training(*SETS):
        start, new = first_of(event), event.args[0]
        is_best = start.kind == "field" and _keeps_best(facts, event, start)
        for save in facts.restart_saves if is_best and start not in facts.list_deps(new) else ():
            has_last = any(entry.value is new and entry.name == str(start.key) for entry in save.entries)
            # a file that is written only if it is the best has the best result
            is_last = has_last and not _decides(facts, start, [save.event])
            is_loaded = all(is_file_of(save, load) for load in facts.restart_loads())
            if is_last and (is_loaded or is_renamed(facts, save)):
                where = name_line(save.event, event)
                message = f"{event.text} begins with the last result, which {where} saves as {start.key}"
                yield at(event, "R108", message, value=start, save=[save.event])
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
    tests = [test for write in writes for test in conditions_within(write) if is_branch(test)]
    return any(is_compared(facts, start, test.value) for test in tests)


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

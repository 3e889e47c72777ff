"""Rules about numbers that a loop carries from one pass to the next, that begin again at each start, and on
which the training depends: counters and learning rates."""

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from bootfile.lint import values
from bootfile.lint.carried import (
    OFFSET,
    SETS,
    Carried,
    conditions_within,
    is_compared,
    is_restored,
    list_carried,
)
from bootfile.lint.facts import Facts, of_a_restart
from bootfile.lint.record import Event
from bootfile.lint.rules_files import path_of
from bootfile.lint.sources import find_counted
from bootfile.lint.table import Finding, at
from bootfile.lint.values import Value

_SETS_RATE = re.compile(r"\[['\"]lr['\"]\]$")
_OBJECTS = ("state", "optimizer", "model", "scheduler")
_FILES = r"(^|\.)(savez?|savetxt|savemat|dumps?|DataFrame|to_csv|writerows?|scatter|plot(_\w+)?)$"
_LOGS = re.compile(r"add_scalars?$|(^|\.)log(_metrics)?$")
# how the training uses a number -> the words of the finding; the first that fits is reported
_WORDS = {
    "stop": "early stopping depends",
    "order": "the order of the samples depends",
    "rate": "the learning rate depends",
    "end": "the end of the training depends",
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
    """Yield the findings about counters and learning rates."""
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
    is_told = False
    for number in carried:
        of_number = [use for use in uses if number.start in facts.list_deps(use.given)]
        needed = [use for use in of_number if _matters(facts, number, use)]
        used = [use for use in needed if not _has_offset(facts, use, number)]
        if not used:
            continue
        first = min(used, key=lambda use: list(_WORDS).index(use.kind))
        is_figure = first.kind == "figures"
        if _may_come_back(facts, number, first) or (is_figure and (is_told or _has_values(facts, number))):
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
    early stopping and as the end of the training: _matters() chooses."""
    body = []
    if isinstance(event.node, ast.If):
        body = event.node.body + event.node.orelse
    if isinstance(event.node, ast.While) or any(map(_leaves, body)):
        yield Use("stop", event, event.value)
        yield Use("end", event, event.value)


def _leaves(part: ast.stmt) -> bool:
    """Return whether a statement ends a loop or the script."""
    call = part.value if isinstance(part, ast.Expr) else None
    is_exit = isinstance(call, ast.Call) and ast.unparse(call.func) in ("exit", "quit", "sys.exit")
    return is_exit or isinstance(part, ast.Break | ast.Return | ast.Raise)


def _matters(facts: Facts, number: Carried, use: Use) -> bool:
    """Return whether the training depends on a number by a use of this kind."""
    sets = [event for event in number.sets if find_counted(event.node) is None]
    sets = [event for event in sets if not values.is_restored(event.args[0]) or event.args[0].kind == "loop"]
    # early stopping sets its number back, or to the epoch of the best result, at some times only
    is_set_back = bool(sets) and all(conditions_within(event) for event in sets)
    is_number = number.is_counter or any(event.args[0].kind in values.NUMBERS for event in sets)
    if use.kind in ("stop", "end") and not is_compared(facts, number.start, use.given, number.is_counter):
        return False
    if use.kind == "stop":
        return is_set_back and is_number
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
    others: set[str] = set()
    for loop in facts.loops if use.kind == "order" else ():
        starts = [dep for dep in facts.list_deps(loop.start or Value()) if dep.kind == "field"]
        others.update(str(dep.key) for dep in starts if dep.key is not None)
    if is_restored(facts, number, others=others):
        return True
    # `while step >= milestones[index]: index += 1` catches up
    loops = [event for event in facts.in_training("test") if isinstance(event.node, ast.While)]
    inner = [event.node for event in loops if event.loops[0].node is not event.node]
    lines = [event.line for event in number.counts]
    is_caught_up = any(node.lineno <= line <= (node.end_lineno or 0) for node in inner for line in lines)
    return is_caught_up and use.kind == "rate"

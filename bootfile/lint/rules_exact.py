"""Rules about loops with bootfile.Exact, which saves what it gets by keywords and by run.add()."""

import dataclasses
import re
from collections.abc import Iterator

from bootfile.lint.checkpoints import list_inside
from bootfile.lint.facts import Facts
from bootfile.lint.record import Event
from bootfile.lint.rules_state import KINDS, describe_missing
from bootfile.lint.sources import unparse
from bootfile.lint.table import Finding
from bootfile.lint.values import Loop, Value, kind_of, list_deps, root

_FIX = "give it to Exact by a keyword, or to run.add() before run.resume(): both save and restore it"
# a schedule that reads the step from an object, as `lambda _: rate(loader.step)`
_OF_STEP = re.compile(r"\.(\w+_)?(step|epoch)s?\b")


def check(facts: Facts) -> Iterator[Finding]:
    """Yield the objects that a loop with Exact changes, and that Exact does not get."""
    runs = [event for event in facts.select("method") if event.value.key == "Exact"]
    saves: dict[Loop, Event] = {}
    for event in runs:
        if event.text == "save" and facts.is_in_training(event):
            saves.setdefault(event.loops[0], event)
    given = _list_given(runs)
    # without resume() nothing continues; a function that is not known may save the rest
    is_restart = bool(saves) and any(event.text == "resume" for event in runs) and not facts.saves_all
    if given is None or not is_restart:
        return
    for value, event in facts.changed.items():
        # the loop of another stage, such as a search for a learning rate, has no save
        save = saves.get(event.loops[0])
        is_unknown = facts.is_own_state(value) or "by_name" in value.flags
        if save is None or is_unknown or _is_given(facts, value, given) or _needs_none_in_exact(facts, value):
            continue
        missing = describe_missing(value, event, save)
        # the class of an average of the project may have its own means
        is_hint = missing.is_hint and value.kind != "copied" and value.key != "AveragedModel"
        yield dataclasses.replace(missing, is_hint=is_hint, fix=_FIX)


def _list_given(runs: list[Event]) -> list[Value] | None:
    """Return all objects that Exact gets; None if some are not known, as those of `**objects`."""
    made = {root(event.value) for event in runs}
    added = [event for event in runs if event.text == "add"]
    calls = [(run.node, run.options) for run in made] + [(event.node, event.args) for event in added]
    given: list[Value] = []
    for call, arguments in calls:
        if any(keyword.arg is None for keyword in call.keywords):
            return None
        given += arguments.values()
    return given


def _is_given(facts: Facts, value: Value, given: list[Value]) -> bool:
    """Return whether an object is one that Exact gets, or a part of one, or has its name and kind; or whether
    the script saves or loads it besides Exact."""
    kind = "ema" if value.kind == "copied" else value.kind
    if value in facts.loaded or value in facts.escaped:
        return True
    if facts.training_saves and facts.is_saved(value, kind):
        return True
    of_kind = [one for one in given if kind_of(one) == value.kind]
    # the schedules in a SequentialLR
    parts = [*given, *[option for one in of_kind for option in root(one).options.values()]]
    inside = {part for one in parts for part in (*list_inside(one), *map(root, list_deps(one)))}
    is_same = value.label != "" and any(root(one).label == value.label for one in of_kind)
    return is_same or bool(facts.list_saved_with(value) & inside)


def _needs_none_in_exact(facts: Facts, value: Value) -> bool:
    """Return whether an object is right after a restart without its state."""
    kind = KINDS["ema" if value.kind == "copied" else value.kind]
    functions = [option.cls for option in value.options.values() if option.kind in ("function", "method")]
    is_of_step = any(_OF_STEP.search(unparse(function.node)) for function in functions)
    return kind.needs_none(facts, value) or (value.kind == "scheduler" and is_of_step)

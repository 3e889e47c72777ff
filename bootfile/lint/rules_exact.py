"""Rules about loops with bootfile.Exact: does it get each object whose state the loop changes?

It saves and restores what it gets by keywords, and what run.add() gets.
"""

import re
from collections.abc import Iterator

from bootfile.lint.facts import Facts, describe, is_constant, list_inside
from bootfile.lint.findings import Finding, at, name_line
from bootfile.lint.record import Event
from bootfile.lint.rules_state import RULES, WORDS, find_changed, follows_epoch, has_no_state, is_inside
from bootfile.lint.syntax import unparse
from bootfile.lint.values import Loop, Value, kind_of, list_deps, root

_FIX = "give it to Exact by a keyword, or to run.add() before run.resume(): both save and restore it"
_VERBS = {"optimizer": "stepped", "scheduler": "stepped", "scaler": "used", "ema": "updated"}
# a schedule that reads the step from an object, as `lambda _: rate(loader.step)`
_OF_STEP = re.compile(r"\.(\w+_)?(step|epoch)s?\b")


def check(facts: Facts) -> Iterator[Finding]:
    """Yield the objects that a loop with Exact changes, and that Exact does not get."""
    runs = [event for event in facts.select("method") if event.value.key == "Exact"]
    saves = [event for event in runs if event.text == "save" and facts.is_in_training(event)]
    # without resume() nothing continues; a function that is not known may save the rest
    if not saves or not any(event.text == "resume" for event in runs) or facts.saves_all():
        return
    given = _list_given(runs)
    if given is None:
        return
    changed = find_changed(facts)
    for value, event in changed.items():
        kind = "ema" if value.kind == "copied" else value.kind
        save = _find_save(saves, event.loops[0])
        if save is None or facts.is_own_state(value) or "by_name" in value.flags:
            continue
        if _is_given(facts, value, given) or _is_kept_elsewhere(facts, value, kind):
            continue
        if _needs_no_state(facts, value, changed):
            continue
        name = describe(value, WORDS[kind])
        if WORDS[kind].lower() not in name.lower():
            name = f"{name} ({WORDS[kind]})"
        message = f"{name} is {_VERBS[kind]}, but not in the checkpoint that {name_line(save, event)} saves"
        # the class of an average may have its own means
        is_class = kind == "ema" and value.kind != "copied" and value.key != "AveragedModel"
        finding = at(event, RULES[kind], message, is_class or has_no_state(value))
        # a loop with Exact continues by itself when the same command starts it
        yield finding._replace(fix=_FIX, resume_with="")


def _list_given(runs: list[Event]) -> list[Value] | None:
    """Return all objects that Exact gets; None if some are not known, as those of `**objects`."""
    given: list[Value] = []
    calls = []
    for run in {root(event.value) for event in runs}:
        given += run.options.values()
        calls.append(run.node)
    for event in runs:
        if event.text == "add":
            given += event.args.values()
            calls.append(event.node)
    if any(keyword.arg is None for call in calls for keyword in call.keywords):
        return None
    return given


def _find_save(saves: list[Event], loop: Loop) -> Event | None:
    """Return the save in a loop; None in that of another stage, such as a search for a learning rate."""
    return next((save for save in saves if save.loops[0] is loop), None)


def _is_given(facts: Facts, value: Value, given: list[Value]) -> bool:
    """Return whether an object is one that Exact gets, or a part of one."""
    wanted = facts.list_saved_with(value)
    for one in given:
        inside = list_inside(one) | {root(part) for part in list_deps(one)}
        # the schedules in a SequentialLR
        if kind_of(one) == value.kind:
            for option in root(one).options.values():
                inside |= list_inside(option)
        if wanted & inside:
            return True
        # an object of the same name and kind, which another branch of the script makes
        is_same = kind_of(one) == value.kind and root(one).label == value.label
        if is_same and value.label:
            return True
    return False


def _is_kept_elsewhere(facts: Facts, value: Value, kind: str) -> bool:
    """Return whether the script saves or loads an object besides Exact."""
    if value in facts.loaded or value in facts.escaped:
        return True
    return bool(facts.training_saves()) and facts.is_saved(value, kind)


def _needs_no_state(facts: Facts, value: Value, changed: dict[Value, Event]) -> bool:
    """Return whether an object is right after a restart without its state."""
    if value.kind == "optimizer":
        return is_inside(value, changed)
    # GradScaler(enabled=False) keeps no scale
    if value.kind == "scaler":
        return is_constant(value.options.get("enabled"), False)
    if value.kind != "scheduler":
        return False
    for option in value.options.values():
        function = getattr(option.cls, "node", None) if option.kind in ("function", "method") else None
        if function is not None and _OF_STEP.search(unparse(function)):
            return True
    return follows_epoch(facts, value)

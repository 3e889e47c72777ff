"""Rules about whole scripts: those that cannot continue at all (they save nothing, or weights only, or load
nothing), and those with bootfile.Exact, which saves what it gets by keywords and by run.add()."""

import ast
import dataclasses
import os
import re
import shlex
from collections.abc import Iterator

from bootfile.lint.checkpoints import list_inside, list_saving
from bootfile.lint.epoch_loop import OtherForm, explain_loader, find_epoch_loop, find_range
from bootfile.lint.facts import Facts
from bootfile.lint.record import Event
from bootfile.lint.rules_state import KINDS, describe_missing, get_kind
from bootfile.lint.sources import unparse
from bootfile.lint.table import Finding, at
from bootfile.lint.values import Loop, Value, kind_of, list_deps, root

_SAVES_BY_ITSELF = r"\b(accelerate|lightning\w*|deepspeed|horovod)\b"
_TESTS = re.compile(r"(^|/)tests?/|(^|/)(test_[^/]*|conftest)\.py$|_test\.py$")
_UNVERIFIED = ', and prove ends at best with "unverified"'
_FIX = "give it to Exact by a keyword, or to run.add() before run.resume(): both save and restore it"
# a schedule that reads the step from an object, as `lambda _: rate(loader.step)`
_OF_STEP = re.compile(r"\.(\w+_)?(step|epoch)s?\b")
_FEW = 1000  # steps of a loop without epochs, such as one that changes an image


def check(facts: Facts) -> Iterator[Finding]:
    """Yield one hint about a script that trains and that no start continues, or the findings about Exact."""
    runs = [event for event in facts.select("method") if event.value.key == "Exact"]
    # a module leaves files to the script around it
    first = next(iter(facts.in_training("step", "backward")), None)
    is_script = first is not None and (facts.tracer.is_script or first.functions[:1] == ("main",))
    is_other = facts.intent or runs or facts.trainers() or facts.restores_all
    found = (_find_not_loaded(facts) or _find_not_saved(facts)) if is_script and not is_other else None
    if found is not None:
        yield dataclasses.replace(found, fix=_find_way(facts))
    yield from _find_not_given(facts, runs)


# R703


def _find_way(facts: Facts) -> str:
    """Return the command that makes the loop continue, or the page about it."""
    if facts.imports(_SAVES_BY_ITSELF):
        return "its own checkpoints (guides/trainers.md)"
    command = f"bootfile fix --exact {shlex.quote(os.path.relpath(facts.tracer.source.path))}"
    return command if _is_plain(facts) else "the seven lines of guides/own_loop.md"


def _is_plain(facts: Facts) -> bool:
    """Return whether the loop has the form that `fix --exact` changes. It may still name something else."""
    try:
        found = find_epoch_loop(facts)
    except OtherForm:
        return False
    return find_range(found.epochs.node) is not None and not [*explain_loader(facts, found.loader)]


def _find_not_loaded(facts: Facts) -> Finding | None:
    """Find a script that saves what a restart needs, but does not load it."""
    saves = [save for save in facts.training_saves if any(one.kind == "optimizer" for one in save.owners())]
    text = f"the checkpoint has the optimizer, but the script never loads it{_UNVERIFIED}"
    return at(saves[0].event, "R703", text, save=saves[0].event) if saves else None


def _find_not_saved(facts: Facts) -> Finding | None:
    """Find a script that saves weights only, or nothing."""
    optimizers = [value for value in facts.changed if value.kind == "optimizer"]
    weights, others = list_saving(facts)
    is_kept = any(facts.is_in_file(value, "optimizer") for value in optimizers)
    is_kept = is_kept or any(save.event.text == "save_state" for save in facts.saves)
    is_test = _TESTS.search(os.path.relpath(facts.tracer.source.path))
    if not optimizers or others or is_kept or is_test:
        return None
    events = sorted([*weights, *[save.event for save in facts.saves]], key=lambda event: event.order)
    # the last file of an epoch, or that after the training
    during = [event for event in events if facts.is_in_training(event)]
    steps = [event for event in facts.in_training("step") if kind_of(event.value) == "optimizer"]
    if not events:
        text = "nothing is saved: a kill loses the whole run, and prove has no file to compare"
        return None if all(map(_is_short, steps)) else at(facts.loops[0], "R703", text)
    when = ", after the last epoch: a kill loses the whole run"
    what = ": a restart begins with a new optimizer" if during else when
    text = f"only weights are saved{what}{'' if facts.loads else _UNVERIFIED}"
    event = (during or events)[-1]
    return None if all(_is_once(step.loops) for step in steps) else at(event, "R703", text, save=event)


def _is_short(step: Event) -> bool:
    """Return whether a loop is over few steps, as in a tutorial."""
    return _is_once(step.loops) or (len(step.loops) == 1 and (_count(step.loops[0]) or _FEW + 1) <= _FEW)


def _is_once(loops: tuple[Loop, ...]) -> bool:
    """Return whether there is one epoch: `for epoch in range(1)`, or a loop over a loader alone."""
    first = loops[0]
    is_counted = isinstance(first.node, ast.While) or kind_of(first.iterated or Value()) == "range"
    return _count(first) == 1 or (len(loops) == 1 and not is_counted)


def _count(loop: Loop) -> int | None:
    """Return how often a loop runs; None if that is not known."""
    iterated = root(loop.iterated or Value())
    end = iterated.parts.get("end", Value()) if iterated.kind == "range" else Value()
    return end.key if end.kind == "const" and isinstance(end.key, int) else None


# Objects that Exact does not get


def _find_not_given(facts: Facts, runs: list[Event]) -> Iterator[Finding]:
    """Yield the objects that a loop with Exact changes, and that Exact does not get."""
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
    if value in facts.loaded or value in facts.escaped:
        return True
    if facts.training_saves and facts.is_saved(value, get_kind(value)):
        return True
    of_kind = [one for one in given if kind_of(one) == value.kind]
    # the schedules in a SequentialLR
    parts = [*given, *[option for one in of_kind for option in root(one).options.values()]]
    inside = {part for one in parts for part in (*list_inside(one), *map(root, list_deps(one)))}
    is_same = value.label != "" and any(root(one).label == value.label for one in of_kind)
    return is_same or bool(facts.list_saved_with(value) & inside)


def _needs_none_in_exact(facts: Facts, value: Value) -> bool:
    """Return whether an object is right after a restart without its state."""
    kind = KINDS[get_kind(value)]
    functions = [option.cls for option in value.options.values() if option.kind in ("function", "method")]
    is_of_step = any(_OF_STEP.search(unparse(function.node)) for function in functions)
    return kind.needs_none(facts, value) or (value.kind == "scheduler" and is_of_step)

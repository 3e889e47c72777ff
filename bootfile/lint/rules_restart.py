"""The rule about scripts that cannot continue at all: they save nothing, or weights only, or load nothing."""

import ast
import dataclasses
import os
import re
import shlex
from collections.abc import Iterator

from bootfile.lint.checkpoints import list_saving
from bootfile.lint.epoch_loop import OtherForm, explain_loader, find_epoch_loop, find_range
from bootfile.lint.facts import Facts
from bootfile.lint.record import Event
from bootfile.lint.table import Finding, at
from bootfile.lint.values import Loop, Value, kind_of, root

_SAVES_BY_ITSELF = r"\b(accelerate|lightning\w*|deepspeed|horovod)\b"
_TESTS = re.compile(r"(^|/)tests?/|(^|/)(test_[^/]*|conftest)\.py$|_test\.py$")
_UNVERIFIED = ', and prove ends at best with "unverified"'
_FEW = 1000  # steps of a loop without epochs, such as one that changes an image


def check(facts: Facts) -> Iterator[Finding]:
    """Yield one hint about a script that trains, and that no start continues."""
    is_exact = any(event.value.key == "Exact" for event in facts.select("method"))
    if not facts.loops or facts.intent or is_exact or facts.trainers() or facts.restores_all:
        return
    if not _is_script(facts):
        return
    found = _find_not_loaded(facts) or _find_not_saved(facts)
    if found is not None:
        yield dataclasses.replace(found, fix=_find_way(facts))


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
    for save in facts.training_saves:
        if any(owner.kind == "optimizer" for owner in save.owners()):
            text = "the checkpoint has the optimizer, but the script never loads it"
            return at(save.event, "R703", f"{text}{_UNVERIFIED}", save=save.event)
    return None


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
    text = "only weights are saved: a restart begins with a new optimizer"
    if not during:
        text = "only weights are saved, after the last epoch: a kill loses the whole run"
    text += "" if facts.loads else _UNVERIFIED
    event = (during or events)[-1]
    return None if all(_is_once(step.loops) for step in steps) else at(event, "R703", text, save=event)


def _is_script(facts: Facts) -> bool:
    """Return whether the file trains if it is started: a module leaves files to the script around it."""
    first = facts.in_training("step", "backward")[0]
    return facts.tracer.is_script or first.functions[:1] == ("main",)


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
    iterated = root(loop.iterated) if loop.iterated is not None else None
    end = iterated.parts.get("end") if iterated is not None and iterated.kind == "range" else None
    return end.key if end is not None and end.kind == "const" and isinstance(end.key, int) else None

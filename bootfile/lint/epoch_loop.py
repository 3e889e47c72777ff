"""The loop over epochs with one over a DataLoader in it: the form that `fix --exact` and `--ddp` change."""

import ast
from collections.abc import Iterator
from typing import Any, NamedTuple

from bootfile.lint.facts import Facts
from bootfile.lint.record import Event
from bootfile.lint.sources import unparse
from bootfile.lint.values import Loop, Value, kind_of, list_deps, root


class OtherForm(Exception):
    """The training of a script has another form. Its text says what was expected."""


class EpochLoop(NamedTuple):
    """Both loops, the loader, and the steps of the optimizers."""

    epochs: Loop
    batches: Loop
    loader: Value
    steps: list[Event]


def find_epoch_loop(facts: Facts) -> EpochLoop:
    """Return the loops of a script. Raises OtherForm."""
    steps = [event for event in facts.in_training("step") if kind_of(event.value) == "optimizer"]
    outermost = {event.loops[0].node: event.loops[0].line for event in steps}
    if len(outermost) != 1:
        lines = f", those in lines {', '.join(map(str, outermost.values()))}" if outermost else ""
        raise OtherForm(f"expected one loop that trains, found {len(outermost)}{lines}")
    loops = steps[0].loops
    loader = _find_loader(loops[1]) if len(loops) > 1 else None
    is_apart = any(event.loops[:2] != loops[:2] for event in steps)
    if loader is None or is_apart or not isinstance(loops[0].node, ast.For):
        form = "a `for` over epochs with one over a DataLoader in it"
        raise OtherForm(f"line {loops[0].line}: expected {form}")
    others = {loop.path for loop in loops[:2]} - {facts.tracer.source.path}
    if others:
        raise OtherForm(f"the loop is in another file, which is not edited: {', '.join(others)}")
    return EpochLoop(loops[0], loops[1], loader, steps)


def explain_loader(facts: Facts, loader: Value) -> Iterator[str]:
    """Yield why a loader is not a DataLoader of torch, or has no order that is known."""
    made = [event.text for event in facts.select("create") if event.value is loader]
    if not made or not made[0].startswith("torch.utils.data."):
        yield "expected batches of a DataLoader of torch"
    dataset = root(loader.parts.get("dataset", Value()))
    bases = getattr(getattr(dataset.cls, "node", None), "bases", [])
    if any("IterableDataset" in unparse(base) for base in bases):
        yield "an IterableDataset has no order that can be divided or repeated"


def find_range(epochs: Any) -> Any:
    """Return the call of `for epoch in range(N)`; None for another loop over epochs."""
    call = find_call(epochs.iter, "range", "trange")
    return call if call and len(call.args) < 3 and isinstance(epochs.target, ast.Name) else None


def find_call(node: Any, *names: str) -> Any:
    """Return the call of a function by its last name in an expression such as tqdm(range(3)), or None."""
    calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
    return next((part for part in calls if unparse(part.func).rpartition(".")[2] in names), None)


def _find_loader(loop: Loop) -> Value | None:
    """Return the loader whose batches a `for` reads; None for another loop."""
    values = list_deps(loop.iterated) if loop.iterated and isinstance(loop.node, ast.For) else ()
    loaders = {root(value) for value in values if kind_of(value) == "loader"}
    return loaders.pop() if len(loaders) == 1 else None

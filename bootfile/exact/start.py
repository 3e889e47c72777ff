"""Restore the state that a run continues from: what all ranks do before the first step of a start."""

import math
from typing import TYPE_CHECKING, Any

import torch

from bootfile.exact import code, recorded
from bootfile.exact.choose import choose
from bootfile.exact.state import SavedState
from bootfile.ground.errors import BadInput
from bootfile.ground.results import refuse_links
from bootfile.machine import facts
from bootfile.processes import ranks

if TYPE_CHECKING:
    from bootfile.exact.loop import Exact


_OF_ITEMS = ("digest", "batch of collate_fn")  # parts of Loader.compared_data


def restore(run: "Exact") -> int:
    """Restore the state to continue from, on every rank, and return its step; 0 for a new run.

    Rank 0 reads the checkpoint; the others wait for it. Raises BadInput on every rank.
    """
    state = None
    error = None
    if ranks.is_first():
        try:
            state = _choose(run)
        except BadInput as refused:
            error = refused  # the other ranks wait below: each has to learn of it
    # the other ranks wait here until rank 0 has read and checked a checkpoint
    run.events.wait_for_first(error)
    state = run.state.broadcast(state)
    if state and "shards" in state:
        # each rank has read its parts: their digest needs all ranks
        reason = recorded.check_sharded(state["shards"], state, ranks.is_first())
        reason = ranks.broadcast_object(reason)
        if reason:
            raise BadInput(f"{state['shards']}: {reason}")
    # rank 0 has loaded a state that is not sharded while it chose the checkpoint
    if state and (run.state.is_sharded or not ranks.is_first()):
        run.state.restore(state)
    step = 0
    history: list[dict[str, Any]] = []
    if state:
        step = state["step"]
        if state.get("epoch_ended"):
            run.loader.leaves_out_ended = True  # type: ignore[attr-defined]  # our Loader has it
        history = state.get("machines", [])
        _restore_attributes(run, state.get("attributes", {}))
    run.machines.settle(step, history, run.has_shards)
    return step


def _restore_attributes(run: "Exact", values: dict[str, Any]) -> None:
    """Set the attributes of the data set that the loop had changed, and say it."""
    if not values or run.state.attributes is None:
        return
    run.state.attributes.restore(values)
    shown = ", ".join(f"{name} = {value!r:.40}" for name, value in values.items())
    run.say(f"restored what the loop changes in its data set: {shown}")


def compare_data(run: "Exact") -> None:
    """Raise BadInput on every rank if a rank has other data, labels or settings of the sampler than rank 0.
    Call it on every rank before the first step."""
    if ranks.world_size() == 1:
        return
    mine: dict[str, Any] = getattr(run.loader, "compared_data", {})
    level = facts.aten_instructions()
    every = ranks.gather_objects((mine, level))
    first, level_of_first = every[0]
    for rank, (other, level_of_rank) in enumerate(every):
        if not first or not other:
            continue
        for name, here in first.items():
            there = other.get(name, "missing")
            # a rank that has noticed items which are not stable does not have them in its digest
            if here == there or (name in _OF_ITEMS and there == "missing"):
                continue
            text = f"rank {rank} has other training data than rank 0: its {name} is {there}, not {here}"
            if name == "digest" and level_of_rank != level_of_first:
                run.say_once(
                    f"warning: {text}. Their CPUs have other instructions, and items that a program computes "
                    "may have other bits. If the data are others, stop it now"
                )
                continue
            raise BadInput(
                f"{text}. Class numbers from the order of a set, and files in the order of a listing, differ "
                "from process to process: sort them"
            )


def warn_of_generators(run: "Exact") -> None:
    """Print one warning that names generators which neither a checkpoint nor the loader knows."""
    parts = {"model": run.model, "criterion": run.criterion, "collate_fn": run.loader.collate_fn}
    paths = run.loader.find_unknown_generators(parts, run.state.objects)
    if paths:
        run.say(
            f"warning: {', '.join(paths)}: random number generators of your own, whose numbers a restart "
            "does not repeat. Use torch's global one, or call checkpoint.add(name=generator) before "
            "resume(). One of a collate_fn repeats its numbers, but only at the same number of processes"
        )


def warn_of_schedule(run: "Exact") -> None:
    """Print a warning if a schedule has begun on an optimizer, and the checkpoint holds none."""
    optimizers = []
    for name, value in run.state.objects.items():
        if isinstance(value, torch.optim.Optimizer):
            optimizers.append(value)
        elif value and (name == "scheduler" or hasattr(value, "optimizer")):
            return
    # a schedule of torch writes it when it is made
    if any("initial_lr" in group for optimizer in optimizers for group in optimizer.param_groups):
        run.say(
            "warning: a schedule of the learning rate has begun, and no checkpoint holds it: after a restart "
            "it begins again. Give it to Exact(..., scheduler=scheduler)"
        )


def warn_of_empty_states(run: "Exact") -> None:
    """Print a warning that names added objects of which a checkpoint holds nothing, such as a metric whose
    states are not persistent."""
    for name, value in run.state.objects.items():
        if name in ("model", "optimizer", "scheduler", "receipt") or "Scaler" in type(value).__name__:
            continue  # a scaler that is disabled has none
        has_weights = isinstance(value, torch.nn.Module) and any(True for _ in value.parameters())
        has_attributes = bool(getattr(value, "__dict__", None))
        if has_attributes and not has_weights and not value.state_dict():
            run.say(f"warning: the state_dict() of {name} is empty: a restart begins with a new one")


def _choose(run: "Exact") -> SavedState | None:
    """Return the state to continue from on rank 0, or None. The state is loaded, unless it is sharded.
    Raises BadInput."""
    # before anything is read: two runs in one folder would write each other's checkpoints
    if run.lock:
        run.lock.hold()
    # before the training, not at the first save: an object may have a type that no checkpoint can hold
    if run.writes:
        run.state.check_saveable()
        refuse_links(run.saver.folder)
    wanted = run.events.choose_checkpoint()
    if wanted == "never":
        return None

    # called for the newest checkpoint, and for older ones as long as one is refused
    def load(state: SavedState) -> None:
        is_other = run.machines.compare_starts(state)
        run.state.is_other_machine = is_other
        run.loader.receipt.expects_same = not is_other
        run.state.load(state, run.most_steps)

    is_whole = not run.state.is_sharded  # otherwise each rank reads its part
    # raises BadInput if there are checkpoints and none can be used: a new run would overwrite them
    path, state = choose(wanted, run.saver.checkpoints, load, is_whole)
    if state is None:
        _say_what_was_lost(run)
        return None
    # a run that continues its own checkpoint keeps its name; one that begins at a given path has a new one
    if wanted == "auto":
        run.state.run = state["run"]
    end = ""
    if run.total_steps:
        end = f" of {run.total_steps}"
    epoch = max(1, math.ceil(state["step"] / len(run.loader)))
    run.say(f"resumed from {path}: epoch {epoch}, step {state['step']}{end}")
    change = run.state.schedule.change
    if change:
        run.say(f"the schedule of the checkpoint is another one: {change}")
    changes = code.describe_changes(state.get("code", {}), run.state.code)
    if changes:
        run.say(f"warning: {changes} since the start before: the results may differ from here on")
    for note in run.state.take_notes():
        run.say(note)
    return state


def _say_what_was_lost(run: "Exact") -> None:
    """Say that the start before this one was killed before its first save, if it was. Called on rank 0
    before the first step: the receipt has the steps of that start still."""
    step = 0
    if run.writes:
        step = run.loader.receipt.find_last_step(run.saver.folder)
    was_killed = run.lock is not None and run.lock.was_left
    if step or was_killed:
        after = ""
        if step:
            after = f" after step {step}"
        run.say(
            f"warning: the start before this one ended{after} without a save: this one begins again at "
            "step 1. A save every 5 minutes: --save_every 300s, in a loop of your own "
            "save_every=Interval(300, 's')"
        )

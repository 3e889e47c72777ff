"""Restore the state that a run continues from: what all ranks do before the first step of a start."""

import math
from typing import Any

import torch

from bootfile.exact import code, recorded
from bootfile.exact.choose import choose
from bootfile.exact.plugins import Parts
from bootfile.exact.state import SavedState
from bootfile.ground.errors import BadInput
from bootfile.ground.results import refuse_links
from bootfile.machine import facts
from bootfile.processes import ranks

_OF_ITEMS = ("digest", "batch of collate_fn")  # parts of Loader.compared_data


def restore(parts: Parts) -> int:
    """Restore the state to continue from, on every rank, and return its step; 0 for a new run.

    Rank 0 chooses and reads the checkpoint; the others wait for it. Raises BadInput on every rank.
    """
    state = None
    error = None
    if ranks.is_first():
        try:
            state = _choose(parts)
        except BadInput as refused:
            error = refused  # raised below, on every rank
    # the other ranks wait here until rank 0 has read and checked a checkpoint
    parts.events.wait_for_first(error)
    state = parts.state.broadcast(state)
    step = 0
    machines: list[dict[str, Any]] = []
    if state:
        if "shards" in state:
            # each rank has read its parts: their digest needs all ranks
            reason = recorded.check_sharded(state["shards"], state, ranks.is_first())
            reason = ranks.broadcast_object(reason)
            if reason:
                raise BadInput(f"{state['shards']}: {reason}")
        # _choose() has restored a state that is not sharded on rank 0
        if parts.state.is_sharded or not ranks.is_first():
            parts.state.restore(state)
        step = state["step"]
        machines = state["machines"]
        if state["epoch_ended"]:
            parts.loader.leaves_out_ended = True  # type: ignore[attr-defined]  # our Loader has it
        _restore_attributes(parts, state["attributes"])
    parts.machines.settle(step, machines, parts.shards is not None)
    return step


def _restore_attributes(parts: Parts, values: dict[str, Any]) -> None:
    """Set the attributes of the data set that the loop had changed, and print them."""
    if not values or parts.state.attributes is None:
        return
    parts.state.attributes.restore(values)
    shown = ", ".join(f"{name} = {value!r:.40}" for name, value in values.items())
    parts.say(f"restored what the loop changes in its data set: {shown}")


def compare_data(parts: Parts) -> None:
    """Raise BadInput on every rank if a rank has other data, labels or settings of the sampler than rank 0.
    Call it on every rank before the first step."""
    if ranks.world_size() == 1:
        return
    data: dict[str, Any] = getattr(parts.loader, "compared_data", {})
    all_ranks = ranks.gather_objects((data, facts.aten_instructions()))
    data_of_first, instructions_of_first = all_ranks[0]
    for rank, (data_of_rank, instructions_of_rank) in enumerate(all_ranks):
        if not data_of_first or not data_of_rank:
            continue
        for name, expected in data_of_first.items():
            value = data_of_rank.get(name, "missing")
            # a rank that has noticed items which are not stable does not have them in its digest
            if value == expected or (name in _OF_ITEMS and value == "missing"):
                continue
            text = f"rank {rank} has other training data than rank 0: its {name} is {value}, not {expected}"
            if name == "digest" and instructions_of_rank != instructions_of_first:
                parts.say_once(
                    f"warning: {text}. Their CPUs have other instructions, and items that a program computes "
                    "may have other bits. If the data are others, stop it now"
                )
                continue
            raise BadInput(
                f"{text}. Class numbers from the order of a set, and files in the order of a listing, differ "
                "from process to process: sort them"
            )


def warn_of_generators(parts: Parts) -> None:
    """Print one warning that names generators which neither a checkpoint nor the loader knows."""
    places = {"model": parts.model, "criterion": parts.criterion, "collate_fn": parts.loader.collate_fn}
    paths = parts.loader.find_unknown_generators(places, parts.state.objects)
    if paths:
        parts.say(
            f"warning: {', '.join(paths)}: random number generators of your own, whose numbers a restart "
            "does not repeat. Use torch's global one, or call checkpoint.add(name=generator) before "
            "resume(). One of a collate_fn repeats its numbers, but only at the same number of processes"
        )


def warn_of_schedule(parts: Parts) -> None:
    """Print a warning if a schedule has begun on an optimizer, and the checkpoint holds none."""
    optimizers = []
    for name, value in parts.state.objects.items():
        if isinstance(value, torch.optim.Optimizer):
            optimizers.append(value)
        elif value is not None and (name == "scheduler" or hasattr(value, "optimizer")):
            return
    # a schedule of torch writes it when it is made
    if any("initial_lr" in group for optimizer in optimizers for group in optimizer.param_groups):
        parts.say(
            "warning: a schedule of the learning rate has begun, and no checkpoint holds it: after a restart "
            "it begins again. Give it to Exact(..., scheduler=scheduler)"
        )


def warn_of_empty_states(parts: Parts) -> None:
    """Print a warning that names added objects of which a checkpoint holds nothing, such as a metric whose
    states are not persistent."""
    for name, value in parts.state.objects.items():
        if name in ("model", "optimizer", "scheduler", "receipt") or "Scaler" in type(value).__name__:
            continue  # a scaler that is disabled has none
        has_weights = isinstance(value, torch.nn.Module) and any(True for _ in value.parameters())
        has_attributes = bool(getattr(value, "__dict__", None))
        if has_attributes and not has_weights and not value.state_dict():
            parts.say(f"warning: the state_dict() of {name} is empty: a restart begins with a new one")


def _choose(parts: Parts) -> SavedState | None:
    """Return the state to continue from on rank 0, or None. The state is loaded, unless it is sharded.
    Raises BadInput."""
    # before anything is read: two runs in one folder would write each other's checkpoints
    if parts.lock:
        parts.lock.hold()
    # before the training, not at the first save: an object may have a type that no checkpoint can hold
    if parts.writes:
        parts.state.check_saveable()
        refuse_links(parts.saver.folder)
    wanted = parts.events.choose_checkpoint()
    if wanted == "never":
        return None

    # called for the newest checkpoint, and for older ones as long as one is refused
    def load(state: SavedState) -> None:
        parts.state.check_format(state)
        is_other = parts.machines.compare_starts(state)
        parts.state.is_other_machine = is_other
        parts.loader.receipt.expects_same = not is_other
        parts.state.load(state, parts.most_steps)

    is_whole = not parts.state.is_sharded  # otherwise each rank reads its part
    # raises BadInput if there are checkpoints and none can be used: a new run would overwrite them
    path, state = choose(wanted, parts.saver.checkpoints, load, is_whole)
    if state is None:
        _say_what_was_lost(parts)
        return None
    # a run that continues its own checkpoint keeps its name; one that begins at a given path has a new one
    if wanted == "auto":
        parts.state.run = state["run"]
    end = f" of {parts.loader.total_steps}" if parts.loader.total_steps else ""
    epoch = max(1, math.ceil(state["step"] / len(parts.loader)))
    parts.say(f"resumed from {path}: epoch {epoch}, step {state['step']}{end}")
    change = parts.state.schedule.change
    if change:
        parts.say(f"the schedule of the checkpoint is another one: {change}")
    changes = code.describe_changes(state["code"], parts.state.code)
    if changes:
        parts.say(f"warning: {changes} since the start before: the results may differ from here on")
    for note in parts.state.take_notes():
        parts.say(note)
    return state


def _say_what_was_lost(parts: Parts) -> None:
    """Print a warning if the start before this one has ended without a save. Called on rank 0 before the
    first step, while the receipt still has the steps of that start."""
    step = parts.loader.receipt.find_last_step(parts.saver.folder) if parts.writes else 0
    was_killed = parts.lock is not None and parts.lock.was_left
    if step or was_killed:
        after = f" after step {step}" if step else ""
        parts.say(
            f"warning: the start before this one ended{after} without a save: this one begins again at "
            "step 1. A save every 5 minutes: --save_every 300s, in a loop of your own "
            "save_every=Interval(300, 's')"
        )

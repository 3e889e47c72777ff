"""What all ranks do before the first step of a start: choose a checkpoint, restore it, and look for what no
checkpoint holds."""

from typing import Any

import torch
from torch.nn.parameter import is_lazy

from bootfile.exact import digest, dtensors, files
from bootfile.exact.background import size_of
from bootfile.exact.optimizer_steps import parameters_of
from bootfile.exact.plugins import Parts, Processes
from bootfile.exact.saver import find_infinite
from bootfile.exact.schedules import beginning
from bootfile.exact.state import RunState, SavedState
from bootfile.ground.errors import BadInput
from bootfile.ground.results import refuse_links
from bootfile.machine import facts
from bootfile.processes import ranks

_OF_ITEMS = ("digest", "batch of collate_fn")  # parts of Loader.compared_data


def restore(parts: Parts) -> int:
    """Restore the state to continue from, on every rank, and return its step; 0 for a new run. Rank 0 chooses
    and reads the checkpoint; the others wait for it. Raises BadInput on every rank."""
    _compare_data(parts)
    state = None
    error = None
    if ranks.is_first():
        try:
            state = _choose(parts)
        except BadInput as refused:
            error = refused  # raised below, on every rank
    # the other ranks wait here until rank 0 has read and checked a checkpoint
    parts.events.wait_for_first(error)
    step = 0
    machines: list[dict[str, Any]] = []
    if ranks.broadcast_object(state is not None):
        from bootfile.exact import choose  # a new run has no checkpoint

        state = choose.restore_on_all(parts, state)
        step = state["step"]
        machines = state["machines"]
    parts.machines.settle(step, machines, parts.shards is not None)
    parts.keep_machines(parts.machines.history)
    return step


def prepare(parts: Parts, processes: Processes, step: int, is_saved_here: bool) -> None:
    """Prepare the saver, the loader and the model for the first step, on every rank, when the weights are
    loaded. step, is_saved_here: as for Exact.begin()."""
    saver = parts.saver
    objects = parts.state.objects
    writes_here = parts.writes and ranks.is_first()
    if writes_here:
        saver.resume_at(step if is_saved_here else 0, parts.may_change)
    if parts.shards:  # they have no buckets
        parts.shards.watch(objects | {"criterion": parts.criterion}, parts.loader, processes)
    elif ranks.world_size() > 2 and isinstance(parts.forward, torch.nn.parallel.DistributedDataParallel):
        from bootfile.exact.buckets import settle_buckets

        settle_buckets(parts.forward, parts.loader.example(2))  # otherwise a restart rounds differently
    # a mask of an attention is infinite from the start: a save refuses only what became so in training
    saver.infinite = find_infinite(parts.model.state_dict())
    if saver.keep_every and writes_here:
        from bootfile.exact import ladder  # most runs keep only the newest ones

        size = size_of(parts.state.capture(0))
        parts.say(ladder.describe(saver, parts.loader.total_steps, size, objects.values()))
    # from here on this loader seeds the process at each batch; that of an evaluation does not
    parts.loader.lead(step, parts.evaluate_every)
    if parts.state.attributes:
        parts.state.attributes.end_epoch()  # what the program has set before the training is its own
    parts.position.first = parts.reports.first = step + 1
    parts.position.ended = parts.position.saved = step
    if not processes.has_restored:  # otherwise these processes have warned before
        _warn_of_generators(parts)
        _warn_of_schedule(parts)
        if ranks.is_first():  # an object may have a state there only
            _warn_of_empty_states(parts)


def _compare_data(parts: Parts) -> None:
    """Raise BadInput on every rank if a rank has other data, labels or sampling than rank 0."""
    data: dict[str, Any] = getattr(parts.loader, "compared_data", {})
    all_ranks = ranks.gather_objects((data, facts.aten_instructions()))
    data_of_first, instructions_of_first = all_ranks[0]
    for rank, (data_of_rank, instructions_of_rank) in enumerate(all_ranks):
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


def _warn_of_generators(parts: Parts) -> None:
    """Print one warning that names generators which neither a checkpoint nor the loader knows."""
    places = {"model": parts.model, "criterion": parts.criterion, "collate_fn": parts.loader.collate_fn}
    if paths := parts.loader.find_unknown_generators(places, parts.state.objects):
        parts.say(
            f"warning: {', '.join(paths)}: random number generators of your own, whose numbers a restart "
            "does not repeat. Use torch's global one, or call checkpoint.add(name=generator) before "
            "resume(). One of a collate_fn repeats its numbers, but only at the same number of processes"
        )


def _warn_of_schedule(parts: Parts) -> None:
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


def _warn_of_empty_states(parts: Parts) -> None:
    """Name added objects of which a checkpoint holds nothing, such as a metric that is not persistent."""
    for name, value in parts.state.objects.items():
        if name in ("model", "optimizer", "scheduler", "receipt") or "Scaler" in type(value).__name__:
            continue  # a scaler that is disabled has none
        has_weights = isinstance(value, torch.nn.Module) and any(True for _ in value.parameters())
        has_attributes = bool(getattr(value, "__dict__", None))
        if has_attributes and not has_weights and not value.state_dict():
            parts.say(f"warning: the state_dict() of {name} is empty: a restart begins with a new one")


def _choose(parts: Parts) -> SavedState | None:
    """Return the state to continue from on rank 0, loaded unless it is sharded; or None. Raises BadInput."""
    # before anything is read: two runs in one folder would write each other's checkpoints
    if parts.lock:
        parts.lock.hold()
    # before the training, not at the first save: an object may have a type that no checkpoint can hold
    if parts.writes:
        check_saveable(parts.state)
        refuse_links(parts.saver.folder)
    wanted = parts.events.choose_checkpoint()
    if wanted == "never":
        return None

    # only the loop's own folder may be without a checkpoint; a path that is given has one, or is an error
    if wanted == "auto" and not files.list_newest_first(parts.saver.checkpoints):
        _say_what_was_lost(parts)
        return None
    from bootfile.exact.choose import choose_state  # a new run has no checkpoint

    return choose_state(parts, wanted)


def _say_what_was_lost(parts: Parts) -> None:
    """Warn, before the first step, if the start before this one has ended without a save."""
    step = parts.loader.receipt.find_last_step(parts.saver.folder) if parts.writes else 0
    was_killed = parts.lock is not None and parts.lock.was_left
    if step or was_killed:
        after = f" after step {step}" if step else ""
        parts.say(
            f"warning: the start before this one ended{after} without a save: this one begins again at "
            "step 1. A save every 5 minutes: --save_every 300s, in a loop of your own "
            "save_every=Interval(300, 's')"
        )


def check_saveable(state: RunState) -> None:
    """Raise BadInput if a checkpoint cannot hold the present state. Tensors are not copied. Called before a
    checkpoint is read: it also records how this program begins its further schedules."""
    try:
        # ScheduleState records how "scheduler" begins
        state.began |= {
            name: beginning(value) for name, value in state.objects.items() if name != "scheduler"
        }
        captured = state.capture(0)
        objects = captured["objects"]
        files.check_readable(captured)
    except Exception as error:  # the objects may be the user's own
        raise BadInput(f"a checkpoint cannot be saved: {error}") from error
    held = _addresses_of({name: objects[name] for name in objects.keys() - state.optimizers.keys()})
    # a rank without elements of a sharded parameter has no address to compare
    lost = 0
    for optimizer in state.optimizers.values():
        for parameter in map(dtensors.local, parameters_of(optimizer)):
            lost += parameter.numel() > 0 and parameter.data_ptr() not in held
    if lost:
        raise BadInput(
            f"the optimizer trains {lost} tensors that no checkpoint holds: put them into the model, or "
            "add their module before resume(): checkpoint.add(name=module)"
        )


def _addresses_of(objects: dict[str, Any]) -> set[int]:
    """Return the addresses of the tensors that a checkpoint holds. objects: those of a checkpoint, without
    optimizers. Raises BadInput for a tensor that no checkpoint can hold."""
    addresses = set()
    for name, leaf in digest.leaves(objects):
        if not isinstance(leaf, torch.Tensor):
            continue
        if is_lazy(leaf):  # it gets its values in the first forward pass, and a checkpoint comes before
            raise BadInput(
                f"{name} has no shape yet: call the model once with a batch, before the optimizer is made "
                "and at each start, under torch.no_grad()"
            )
        if leaf.layout != torch.strided:
            raise BadInput(
                f"{name} is a sparse tensor, which no checkpoint can hold: register the buffer with "
                "persistent=False, and make it again at each start"
            )
        addresses.add(dtensors.local(leaf).data_ptr())
    return addresses

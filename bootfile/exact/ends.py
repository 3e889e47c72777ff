"""How a run ends: after its last step, on a signal, or while it waits for data that never come."""

import functools
import os

import torch

from bootfile.exact.plugins import Parts
from bootfile.exact.saver import NotSaved
from bootfile.ground import errors
from bootfile.ground.folder_lock import FolderLock
from bootfile.ground.numbers import count_in
from bootfile.processes import ranks, signals, waits


def lock_of(folder: str) -> FolderLock:
    """Return the lock of the folder of a loop of one's own. Two runs would write each other's checkpoints."""
    advice = "give each run a folder of its own"
    if ranks.world_size() == 1 and (count_in(os.environ, "WORLD_SIZE") or 1) > 1:
        said = " ".join(f"{name}={os.environ.get(name)}" for name in ("RANK", "WORLD_SIZE"))
        advice = (
            f"{said}: a launcher started several processes that do not know each other: call "
            "torch.distributed.init_process_group() before Exact(...)"
        )
    return FolderLock(folder, f"{folder} belongs to another run that is running: {advice}")


def watch(parts: Parts, grace: float, store: "torch.distributed.Store | None") -> None:
    """Let a signal stop the loop at its next step, on every rank; otherwise it ends the process at once."""
    signals.watch(grace, store)
    if ranks.world_size() > 1 or parts.may_change:
        return  # several processes have to agree on a step
    save_while_waiting = functools.partial(_save_while_waiting, parts)
    save_before_end = functools.partial(_save_before_end, parts)
    waits.serve_when_stopped(save_while_waiting, save_before_end, only_evaluates=parts.lock is None)


def _is_between_steps(parts: Parts) -> bool:
    return parts.loader.is_whole and parts.position.ended == parts.loader.step


def _save_while_waiting(parts: Parts) -> None:
    """Save and exit, in the loop's thread while it waits for data, after the process was asked to stop."""
    if not _is_between_steps(parts):
        return
    parts.position.is_stopping = True
    began = parts.position.first - 1
    # no step of this start has ended: the checkpoint that it began with is the newest state
    if parts.loader.step == began:
        leave(parts, began)
    parts.save()  # it returns if gradients wait for an optimizer step


def _save_before_end(parts: Parts) -> None:
    """Save the last step, because the data of the next one cannot be read: an error ends the loop."""
    step = parts.loader.step
    if not _is_between_steps(parts) or parts.position.saved == step:
        return
    parts.save()  # it returns if gradients wait for an optimizer step
    parts.saver.collect(wait=True)
    if parts.saver.durable == step:
        parts.say(f"saved at step {step}: the data of the next one cannot be read")


def save_last(parts: Parts) -> None:
    """Save the last step of a loop that ends, or say why it cannot be saved."""
    position = parts.position
    step = parts.loader.step
    if position.saved == step or position.waits:
        return
    reason = ""
    if position.ended != step:
        reason = f"the loop has called end_step() {position.ended} times"
    elif parts.is_between_epochs and step != parts.loader.total_steps:
        reason = "the code after its epoch may have changed the state"
    if reason:
        parts.say(f"step {step} is not saved: {reason}. A restart continues from step {position.saved}")
        return
    position.save_is_late = True
    parts.save()


def leave(parts: Parts, step: int) -> None:
    """Exit after rank 0 has saved: when one process exits, its parent ends the others."""
    for rank, (number, reason) in enumerate(ranks.gather_objects(signals.received())):
        if number:  # for the log and the exit code; the store may not have it yet
            signals.hear(rank, number, reason)
    if ranks.is_first():
        parts.saver.collect(wait=True)
    # every rank has to leave with the same code, and only rank 0 knows about the writes
    if hopeless := ranks.broadcast_object(parts.saver.hopeless):
        raise NotSaved(hopeless)
    is_planned = parts.position.stops_planned and not signals.asked()
    if not is_planned:
        parts.events.stopping(step, parts.saver.durable)
    # a launcher ends the other ranks as soon as one has ended: none may leave before all have come so far
    if ranks.world_size() > 1:
        torch.distributed.barrier()
    code = 0 if is_planned else signals.exit_code()
    parts.close(SystemExit(code))
    parts.events.leaving()
    if parts.lock:
        parts.lock.release()
    signals.end_daemons()
    errors.leave(code)

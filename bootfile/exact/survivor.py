"""Save the last finished step when another rank is lost, without a collective.

From the end of a step to the next optimizer step only buffers change, such as BatchNorm's statistics. So rank
0, whose backward pass or vote fails because another rank has died, has the whole state after the last step,
once the buffers are restored. Only the receipt lacks samples: those of the other ranks since its last record.
The next start reads them again, and adds them (Loader.lead()).

If rank 0 itself is lost, another rank can save (usual(survivors="any")). The buffers are then those of rank
0, which sends them at the end of each step. The ranks that are left do not ask each other who saves: the one
that first locks a file in the folder does.

A model in parts has no such state, and with NCCL the host does not learn of the loss. Objects that are
neither modules nor optimizers may change at any time.
"""

import contextlib
import fcntl
import functools
import os
import time
from typing import Any, NamedTuple

import torch

from bootfile.exact import checked_files as checked_files  # a rank that writes alone verifies older files
from bootfile.exact import files
from bootfile.exact.due import Due
from bootfile.exact.marks import Marks
from bootfile.exact.nonfinite import copy_all
from bootfile.exact.plugins import Parts, Plugin
from bootfile.exact.replicas import is_whole
from bootfile.ground.errors import print_line
from bootfile.ground.files import PARTIAL, lock, write_atomic
from bootfile.processes import ranks, stuck

_NOT_WHOLE = "gradients wait for an optimizer step, or a checkpoint cannot hold the step"
_NOT_SENT = "rank 0 was lost before it had sent its buffers"
ANY = "any"  # ranks other than rank 0 may save, too
_BUCKET = 250 * 2**20  # bytes

_EVERY = 30.0  # seconds between two records of the receipt: a restart reads at most these steps again
# names of objects that do not change until the next optimizer step, or are kept
_KEPT = ("receipt", "scaler", "scheduler")


class _Finished(NamedTuple):
    """What the state after a step has, and a later step may change before its optimizer step."""

    step: int
    marks: tuple[Any, ...]  # marks of all tensors that must not change
    schedule: dict[str, Any]  # RunState.schedule
    counts: dict[str, Any]  # RunState.counts
    groups: dict[str, list[dict[str, Any]]]  # optimizer -> its hyperparameters


def can_survive(parts: Parts) -> bool:
    """Return whether a run of several ranks can save without those that are lost; the same on every rank."""
    if not parts.writes or parts.may_change or parts.state.is_sharded or not ranks.uses_gloo():
        return False
    others = {name: value for name, value in parts.state.objects.items() if name not in _KEPT}
    are_known = all(isinstance(each, torch.nn.Module | torch.optim.Optimizer) for each in others.values())
    return are_known and getattr(parts.loader, "reads_again", False)


class Survivor(Plugin):
    """The last finished step of a run, as rank 0, or each rank, can save it.

    which: survivors of usual(). With ANY the ranks find out in begin() whether they see the folder of rank 0.
    `can_save`: whether this run can save without the ranks that are lost; the same on every rank.
    """

    def __init__(self, which: str):
        self._which = which
        self.can_save = False
        self._shares = which == ANY  # rank 0 sends its buffers at the end of each step
        self._claimed_file = -1  # the descriptor of the file that a rank locks to save in place of rank 0
        self._buffers: list[torch.Tensor] = []  # buffers of the model
        self._copies: list[torch.Tensor] = []  # values of the buffers after the last finished step
        self._tensors: list[torch.Tensor] = []  # the other tensors of modules that a checkpoint holds
        self._marks = Marks([])  # marks of self._tensors
        self._has_marks = True  # changes of all tensors can be noticed
        self._finished: _Finished | None = None
        self._lacks = _NOT_WHOLE  # why self._finished is None
        self._ended = 0  # the last step of which end_step() was called

    def begin(self, parts: Parts, step: int) -> None:
        self._parts = parts
        self.can_save = self._which != "" and can_survive(parts)
        if not self.can_save:
            return
        self._may_save = ranks.is_first()  # this rank keeps what it needs for a save
        if self._shares:
            self._meet()
        if self._may_save:
            parts.at_loss.append(self.save)

    def _meet(self) -> None:
        """Give each rank what only rank 0 knows, and find out which of them see its folder."""
        saver = self._parts.saver
        name = f"{PARTIAL}meet-{os.getpid()}"
        if ranks.is_first():
            with contextlib.suppress(OSError):  # then no rank sees it
                write_atomic(os.path.join(saver.folder, name), "")
        # the other ranks wait here for rank 0: the file exists
        name, self._parts.state.run, keep_every = ranks.broadcast_object(
            (name, self._parts.state.run, saver.keep_every)
        )
        saver.keep_every = keep_every
        # in the folder into which this rank would save: it may be another one of the same node
        mark = os.path.join(saver.folder, name)
        self._may_save = os.path.exists(mark)
        seen = ranks.gather_objects(self._may_save)
        # rank 0 waits here for all: none looks for the file any more
        if ranks.is_first():
            with contextlib.suppress(OSError):
                os.unlink(mark)
        if blind := [str(rank) for rank, sees in enumerate(seen) if not sees]:
            self._parts.say(
                f"warning: rank {', '.join(blind)} does not see {saver.folder} of rank 0, and cannot save if "
                "rank 0 is lost: give all nodes the same mount"
            )

    def ended(self, step: int, due: Due) -> None:
        """Keep what the next step may change, if a checkpoint can hold this step. Called on every rank; if
        rank 0 shares its buffers, all ranks wait for them."""
        if not self.can_save:
            return
        self._forget(step)
        is_whole = not self._parts.position.waits and not self._parts.state.bad_in_a_row
        if is_whole and (self._may_save or self._shares):
            self._keep(step, self._shares)

    def _forget(self, step: int) -> None:
        """Forget the step before: this one has ended."""
        self._finished = None
        self._lacks = _NOT_WHOLE
        self._ended = step

    def _keep(self, step: int, shares: bool) -> None:
        """Keep what the next step may change. shares: all ranks do this now, and get rank 0's buffers."""
        if not self._tensors or step % len(self._parts.loader) == 0:  # the loop may have replaced layers
            self._list_tensors()
            self._copies = [torch.empty_like(buffer) for buffer in self._buffers]
            self._has_marks = all(is_whole(each) and not each.is_inference() for each in self._tensors)
            self._marks = Marks(self._tensors)
        if not self._has_marks:
            return
        if self._buffers:
            try:
                copy_all(self._copies, [buffer.detach() for buffer in self._buffers])
            except RuntimeError:  # a buffer has got another size
                self._copies = [buffer.detach().clone() for buffer in self._buffers]
        if shares:
            # In DistributedDataParallel each rank has statistics of its own batches, and continues with rank
            # 0's. If rank 0 is lost here, this step cannot be saved.
            self._lacks = _NOT_SENT
            if self._copies:  # one broadcast for each dtype, as in DistributedDataParallel
                group: Any = torch.distributed.group.WORLD
                torch.distributed._broadcast_coalesced(group, self._copies, _BUCKET, 0)
        state = self._parts.state
        groups = {}
        for name, optimizer in state.optimizers.items():
            groups[name] = [{**group, "params": []} for group in optimizer.param_groups]
        self._finished = _Finished(step, self._marks.read(), state.schedule.state(), state.counts(), groups)

    def save(self) -> None:
        """Save the last finished step, when a collective has failed and this process ends, and say it or why
        not. Ranks other than rank 0 do nothing if that is alive."""
        parts = self._parts
        lost = "another rank"
        say = parts.say
        if not ranks.is_first():
            if not stuck.has_lost_first() or not self._claim_save():
                return
            lost = "rank 0"
            say = print_line
        try:
            step, reason = self._save()
        except Exception as error:  # the error that ends the run must be seen
            step, reason = parts.loader.step, str(error)
        if not reason:
            say(f"saved at step {step}, after {lost} was lost")
        elif step > parts.saver.durable:
            say(f"warning: step {step} was not saved after {lost} was lost: {reason}")

    def _claim_save(self) -> bool:
        """Return whether this rank is the first that locks a file: it saves in place of rank 0. If the mount
        has no locks, each rank saves, and writes the same bytes."""
        folder = self._parts.saver.checkpoints
        with contextlib.suppress(OSError):  # another rank has the lock, or the mount is lost
            os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, f"{PARTIAL}survivor")  # the next start deletes it
            self._claimed_file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
            lock(self._claimed_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def _save(self) -> tuple[int, str]:
        """Write the checkpoint and wait for it. Return (step, why it was not written or "")."""
        parts = self._parts
        step = parts.loader.step
        # end_step() has counted the step, and then its vote has failed, in a loop that never calls accepts()
        has_ended = parts.position.ended == step and not parts.guard.has_voted
        if step != self._ended and has_ended:
            self._forget(step)
            if self._buffers and not ranks.is_first():
                self._lacks = _NOT_SENT
            elif not parts.steps.end_batch():
                self._keep(step, shares=False)
        finished = self._finished
        if not self._ended:  # no step since the restart
            return 0, "no step has ended"
        if finished is None:
            return step, self._lacks
        step = finished.step
        if reason := self._find_change(finished):
            return step, reason
        verdict = parts.guard.settle()  # which may be known only now
        if parts.state.bad_in_a_row or (verdict is not None and verdict.bad):
            return step, "its loss or a gradient is not finite"
        parts.saver.collect(wait=True)
        if parts.saver.durable == step:
            return step, ""
        parts.undo_step(step)
        for buffer, value in zip(self._buffers, self._copies, strict=True):
            buffer.data.copy_(value)
        if not ranks.is_first():
            path = os.path.join(parts.saver.checkpoints, files.name_of(step))
            if os.path.exists(path):
                parts.saver.durable = step
                return step, "rank 0 has saved it before it ended"
            parts.saver.write_alone(self._capture(finished), parts.state.run)
            return step, ""
        capture = functools.partial(self._capture, finished)
        parts.saver.save_checkpoint(step, parts.state.run, capture, is_planned=False)
        parts.saver.collect(wait=True)
        return step, "" if parts.saver.durable == step else "the write has failed"

    def _capture(self, finished: _Finished) -> dict[str, Any]:
        """Return the state after a finished step; its tensors have the values of that step again."""
        state = self._parts.state.capture(finished.step)
        for name, groups in finished.groups.items():
            for group, kept in zip(state["objects"][name]["param_groups"], groups, strict=True):
                group.update(kept | {"params": group["params"]})
        return {**state, **finished.counts, "schedule": finished.schedule}

    def _find_change(self, finished: _Finished) -> str:
        """Return why the state is not that of the end of the step any more, or ""."""
        before = [id(tensor) for tensor in [*self._tensors, *self._buffers]]
        self._list_tensors()
        now = [id(tensor) for tensor in [*self._tensors, *self._buffers]]
        if now != before or self._marks.read() != finished.marks:
            return "the step that was lost has changed the state already"
        return ""

    def _list_tensors(self) -> None:
        """List the buffers of the model, and all other tensors of modules that a checkpoint holds."""
        self._buffers = []
        self._tensors = []
        for name, value in self._parts.state.objects.items():
            if isinstance(value, torch.nn.Module):
                self._tensors += value.parameters()
                into = self._buffers if name == "model" else self._tensors
                into += value.buffers()


class LateRecords(Plugin):
    """Extends the receipt of a run with a survivor now and then: a restart reads at most these steps again.

    Also if the epoch ends, or an evaluation follows: a restart that reads steps again begins in their epoch,
    at whose end the loop may do more than training.
    """

    def __init__(self, survivor: Survivor):
        self._survivor = survivor
        self._is_late = False  # all ranks have agreed on a record

    def begin(self, parts: Parts, step: int) -> None:
        self._parts = parts
        self._recorded = parts.loader.receipt.step
        self._recorded_at = time.monotonic()

    def numbers(self) -> list[float]:
        """Return whether a record is late on rank 0, whose clock counts."""
        if not self._survivor.can_save:
            return []
        step = self._parts.loader.receipt.step
        if step != self._recorded:  # a report has made one
            self._recorded = step
            self._recorded_at = time.monotonic()
        return [float(ranks.is_first() and time.monotonic() - self._recorded_at > _EVERY)]

    def judge(self, maxima: list[float]) -> None:
        self._is_late = any(maxima)

    def ended(self, step: int, due: Due) -> None:
        """Extend the receipt, if it is due. All ranks wait for each other then."""
        parts = self._parts
        if not self._survivor.can_save or not (self._is_late or parts.ends_part(step)):
            return
        self._is_late = False
        if parts.loader.receipt.step != step:
            parts.loader.commit(step, parts.saver.folder)

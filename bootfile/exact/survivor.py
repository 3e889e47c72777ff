"""Save the last finished step when another rank is lost, without a collective.

From the end of a step to the next optimizer step only buffers change, such as BatchNorm's statistics. So rank
0, whose backward pass or vote fails because another rank has died, has the whole state after the last step,
once the buffers are restored. Only the receipt lacks samples: those of the other ranks since its last record.
The next start reads them again, and adds them (Loader.lead()).

If rank 0 itself is lost, another rank can save (Exact's survivors="any"). The buffers are then those of rank
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

from bootfile.exact import files
from bootfile.exact.marks import Marks
from bootfile.exact.statistics import copy_all
from bootfile.ground.errors import print_line
from bootfile.ground.files import PARTIAL, lock, write_atomic
from bootfile.processes import ranks, stuck

_NOT_WHOLE = "gradients wait for an optimizer step, or a checkpoint cannot hold the step"
ANY = "any"  # a value of Exact's `survivors`: ranks other than rank 0 may save, too

_EVERY = 30.0  # seconds between two records of the receipt: a restart reads at most these steps again
# names of objects that do not change until the next optimizer step, or are kept
_KEPT = ("receipt", "scaler", "scheduler")


class _Finished(NamedTuple):
    """What the state after a step has, and a later step may change before its optimizer step.

    marks: of all tensors that must not change. schedule, counts: of RunState. groups: the hyperparameters of
    each optimizer, by its name.
    """

    step: int
    marks: tuple[Any, ...]
    schedule: dict[str, Any]
    counts: dict[str, Any]
    groups: dict[str, list[dict[str, Any]]]


def _without_parameters(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def can_survive(run: Any) -> bool:
    """Return whether a run of several ranks can save without those that are lost; the same on every rank."""
    is_in_parts = run.processes.may_change or run.state.is_sharded or not run.may_survive
    if is_in_parts or not ranks.uses_gloo():
        return False
    for name, value in run.state.objects.items():
        is_known = isinstance(value, torch.nn.Module | torch.optim.Optimizer) or name in _KEPT
        if not is_known:
            return False
    return getattr(run.loader, "reads_again", False)


class Survivor:
    """The last finished step of a run, as rank 0, or each rank, can save it.

    run: the Exact. It makes the object on each rank after the state is restored, and calls the methods in the
    thread of the loop. which: Exact's `survivors`. With ANY the ranks find out here whether they see the
    folder of rank 0.
    """

    def __init__(self, run: Any, which: str):
        self._run = run
        self._shares = which == ANY  # rank 0 sends its buffers at the end of each step
        self.may_save = ranks.is_first()  # this rank keeps what it needs for a save
        self._claim = -1  # the descriptor of the file that gives this rank, not the first, the save
        if self._shares:
            self._meet()
        self._buffers: list[torch.Tensor] = []  # buffers of the model
        self._copies: list[torch.Tensor] = []  # their values after the last finished step
        self._tensors: list[torch.Tensor] = []
        self._marks = Marks([])  # marks of self._tensors
        self._has_marks = True  # changes of all tensors can be noticed
        self._finished: _Finished | None = None
        self._lacks = _NOT_WHOLE  # why there is none after a step
        self._ended = 0  # the last step of which end_step() was called
        self._recorded = run.loader.receipt.step
        self._recorded_at = time.monotonic()
        self._is_late = False  # all ranks have agreed on a record of the receipt

    def _meet(self) -> None:
        """Give each rank what only rank 0 knows, and find out which of them see its folder."""
        saver = self._run.saver
        name = f"{PARTIAL}meet-{os.getpid()}"
        if ranks.is_first():
            with contextlib.suppress(OSError):  # then no rank sees it
                write_atomic(os.path.join(saver.folder, name), "")
        # the other ranks wait here for rank 0: the file exists
        name, self._run.state.run, keep_every = ranks.broadcast_object(
            (name, self._run.state.run, saver.keep_every)
        )
        saver.keep_every = keep_every
        # in the folder into which this rank would save: it may be another one of the same node
        mark = os.path.join(saver.folder, name)
        self.may_save = os.path.exists(mark)
        seen = ranks.gather_objects(self.may_save)
        # rank 0 waits here for all: none looks for the file any more
        if ranks.is_first():
            with contextlib.suppress(OSError):
                os.unlink(mark)
        blind = [str(rank) for rank, sees in enumerate(seen) if not sees]
        if blind:
            self._run.say(
                f"warning: rank {', '.join(blind)} does not see {saver.folder} of rank 0, and cannot save if "
                "rank 0 is lost: give all nodes the same mount"
            )

    def is_record_late(self) -> bool:
        """Return whether the receipt needs a record: a question to all ranks (watchers.py)."""
        step = self._run.loader.receipt.step
        if step != self._recorded:  # a report has made one
            self._recorded = step
            self._recorded_at = time.monotonic()
        return ranks.is_first() and time.monotonic() - self._recorded_at > _EVERY

    def note_late_record(self) -> None:
        """Make a record after this step: the answer of all ranks."""
        self._is_late = True

    def end_step(self, step: int, is_whole: bool) -> None:
        """Keep what the next step may change. is_whole: a checkpoint can hold this step. Called on every
        rank, which waits for rank 0 if that shares its buffers."""
        self._finished = None
        self._lacks = _NOT_WHOLE
        self._ended = step
        if not is_whole or not (self.may_save or self._shares):
            return
        self._keep(step, self._shares)

    def _keep(self, step: int, shares: bool) -> None:
        """Keep what the next step may change. shares: all ranks do this now, and get rank 0's buffers."""
        if not self._tensors or step % len(self._run.loader) == 0:  # the loop may have replaced layers
            self._list_tensors()
            self._copies = [torch.empty_like(buffer) for buffer in self._buffers]
            self._has_marks = all(map(_is_plain, self._tensors))
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
            self._lacks = "rank 0 was lost before it had sent its buffers"
            _send_from_first(self._copies)
        state = self._run.state
        groups = {}
        for name, value in state.objects.items():
            if isinstance(value, torch.optim.Optimizer):
                groups[name] = [_without_parameters(group) for group in value.param_groups]
        self._finished = _Finished(step, self._marks.read(), state.schedule.state(), state.counts(), groups)

    def record(self, step: int, ends_part: bool) -> None:
        """Extend the receipt, if it is due. All ranks call it after a step, and wait for each other.

        ends_part: the epoch ends, or an evaluation follows. Then it is always due: a restart that reads steps
        again begins in their epoch, at whose end the loop may do more than training.
        """
        if not self._is_late and not ends_part:
            return
        self._is_late = False
        if self._run.loader.receipt.step != step:
            self._run.loader.commit(step, self._run.saver.folder)

    def save(self) -> None:
        """Save the last finished step, and say it, or why not.

        A rank that may save calls it when a collective has failed: the process ends with that error. Ranks
        other than rank 0 do nothing if that is alive.
        """
        run = self._run
        lost = "another rank"
        say = run.say
        if not ranks.is_first():
            if not stuck.has_lost_first() or not self._is_claimed():
                return
            lost = "rank 0"
            say = print_line
        try:
            step, reason = self._save()
        except Exception as error:  # the error that ends the run must be seen
            step = run.loader.step
            reason = str(error)
        if not reason:
            say(f"saved at step {step}, after {lost} was lost")
        elif step > run.saver.durable:
            say(f"warning: step {step} was not saved after {lost} was lost: {reason}")

    def _is_claimed(self) -> bool:
        """Return whether this rank is the one that saves in place of rank 0: the first of those that are left
        which locks a file, until its process ends. Without locks each of them writes the same bytes."""
        folder = self._run.saver.checkpoints
        with contextlib.suppress(OSError):  # another rank has the lock, or the mount is lost
            os.makedirs(folder, exist_ok=True)
            path = os.path.join(folder, f"{PARTIAL}survivor")  # the next start deletes it
            self._claim = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
            lock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def _save(self) -> tuple[int, str]:
        """Write the checkpoint and wait for it. Return (step, why it was not written or "")."""
        run = self._run
        step = run.loader.step
        if step != self._ended and run.ended_unasked():  # only the vote of a step that has ended has failed
            self._finished = None
            self._lacks = _NOT_WHOLE
            self._ended = step
            if self._buffers and not ranks.is_first():
                self._lacks = "rank 0 was lost before it had sent its buffers"
            elif not run.end_batch():
                self._keep(step, shares=False)
        finished = self._finished
        if not self._ended:  # no step since the restart
            return 0, "no step has ended"
        if finished is None:
            return step, self._lacks
        step = finished.step
        if reason := self._find_change(finished):
            return step, reason
        if run.was_skipped():
            return step, "its loss or a gradient is not finite"
        run.saver.collect(wait=True)
        if run.saver.durable == step:
            return step, ""
        run.abandon_step(step)
        for buffer, value in zip(self._buffers, self._copies, strict=True):
            buffer.data.copy_(value)
        if not ranks.is_first():
            path = os.path.join(run.saver.checkpoints, files.name_of(step))
            if os.path.exists(path):
                run.saver.durable = step
                return step, "rank 0 has saved it before it ended"
            run.saver.write_alone(self._capture(finished), run.state.run)
            return step, ""
        capture = functools.partial(self._capture, finished)
        run.saver.save_checkpoint(step, run.state.run, capture, is_planned=False)
        run.saver.collect(wait=True)
        return step, "" if run.saver.durable == step else "the write has failed"

    def _capture(self, finished: _Finished) -> dict[str, Any]:
        """Return the state after a finished step, when the tensors have their values of it."""
        state = self._run.state.capture(finished.step)
        for name, groups in finished.groups.items():
            for group, kept in zip(state["objects"][name]["param_groups"], groups, strict=True):
                group.update(kept)
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
        for name, value in self._run.state.objects.items():
            if not isinstance(value, torch.nn.Module):
                continue
            self._tensors += value.parameters()
            if name == "model":
                self._buffers += value.buffers()
            else:
                self._tensors += value.buffers()


def _send_from_first(tensors: list[torch.Tensor]) -> None:
    """Give all ranks the values that rank 0's tensors have: one broadcast for each dtype."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for group in by_dtype.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        torch.distributed.broadcast(flat, 0)
        parts = flat.split([tensor.numel() for tensor in group])
        copy_all(group, [part.view_as(tensor) for tensor, part in zip(group, parts, strict=True)])


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a place in memory, and counts its changes."""
    is_torchs = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_torchs and tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_inference()

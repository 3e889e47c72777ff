"""Save the last finished step when another rank is lost, on rank 0 and without a collective.

From the end of a step to the next optimizer step only buffers change, such as BatchNorm's statistics. So rank
0, whose backward pass or vote fails because another rank has died, has the whole state after the last step,
once the buffers are restored. Only the receipt lacks samples: those of the other ranks since its last record.
The next start reads them again, and adds them (Loader.lead()).

A model in parts has no such state, and with NCCL the host does not learn of the loss. Objects that are
neither modules nor optimizers may change at any time.
"""

import time
from typing import Any, NamedTuple

import torch

from bootfile.exact.statistics import copy_all
from bootfile.processes import ranks

_EVERY = 30.0  # seconds between two records of the receipt: a restart reads at most these steps again
# names of objects that do not change until the next optimizer step, or are kept
_KEPT = ("receipt", "scaler", "scheduler")


class _Finished(NamedTuple):
    """What the state after a step has, and a later step may change before its optimizer step.

    marks: of all tensors that must not change. schedule, counts: of RunState.
    """

    step: int
    marks: list[int]
    schedule: dict[str, Any]
    counts: dict[str, Any]


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
    """The last finished step of a run, as rank 0 can save it. run: the Exact, which calls the methods on each
    rank in the thread of the loop."""

    def __init__(self, run: Any):
        self._run = run
        self._buffers: list[torch.Tensor] = []  # buffers of the model
        self._copies: list[torch.Tensor] = []  # their values after the last finished step
        self._tensors: list[torch.Tensor] = []
        self._has_marks = True  # changes of all tensors can be noticed
        self._finished: _Finished | None = None
        self._ended = 0  # the last step of which end_step() was called
        self._recorded = run.loader.receipt.step
        self._recorded_at = time.monotonic()
        self._is_late = False  # all ranks have agreed on a record of the receipt

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
        """Keep what the next step may change, on rank 0. is_whole: a checkpoint can hold this step."""
        if not ranks.is_first():
            return
        self._finished = None
        self._ended = step
        if not is_whole:
            return
        if not self._tensors or step % len(self._run.loader) == 0:  # the loop may have replaced layers
            self._list_tensors()
            self._copies = [torch.empty_like(buffer) for buffer in self._buffers]
            self._has_marks = all(map(_is_plain, self._tensors))
        if not self._has_marks:
            return
        if self._buffers:
            try:
                copy_all(self._copies, [buffer.detach() for buffer in self._buffers])
            except RuntimeError:  # a buffer has got another size
                self._copies = [buffer.detach().clone() for buffer in self._buffers]
        state = self._run.state
        self._finished = _Finished(step, self._mark(), state.schedule.state(), state.counts())

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
        """Save the last finished step, and say it, or why not. Rank 0 calls it when a collective has failed:
        the process ends with that error."""
        run = self._run
        try:
            step, reason = self._save()
        except Exception as error:  # the error that ends the run must be seen
            step = run.loader.step
            reason = str(error)
        if not reason:
            run.say(f"saved at step {step}, after another rank was lost")
        elif step > run.saver.durable:
            run.say(f"warning: step {step} was not saved after another rank was lost: {reason}")

    def _save(self) -> tuple[int, str]:
        """Write the checkpoint and wait for it. Return (step, why it was not written or "")."""
        run = self._run
        step = run.loader.step
        if step != self._ended and run.ended_unasked():  # only the vote of a step that has ended has failed
            self.end_step(step, not run.end_batch())
        finished = self._finished
        if not self._ended:  # no step since the restart
            return 0, "no step has ended"
        if finished is None:
            return step, "gradients wait for an optimizer step, or a checkpoint cannot hold the step"
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

        def capture() -> dict[str, Any]:
            return {**run.state.capture(step), **finished.counts, "schedule": finished.schedule}

        run.saver.save_checkpoint(step, run.state.run, capture, is_planned=False)
        run.saver.collect(wait=True)
        return step, "" if run.saver.durable == step else "the write has failed"

    def _find_change(self, finished: _Finished) -> str:
        """Return why the state is not that of the end of the step any more, or ""."""
        before = [id(tensor) for tensor in [*self._tensors, *self._buffers]]
        self._list_tensors()
        now = [id(tensor) for tensor in [*self._tensors, *self._buffers]]
        if now != before or self._mark() != finished.marks:
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

    def _mark(self) -> list[int]:
        """Return numbers that change when a tensor is written or gets other memory."""
        marks = [tensor._version for tensor in self._tensors]
        return marks + [tensor.data_ptr() for tensor in self._tensors]


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a place in memory, and counts its changes."""
    is_torchs = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_torchs and tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_inference()

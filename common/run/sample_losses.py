"""Keep the loss of each sample of each training step, in OUT/losses-<rank>.bin.

A forward hook of the criterion sees the outputs and targets of each step, also of a step that is skipped
because its loss is not finite. A copy of the criterion with reduction="none" is called on them, without
gradients. Losses stay on the device until the next report.
The file is a row of steps, each a STEP and then `count` ids (int64) and `count` losses (float32): 12 bytes a
sample and 16 a step.
"""

import copy
import math
import os
from collections.abc import Callable, Container, Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from bootfile.exact.due import Due
from bootfile.exact.nonfinite import Diverged
from bootfile.exact.plugins import Parts, Plugin
from bootfile.ground import accelerator
from bootfile.ground.errors import BadInput
from bootfile.ground.files import check_mounted, explained, opener
from common.parallel import shard_guards

STEP = np.dtype([("step", "<i8"), ("count", "<i8")])
_CANNOT = "--sample_losses: the criterion"
_NUMBERS = (bool, int, float)  # attributes that a loop may change, such as label_smoothing


def path_of(folder: str, rank: int) -> str:
    """Return the path of the losses of a rank."""
    return os.path.join(folder, f"losses-{rank}.bin")


class SampleLosses(Plugin):
    """Collects the losses of this rank's samples on their device, and appends them to its file.

    The Checkpointer makes one on each rank of a job with --sample_losses: a plugin that writes with each
    report, because reading the losses waits for the device as a report does, and when the training diverges.

    criterion: the module that the loop calls, with an attribute `reduction` and without parameters.
    loader: the training loader. folder: of the results. log: a function that takes one line.
    Raises BadInput if the criterion gives only a mean.
    """

    def __init__(self, criterion: Any, loader: Any, folder: str, rank: int, log: Callable):
        if not isinstance(criterion, torch.nn.Module) or not hasattr(criterion, "reduction"):
            raise BadInput(
                f"{_CANNOT} gives only a mean: expected a module with the attribute `reduction`, such as "
                f"torch.nn.CrossEntropyLoss, got {getattr(criterion, '__name__', type(criterion).__name__)}"
            )
        # they are trained, and the copy below would keep their first values
        if list(criterion.parameters()):
            raise BadInput(f"{_CANNOT} has parameters of its own: expected one without")
        self._criterion = criterion
        self._copy = _copy_without_reduction(criterion)
        self._loader = loader
        self._path = path_of(folder, rank)
        self._log = log
        self._begun = 0  # the step of begin()
        self._batches: list[_Losses] = []  # since the last write()
        self._end: int | None = None  # bytes of the file; None before the first write

    def begin(self, parts: Parts, step: int) -> None:
        """Collect from the next step on. step: the steps before it; later ones in the file are deleted with
        the first write()."""
        self._begun = step
        self._criterion.register_forward_pre_hook(self._follow)
        self._criterion.register_forward_hook(self._add, with_kwargs=True)

    def ended(self, step: int, due: Due) -> None:
        if due.report:
            self.write()

    def close(self, error: BaseException | None) -> None:
        if isinstance(error, Diverged):  # its last steps have no report
            self.write()

    def _follow(self, *_: Any) -> None:
        """Give the copy the numbers and buffers that the criterion has. torch calls it before each call of
        the criterion, which may change its buffers."""
        for copied, module in zip(self._copy.modules(), self._criterion.modules(), strict=False):
            for name, value in vars(module).items():
                if type(value) in _NUMBERS:
                    vars(copied)[name] = value
            for name, buffer in module._buffers.items():
                copied._buffers[name] = None if buffer is None else buffer.clone()

    def _add(self, _: Any, args: tuple, options: dict, result: torch.Tensor) -> None:
        """Compute the losses of a call. torch calls it after each call of the criterion, also in an
        evaluation. Raises BadInput at the first call that does not give one loss a sample."""
        batch = self._loader.batch
        if not torch.is_grad_enabled() or batch is None:  # not a call of a step
            return
        if getattr(self._loader, "is_removed", False):  # --without has all its samples
            return
        if shard_guards.is_repeating():  # Shards compares its results: the call is counted already
            return
        # the second call of the criterion may draw random numbers too, on the CPU or on the device
        sources = [torch, accelerator.of(getattr(result, "device", "cpu"))]
        generators = [source for source in sources if hasattr(source, "get_rng_state")]
        states = [generator.get_rng_state() for generator in generators]
        try:  # a criterion of the user may raise any error
            with explained(f'{_CANNOT} has no losses with reduction="none"', Exception), torch.no_grad():
                losses = self._copy.forward(*args, **options).float()
        finally:  # the random numbers of the step do not change
            for generator, state in zip(generators, states, strict=True):
                generator.set_rng_state(state)
        # a step may call the criterion for parts of one batch: the calls of a batch stay together
        if not self._batches or self._batches[-1].batch is not batch:
            self._check(is_whole=True)
            self._batches.append(_Losses(self._loader.step, batch, []))
        self._batches[-1].calls.append(losses)
        self._check(is_whole=False)

    def _check(self, is_whole: bool) -> None:
        """Raise BadInput if the last batch has too many losses, or, if it is whole, too few. A batch is whole
        when the next one begins, or when its step is written."""
        if not self._batches:
            return
        step, batch, calls = self._batches[-1]
        count = len(batch.ids)
        samples = _samples(calls, count)
        if samples > count or (is_whole and samples < count):
            total = sum(losses.numel() for losses in calls)
            raise BadInput(
                f"{_CANNOT} gives {total} losses for the {count} samples of step {step}, in "
                f"{len(calls)} calls: expected one for each"
            )

    def write(self) -> None:
        """Append the steps since the last call. The only synchronisation with the device. Raises BadInput if
        the last step has fewer losses than samples."""
        self._check(is_whole=True)
        batches = self._batches
        self._batches = []
        if not batches:
            return
        # one copy from the device for all steps since the last report
        means = [_mean_of_samples(calls, len(batch.ids)) for _, batch, calls in batches]
        losses = torch.cat(means).cpu().numpy().astype("<f4")
        steps: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}  # a step may have several batches
        place = 0
        for step, batch, _ in batches:
            count = len(batch.ids)
            steps.setdefault(step, []).append((batch.ids, losses[place : place + count]))
            place += count
        # a record of the file for each step: its head, then the ids, then the losses
        content = []
        for step, parts in steps.items():
            ids = np.concatenate([ids_of_batch for ids_of_batch, _ in parts])
            losses_of_step = np.concatenate([losses_of_batch for _, losses_of_batch in parts])
            content.append(np.array((step, len(ids)), STEP).tobytes())
            content.append(ids.astype("<i8").tobytes())
            content.append(losses_of_step.tobytes())
        try:
            self._append(b"".join(content))
        except OSError as error:
            self._log(f"warning: {self._path} lacks losses of samples: {error.strerror or error}")

    def _append(self, content: bytes) -> None:
        """Append bytes to the file. The first call of a start deletes the steps after that of begin(): they
        are trained again."""
        folder = os.path.dirname(self._path)
        check_mounted(folder)
        # the first write of this start: steps after the checkpoint are in the file already, and come again
        if self._end is None:
            os.makedirs(folder, exist_ok=True)
            self._end = 0
            if os.path.exists(self._path):
                self._end = self._find_end()
        # one write of the whole report, at the end that the last write has left
        with open(self._path, "ab", opener=opener) as file:
            file.truncate(min(file.tell(), self._end))  # a write that failed left a part
            end = file.seek(0, os.SEEK_END) + len(content)
            file.write(content)
        self._end = end

    def _find_end(self) -> int:
        """Return the end in the file of the last step up to the step of begin(); 0 without one."""
        end = 0
        with open(self._path, "rb", opener=opener) as file:
            for step, count in _walk(file):
                if step <= self._begun:
                    end = file.tell() + 12 * count
        return end


def read(folder: str, rank: int, steps: Container[int]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Return step -> (ids int64 [n], losses float32 [n]) of a rank, of those of the steps that its file has.
    Raises BadInput if the file cannot be read. Commands that show a run call it, not the job itself."""
    path = path_of(folder, rank)
    if not os.path.exists(path):
        return {}
    losses_by_step = {}
    with explained(f"cannot read the losses {path}"), open(path, "rb", opener=opener) as file:
        for step, count in _walk(file):
            if step in steps:
                ids = np.frombuffer(file.read(8 * count), "<i8")
                losses_by_step[step] = (ids, np.frombuffer(file.read(4 * count), "<f4"))
    return losses_by_step


def _copy_without_reduction(criterion: Any) -> Any:
    """Return a copy of a criterion that returns each loss. The buffers of the training do not change with
    its calls."""
    duplicate = copy.deepcopy(criterion)
    duplicate.reduction = "none"
    return duplicate


class _Losses(NamedTuple):
    """The losses of a batch. batch: the loader's Batch, with the ids. calls: the losses of each call of the
    criterion, on the device."""

    step: int
    batch: Any
    calls: list[torch.Tensor]


def _samples(calls: list[torch.Tensor], count: int) -> float:
    """Return the number of samples that the losses of one or several calls belong to; infinity for a mean.
    One call may have several losses in a row for each of the `count` samples of a batch."""
    # a criterion that ignores `reduction` returns a mean: it belongs to no sample
    rows = [len(losses) if losses.ndim else math.inf for losses in calls]
    if len(rows) == 1 and rows[0] and rows[0] % count == 0:
        return count
    return sum(rows)


def _mean_of_samples(calls: list[torch.Tensor], count: int) -> torch.Tensor:
    """Return the mean of the elements of each of `count` samples, float32 [count]. Losses of several calls in
    one step are those of parts of its batch, in order."""
    if len(calls) == 1:
        return calls[0].reshape(count, -1).mean(1)
    return torch.cat([losses.reshape(len(losses), -1).mean(1) for losses in calls])


def _walk(file: BinaryIO) -> Iterator[tuple[int, int]]:
    """Yield (step, count) of each step, with the file at its ids. A step that is cut is left out."""
    # a kill may have cut the last step: what it has must not be read as another step
    size = os.fstat(file.fileno()).st_size
    place = 0
    while place + STEP.itemsize <= size:
        file.seek(place)
        step, count = np.frombuffer(file.read(STEP.itemsize), STEP)[0].item()
        place += STEP.itemsize + 12 * count
        if place > size:
            return
        yield step, count

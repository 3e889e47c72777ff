"""Keep the loss of each sample of each training step, in OUT/losses-<rank>.bin: --sample_losses true.

A forward hook of the criterion sees the outputs and targets of each step, also of a step that is skipped
because its loss is not finite. A copy of the criterion with reduction="none" is called on them, without
gradients. Losses stay on the device until the next report.
It takes a criterion that is a module with the attribute `reduction`, without parameters. The loop calls it
for each batch of the loader, or for its parts in their order; "none" gives one or several losses a sample.
The file is a row of steps, each a STEP and then `count` ids (int64) and `count` losses (float32): 12 bytes a
sample and 16 a step.
"""

import copy
import os
from collections import Counter
from collections.abc import Callable, Container, Iterator
from typing import Any, BinaryIO

import numpy as np
import torch

from bootfile.exact.due import Due
from bootfile.exact.nonfinite import Diverged
from bootfile.exact.plugins import Parts, Plugin
from bootfile.ground import accelerator
from bootfile.ground.errors import BadInput
from bootfile.ground.files import check_mounted, explained, opener

STEP = np.dtype([("step", "<i8"), ("count", "<i8")])
_CANNOT = "--sample_losses: the criterion"
_NUMBERS = (bool, int, float)  # attributes that a loop may change, such as label_smoothing


def path_of(folder: str, rank: int) -> str:
    """Return the path of the losses of a rank."""
    return os.path.join(folder, f"losses-{rank}.bin")


class SampleLosses(Plugin):
    """Collects the losses of this rank's samples on their device, and appends them to its file with each
    report, which waits for the device all the same, and when the training diverges.

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
        self._copy: Any = copy.deepcopy(criterion)  # its calls do not change the buffers of the training
        self._copy.reduction = "none"  # type: ignore[assignment]
        self._loader = loader
        self._path = path_of(folder, rank)
        self._log = log
        self._begun = 0  # the step of begin()
        self._kept: list[tuple[int, np.ndarray, Any]] = []  # step, ids, losses since the last write()
        self._batch: Any = None  # the last one with losses
        self._missing = 0  # samples of it that have none yet
        self._end: int | None = None  # bytes of the file; None before the first write

    def begin(self, parts: Parts, step: int) -> None:
        """Collect from the next step on. The first write() deletes later steps from the file."""
        self._begun = step
        self._shards = parts.shards
        self._criterion.register_forward_pre_hook(self._follow)
        self._criterion.register_forward_hook(self._add, with_kwargs=True)

    def ended(self, step: int, due: Due) -> None:
        if due.report:
            self.write()

    def close(self, error: BaseException | None) -> None:
        if isinstance(error, Diverged):  # its last steps have no report
            self.write()

    def _follow(self, *_: Any) -> None:
        """Give the copy the numbers and buffers that the criterion has before a call, which may change
        them."""
        for copied, module in zip(self._copy.modules(), self._criterion.modules(), strict=False):
            values = vars(module).items()
            vars(copied).update({name: value for name, value in values if type(value) in _NUMBERS})
            for name, buffer in module._buffers.items():
                copied._buffers[name] = None if buffer is None else buffer.clone()

    def _add(self, _: Any, args: tuple, options: dict, result: torch.Tensor) -> None:
        """Compute the losses of a call, after it. Raises BadInput if it does not give one loss a sample."""
        batch = self._loader.batch
        is_evaluation = batch is None or not torch.is_grad_enabled()
        is_removed = getattr(self._loader, "is_removed", False)  # by --without: all samples of the batch
        is_repeated = self._shards is not None and self._shards.is_repeating  # its losses are kept already
        if is_evaluation or is_removed or is_repeated:
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
        count = len(batch.ids)
        if batch is not self._batch:
            self._check_last_batch()
            self._batch = batch
            self._missing = count
        # a loop may split a batch of the loader: then a call has the losses of the next samples of it
        samples = len(losses) if losses.ndim else 0
        if self._missing == count and samples % count == 0:
            samples = min(samples, count)  # several losses for each sample
        if not 0 < samples <= self._missing:
            self._refuse(losses.numel())
        ids = batch.ids[count - self._missing :][:samples]
        self._missing -= samples
        self._kept.append((self._loader.step, ids, losses.reshape(samples, -1).mean(1)))

    def _check_last_batch(self) -> None:
        """Raise BadInput if samples of the last batch have no loss, when the next begins or it is written."""
        if self._missing:
            self._refuse(len(self._batch.ids) - self._missing)

    def _refuse(self, losses: int) -> None:
        count = len(self._batch.ids)
        raise BadInput(f"{_CANNOT} gives {losses} losses for {count} samples: expected one for each")

    def write(self) -> None:
        """Append the steps since the last call. The only synchronisation with the device. Raises BadInput if
        the last step has fewer losses than samples."""
        self._check_last_batch()
        kept = self._kept
        self._kept = []
        if not kept:
            return
        # one copy from the device for all steps since the last report
        losses = torch.cat([losses_of_call for _, _, losses_of_call in kept]).cpu().numpy().astype("<f4")
        ids = np.concatenate([ids_of_call for _, ids_of_call, _ in kept]).astype("<i8")
        # a record of the file for each step, which may have several calls: its head, its ids, its losses
        counts: Counter[int] = Counter()
        for step, ids_of_call, _ in kept:
            counts[step] += len(ids_of_call)
        content = b""
        end = 0
        for step, count in counts.items():
            part = slice(end, end := end + count)
            content += np.array((step, count), STEP).tobytes() + ids[part].tobytes() + losses[part].tobytes()
        try:
            self._append(content)
        except OSError as error:
            self._log(f"warning: {self._path} lacks losses of samples: {error.strerror or error}")

    def _append(self, content: bytes) -> None:
        """Append bytes to the file. The first call of a start deletes the steps after that of begin(): they
        are trained again."""
        folder = os.path.dirname(self._path)
        check_mounted(folder)
        if self._end is None:
            os.makedirs(folder, exist_ok=True)
            self._end = self._find_end() if os.path.exists(self._path) else 0
        # one write of the whole report, at the end that the last write has left
        with open(self._path, "ab", opener=opener) as file:
            file.truncate(min(file.tell(), self._end))  # without the part that a failed write has left
            end = file.seek(0, os.SEEK_END) + len(content)
            file.write(content)
        self._end = end

    def _find_end(self) -> int:
        """Return the end in the file of the last step up to the step of begin(); 0 without one."""
        with open(self._path, "rb", opener=opener) as file:
            ends = [file.tell() + 12 * count for step, count in _walk(file) if step <= self._begun]
        return max(ends, default=0)


def read(folder: str, rank: int, steps: Container[int]) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Return step -> (ids int64 [n], losses float32 [n]) of a rank, of those of the steps that its file has.
    Raises BadInput if the file cannot be read."""
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

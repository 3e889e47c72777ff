"""Loss, accuracy and metrics as sums: unlike means, sums over batches, steps and ranks add up exactly.

A criterion is a mean over the samples of a batch, or returns cross_entropy(), nll_loss() or
linear_cross_entropy(), which divide by the weights of the labels that are not ignored. The loss of another
one depends on the batch size and the number of processes: give it a metric. A metric of the user gives a
tensor [n] with one number for each sample, or is an object with sums (metrics.py has some).
"""

import inspect
import itertools
import math
import numbers
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from bootfile.exact import dtensors
from bootfile.ground import accelerator
from bootfile.ground.errors import BadInput
from bootfile.processes import ranks
from common.ground import endings

_EXPECTED = "expected one number, the mean over the batch (reduction='mean')"
_NAMES = ("cross_entropy", "nll_loss", "linear_cross_entropy")  # the last one since torch 2.12
_OF_LABELS: dict[Any, inspect.Signature] = {
    getattr(functional, name): inspect.signature(getattr(functional, name))
    for name in _NAMES
    if hasattr(functional, name)
}
_IS_MEAN = ["mean", None, None]  # values of reduction and of its former names, reduce and size_average


class Metrics:
    """The metrics of an evaluation besides loss and accuracy, and the one that chooses best.pth.

    metrics: name -> a function(outputs, targets) -> [n] with one number for each sample, whose mean is
    reported; or an object such as R2 with size, sums(outputs, targets) -> [size], sums of a batch that add up
    over batches and ranks, and value(sums) -> number of Python or NumPy, or a tensor of 0 dimensions, from
    float64 [size] on the CPU. best: the name of a metric, "acc" or "loss"; None: the accuracy, or the loss if
    the job has no accuracy. lowest: whether the lowest value is the best (default: true for the loss only).
    The sums of an evaluation are [loss_sum, correct, count, sums of each metric, divisor of the loss].
    Raises BadInput.

        log.use(metrics.Metrics(mae=metrics.absolute_error, best="mae", lowest=True))
    """

    def __init__(self, best: str | None = None, lowest: bool | None = None, **metrics: Any):
        names = ["loss", "acc", *metrics]
        if best is not None and best not in names:
            raise BadInput(f"Metrics(best={best!r}): unknown metric, expected one of {', '.join(names)}")
        # a report has one figure of each name
        taken = metrics.keys() & {"loss", "acc", "count"}
        if taken:
            raise BadInput(f"a metric cannot have the name {taken.pop()!r}: every evaluation reports it")
        self.metrics = metrics  # name -> function or object
        self.best = best
        self.lowest = best == "loss" if lowest is None else lowest
        self._sizes = [getattr(metric, "size", 1) for metric in metrics.values()]  # sums of each metric
        self.size = sum(self._sizes) + 1  # the sums after the first three

    @property
    def best_of(self) -> str:
        """Return the metric that chooses best.pth, as a checkpoint stores it; "" for the default."""
        return f"{'lowest' if self.lowest else 'highest'} {self.best}" if self.best else ""

    def sums(self, outputs: Any, targets: Any) -> list[torch.Tensor]:
        """Return the sums of each metric for a batch, float64 [its size]. Raises BadInput."""
        parts = []
        for (name, metric), size in zip(self.metrics.items(), self._sizes, strict=True):
            # float64: in a sum over many batches the last ones must not be lost
            if hasattr(metric, "sums"):
                parts.append(_checked(name, metric.sums(outputs, targets), size).double())
            else:
                values = _checked(name, metric(outputs, targets), count_samples(targets))
                parts.append(values.double().sum()[None])
        return parts

    def loss(self, sums: torch.Tensor) -> float:
        """Return the loss of all samples; NaN without samples or labels. sums: as for values()."""
        # the result of evaluate() without metrics is only [loss_sum, correct, count]
        divisor = sums[-1] if len(sums) == 3 + self.size else sums[2]
        return (sums[0] / divisor).item() if divisor else math.nan

    def values(self, sums: torch.Tensor) -> dict[str, float]:
        """Return the value of each metric. sums: from evaluate(), over all ranks. Raises BadInput."""
        # NaN without samples: a division by zero would end the evaluation
        count = sums[2].item() or math.nan
        values = {}
        for (name, metric), part in zip(self.metrics.items(), self._split(sums), strict=True):
            has_sums = hasattr(metric, "sums")
            values[name] = _as_number(name, metric.value(part)) if has_sums else part.item() / count
        return values

    def score(self, sums: torch.Tensor) -> float:
        """Return a score that is higher for a better model, the same on every rank; NaN if it is unknown.
        sums: as for values()."""
        best, value = self._find_best(sums)
        return -value if self.lowest or (not self.best and best == "loss") else value

    def describe_score(self, sums: torch.Tensor) -> str:
        """Return the figure that chooses best.pth in words: "val_acc 0.9721". Without "=": patterns such as
        val_acc=(.*) of a platform must find evaluations only."""
        best, value = self._find_best(sums)
        return f"val_{best} {value:.4g}"

    def _find_best(self, sums: torch.Tensor) -> tuple[str, float]:
        """Return the name and the value of the figure that chooses best.pth."""
        _, correct, count = sums[:3].tolist()
        figures = {"loss": self.loss(sums), "acc": correct / (count or math.nan), **self.values(sums)}
        best = self.best or ("loss" if math.isnan(correct) else "acc")
        return best, figures[best]

    def of_classes(self, sums: torch.Tensor) -> dict[str, Any] | None:
        """Return what the first metric with of_classes() has counted (metrics.ConfusionMatrix); None if there
        is none. sums: as for values()."""
        for metric, part in zip(self.metrics.values(), self._split(sums), strict=True):
            if hasattr(metric, "of_classes"):
                counts: dict[str, Any] = metric.of_classes(part)
                return counts
        return None

    def _split(self, sums: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the sums of each metric, on the CPU. Raises BadInput if they are not of these metrics."""
        if len(sums) - 3 not in (self.size - 1, self.size):
            raise BadInput(
                f"log.metrics has {self.size} sums and the evaluation {len(sums) - 3}: expected "
                "evaluation.evaluate(..., metrics=log.metrics)"
            )
        return sums[3 : 2 + self.size].cpu().split(self._sizes)


def _checked(name: str, result: Any, length: int) -> torch.Tensor:
    """Return what a user's metric has returned. Raises BadInput if it is not a tensor of this length."""
    if not isinstance(result, torch.Tensor) or result.shape != (length,):
        raise BadInput(f"metric {name}: expected a tensor [{length}], got {_kind(result)}")
    return result


def _as_number(name: str, value: Any) -> float:
    """Return what a user's value() has returned as a number of Python. Raises BadInput."""
    number = value.item() if getattr(value, "ndim", None) == 0 else value
    if not isinstance(number, numbers.Real):
        raise BadInput(f"metric {name}: expected one real number from value(sums), got {_kind(value)}")
    return number if isinstance(number, int) else float(number)


def _kind(value: Any) -> str:
    """Return the class of a value, and the type and shape of a tensor or an array."""
    array = f" {value.dtype} {list(value.shape)}" if hasattr(value, "dtype") else ""
    return type(value).__name__ + array


def count_samples(targets: Any) -> int:
    """Return the number of samples: the length of the first tensor, or of a list of dictionaries or texts."""
    if isinstance(targets, dict) and targets:
        return count_samples(next(iter(targets.values())))
    # a list of texts or of dictionaries has one sample an element
    if isinstance(targets, list | tuple) and targets and isinstance(targets[0], torch.Tensor | list | tuple):
        return count_samples(targets[0])
    return len(targets)


def zero_sums(device: torch.device, *shape: int) -> torch.Tensor:
    """Return zeros, float64, for sums of a device: on the CPU if the device has no float64."""
    return torch.zeros(shape, dtype=torch.float64, device=accelerator.home_of_sums(device))


def batch_sums(loss: torch.Tensor, logits: Any, labels: Any) -> torch.Tensor:
    """Return [loss_sum, correct, count] of one batch, float64 [3] as zero_sums() of the loss's device,
    without synchronising. They are zeros if the loss is not finite.

    loss: mean over the batch (scalar). `correct` is NaN, and stays NaN in every sum, unless the job is a
    classification: logits [N, classes], at least two classes, labels int64 [N]. `count` is the number of
    samples in the labels, which may be any nesting of tensors.
    """
    sums = _sums(loss, logits, labels)
    # the device selects: to look at the loss on the host would wait for the step
    nothing = torch.zeros_like(sums)
    nothing[1] = sums[1] * 0  # NaN stays NaN: the job has no accuracy
    return torch.where(torch.isfinite(loss.detach()).to(sums.device), sums, nothing)


def _sums(loss: torch.Tensor, logits: Any, labels: Any) -> torch.Tensor:
    """Return batch_sums() without the check that the loss is finite."""
    if loss.ndim:
        raise BadInput(f"the criterion returned a tensor of shape {list(loss.shape)}: {_EXPECTED}")
    loss_value = accelerator.double(loss.detach())
    count = torch.full_like(loss_value, count_samples(labels))
    correct = torch.full_like(count, torch.nan)
    if isinstance(logits, torch.Tensor) and isinstance(labels, torch.Tensor):
        has_classes = logits.ndim == 2 and logits.shape[1] > 1
        if has_classes and labels.ndim == 1 and labels.dtype == torch.int64:
            correct = (logits.argmax(dim=1) == labels).sum()
    return torch.stack([loss_value * count, accelerator.double(correct), count])


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    batches: Iterable[tuple[Any, Any]],
    criterion: Callable[[Any, Any], torch.Tensor],
    metrics: Metrics | None = None,
    stop: Callable[[], bool] = lambda: False,
    mirrored: bool = False,
) -> torch.Tensor:
    """Return the sums of batch_sums() over all batches, then those of the metrics: float64 [3 + metrics.size]
    as zero_sums() of the model's device. The mode of the model (training or evaluation) is restored.

    A job calls it on every rank, with the batches of the rank, and then adds the results of all ranks. The
    last sum is the divisor of loss_sum: the samples, or the weights of the labels that are not ignored. So
    the loss is that of all samples in one batch. Without metrics the result is [3], and loss_sum is the loss
    times the count.

    model: the raw model. A DistributedDataParallel wrapper communicates in forward(), but ranks may have
        different numbers of batches.
    batches: iterable of (inputs, targets) on the model's device; may be empty. For a sharded model a loader.
    criterion: called with (logits, labels), as in training; the mean over the batch.
    metrics: usually log.metrics.
    stop: called before each batch; if true, the function returns early with incomplete sums.
    mirrored: use the mean of the logits of each image [N, C, H, W] and its mirror image; twice the work.
    Raises BadInput if the criterion sums or does not reduce, or if a metric returns another shape.
    """
    # before the first batch: a sum over the batch would only show as a wrong loss
    reduction = getattr(criterion, "reduction", "mean")
    if reduction in ("sum", "none"):
        raise BadInput(f"the criterion has reduction={reduction!r}: {_EXPECTED}")
    used_metrics = metrics or Metrics()
    labels = 0  # those that cross_entropy() and nll_loss() got so far, also the ignored ones
    training = model.training
    model.eval()
    device = accelerator.device_of(model)
    total = zero_sums(device, 3 + used_metrics.size)
    if dtensors.is_sharded(model):
        # each forward pass needs the parts of all ranks, so they go through their batches together
        turns = _in_step(batches, stop, device)
    else:
        # no rank waits for another one here: the sums are added when all have ended
        turns = itertools.takewhile(lambda _: not stop(), batches)
    with endings.explained_by(batches):
        for inputs, targets in turns:
            # without gradients, and in the mode of evaluation: BatchNorm uses its statistics
            outputs = model(inputs)
            if mirrored:
                outputs = (outputs + model(inputs.flip(3))) / 2
            if targets is None:
                continue  # this rank has no more batches, and others need its part of the model
            with LabelMean() as label_mean:
                loss = criterion(outputs, targets)
            batch = _sums(loss, outputs, targets)
            divisor = batch[2]
            # cross_entropy() or nll_loss() has computed the loss: its divisor is known
            if label_mean.loss is loss:
                batch[0] = label_mean.total
                divisor = label_mean.divisor
                labels = labels + label_mean.labels
            measured = (outputs, targets)
            if not accelerator.has_float64(device):  # the metrics are computed where their sums are
                measured = tree_map_only(torch.Tensor, torch.Tensor.cpu, measured)
            # on the device: the host reads the sums once, after the last batch
            total += torch.cat([batch, *used_metrics.sums(*measured), divisor[None]])
    # not if a batch has failed: main() ends then
    model.train(training)
    if metrics is None:
        # the caller adds the results of the ranks, which are without the divisor: each label has to count 1
        if labels and ranks.world_size() > 1 and total[-1].item() != labels:
            raise BadInput("the labels have weights or are ignored: expected evaluate(..., log.metrics)")
        # loss_sum is the mean over the labels times the samples, as that of batch_sums()
        total = total[:3] * torch.stack([total[2] / total[3], *total.new_ones(2)]).nan_to_num(0.0)
    return total


class LabelMean(TorchFunctionMode):
    """A mode of torch that notes by what the functions of _NAMES divide, also in the modules of torch.nn.

    `loss`: the last result that is a mean, or None. It is `total` / `divisor`, float64 []; the divisor is the
    sum of the weights of the labels that are not ignored. `labels`: the number of all labels.
    """

    loss: torch.Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch calls this for each function of torch while the mode is on: most are none of the three
        result = func(*args, **(kwargs or {}))
        if func not in _OF_LABELS:
            return result
        bound = _OF_LABELS[func].bind(*args, **(kwargs or {}))
        bound.apply_defaults()
        arguments = bound.arguments
        # with another reduction the criterion divides by itself, and the divisor is not known
        if [arguments.get(name) for name in ("reduction", "reduce", "size_average")] == _IS_MEAN:
            self.labels, self.divisor = _count_labels(**arguments)
            self.loss = result
            if arguments["weight"] is None:
                self.total = torch.where(self.divisor > 0, accelerator.double(result) * self.divisor, 0.0)
            else:  # with label smoothing a total is not 0 if all weights are
                self.total = accelerator.double(func(**arguments | {"reduction": "sum"}))
        return result


def _count_labels(
    target: torch.Tensor, weight: Any, ignore_index: int | None, **_: Any
) -> tuple[int, torch.Tensor]:
    """Return the number of labels, and the sum of the weights of those that are not ignored, float64 [].
    The arguments are those of cross_entropy()."""
    if target.is_floating_point():  # shares of the classes: each sample counts 1, whatever the weights
        samples = target.numel() // target.shape[min(1, target.ndim - 1)]
        return samples, accelerator.double(torch.full((), samples, device=target.device))
    # -100 is the default of torch
    is_counted = target != (-100 if ignore_index is None else ignore_index)
    if weight is None:
        return target.numel(), accelerator.double(is_counted.sum())
    # an ignored label, such as -100, is not an index of the weights: 0 takes its place
    of_labels = weight[target.where(is_counted, 0)].where(is_counted, 0)
    return target.numel(), accelerator.double(of_labels).sum()


def _in_step(batches: Any, stop: Callable[[], bool], device: torch.device) -> Iterator[tuple[Any, Any]]:
    """Yield the batches of a loader, then (inputs, None) until all ranks end together: the forward pass of a
    sharded model needs all ranks. The host waits for each batch."""
    iterator = iter(batches)
    while True:
        batch = next(iterator, None)
        # one collective for each batch: all ranks end after the same one
        flags = torch.tensor([batch is not None, stop()], dtype=torch.int32, device=device)
        torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX)
        has_batch, must_stop = flags.tolist()
        if must_stop or not has_batch:
            return
        yield batch or (batches.example(1), None)

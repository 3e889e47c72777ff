"""Loss and accuracy as sums, and the evaluation of a model: unlike means, sums over batches, steps and ranks
add up exactly.

A criterion is a mean over the samples of a batch, or returns cross_entropy(), nll_loss() or
linear_cross_entropy(), which divide by the weights of the labels that are not ignored. The loss of another
one depends on the batch size and the number of processes: give it a metric.
"""

import inspect
import itertools
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
from common.run.metrics import Metrics, count_samples

_EXPECTED = "expected one number, the mean over the batch (reduction='mean')"
_NAMES = ("cross_entropy", "nll_loss", "linear_cross_entropy")  # the last one since torch 2.12
_OF_LABELS: dict[Any, inspect.Signature] = {
    getattr(functional, name): inspect.signature(getattr(functional, name))
    for name in _NAMES
    if hasattr(functional, name)
}
_IS_MEAN = ["mean", None, None]  # values of reduction and of its former names, reduce and size_average


def zero_sums(device: torch.device, *shape: int) -> torch.Tensor:
    """Return zeros, float64, to which sums of a device are added: on the CPU if the device has no float64."""
    return torch.zeros(shape, dtype=torch.float64, device=accelerator.home_of_sums(device))


def batch_sums(loss: torch.Tensor, logits: Any, labels: Any) -> torch.Tensor:
    """Return [loss_sum, correct, count] of one batch, float64 [3] as zero_sums() of the loss's device,
    without synchronising. They are zeros if the loss is not finite. A job calls it on each rank in each step,
    and adds the result to what Log.report() gets.

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
    metrics: "Metrics | None" = None,
    stop: Callable[[], bool] = lambda: False,
    mirrored: bool = False,
) -> torch.Tensor:
    """Return the sums of batch_sums() over all batches, then those of the metrics: float64 [3 + metrics.size]
    as zero_sums() of the model's device. The mode of the model (training or evaluation) is restored.

    A job calls it on every rank after an epoch, with the batches of the rank, and then adds the results of
    all ranks.

    The last one is the divisor of loss_sum: the number of samples, or that of cross_entropy() and nll_loss(),
    the weights of the labels that are not ignored. So the loss is that of all samples in one batch. Without
    metrics the result is [3], and loss_sum is the loss times the count.

    model: the raw model. A DistributedDataParallel wrapper communicates in forward(), but ranks may have
        different numbers of batches.
    batches: iterable of (inputs, targets) on the model's device; may be empty. For a sharded model it is a
        loader; ranks may have different numbers of batches here, too.
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
    labels = 0  # of cross_entropy() and nll_loss()
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
            with LabelMean() as seen:
                loss = criterion(outputs, targets)
            batch = _sums(loss, outputs, targets)
            divisor = batch[2]
            # cross_entropy() or nll_loss() has computed it: its divisor is known
            if seen.loss is loss:
                batch[0] = seen.total
                divisor = seen.divisor
                labels = labels + seen.labels
            measured = (outputs, targets)
            if not accelerator.has_float64(device):  # the metrics are computed where their sums are
                measured = tree_map_only(torch.Tensor, torch.Tensor.cpu, measured)
            # on the device: the host reads the sums once, after the last batch
            total += torch.cat([batch, *used_metrics.sums(*measured), divisor[None]])
    # not if a batch has failed: main() ends then
    model.train(training)
    if metrics is None:
        if labels and ranks.world_size() > 1 and total[-1].item() != labels:
            raise BadInput("the labels have weights or are ignored: expected evaluate(..., log.metrics)")
        # a loss over the labels becomes one over the samples, as the sum of batch_sums() is
        total = total[:3] * torch.stack([total[2] / total[3], *total.new_ones(2)]).nan_to_num(0.0)
    return total


class LabelMean(TorchFunctionMode):
    """Sees by what the functions of _NAMES divide, also in torch.nn's modules.

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


def _count_labels(target: torch.Tensor, weight: Any, ignore_index: int | None, **_: Any) -> Any:
    """Return the number of labels, and the sum of the weights of those that are not ignored, float64 []."""
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
    """Yield the batches of a loader. If other ranks have more, yield (inputs, None) for each: the forward
    pass of a sharded model needs all ranks. All ranks end together; the host waits for each batch."""
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

"""Loss and accuracy as sums, and the evaluation of a model: unlike means, sums over batches, steps and ranks
add up exactly."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from bootfile.exact import dtensors, loss_means
from bootfile.ground import accelerator
from bootfile.ground.errors import BadInput, print_line
from bootfile.processes import ranks
from common.ground import endings
from common.run.metrics import Metrics, count_samples

_EXPECTED = "expected one number, the mean over the batch (reduction='mean')"


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
    the weights of the labels that are not ignored. So the loss is that of all samples in one batch. If
    another criterion is not a mean over samples, one line says so. Without metrics the result is [3], and
    loss_sum is the loss times the count.

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
    is_new = not used_metrics.is_compared and type(criterion).__module__ != "torch.nn.modules.loss"
    first: Any = None  # samples of the first batch
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
        for number, (inputs, targets) in enumerate(turns):
            # without gradients, and in the mode of evaluation: BatchNorm uses its statistics
            outputs = model(inputs)
            if mirrored:
                outputs = (outputs + model(inputs.flip(3))) / 2
            if targets is None:
                continue  # this rank has no more batches, and others need its part of the model
            with loss_means.LabelMean() as seen:
                loss = criterion(outputs, targets)
            batch = _sums(loss, outputs, targets)
            divisor = batch[2]
            # cross_entropy() or nll_loss() has computed it: its divisor is known
            if seen.loss is loss:
                batch[0] = seen.total
                divisor = seen.divisor
                labels = labels + seen.labels
            elif is_new and number & (number + 1) == 0:  # batches 0, 1, 3, 7, ... of the first evaluation
                share = count_samples(targets) // 3
                first = first or _take_samples(outputs, targets, slice(share))
                others = _take_samples(outputs, targets, slice(share, None))
                is_new = not _warn_of_parts(criterion, first, others)
            measured = (outputs, targets)
            if not accelerator.has_float64(device):  # the metrics are computed where their sums are
                measured = tree_map_only(torch.Tensor, torch.Tensor.cpu, measured)
            # on the device: the host reads the sums once, after the last batch
            total += torch.cat([batch, *used_metrics.sums(*measured), divisor[None]])
    # not if a batch has failed: main() ends then
    model.train(training)
    used_metrics.is_compared = True
    if metrics is None:
        if labels and ranks.world_size() > 1 and total[-1].item() != labels:
            raise BadInput("the labels have weights or are ignored: expected evaluate(..., log.metrics)")
        # a loss over the labels becomes one over the samples, as the sum of batch_sums() is
        total = total[:3] * torch.stack([total[2] / total[3], *total.new_ones(2)]).nan_to_num(0.0)
    return total


def _take_samples(outputs: Any, targets: Any, part: slice) -> Any:
    """Return (outputs, targets) of some samples of a batch."""

    def take(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.ndim == 0 else tensor[part]

    return tree_map_only(torch.Tensor, take, (outputs, targets))


def _warn_of_parts(criterion: Callable, *parts: Any) -> bool:
    """Print a line if a criterion is not a mean over the samples of these parts; return whether it did.

    The first evaluation of a run calls it on each rank for a few batches, until one gives a warning.
    """
    from common.run.criterion_parts import compare_parts  # few batches ask

    counts = [count_samples(targets) for _, targets in parts]
    if 0 in counts:
        return False
    losses = compare_parts(criterion, *parts)
    if losses is None:
        return False
    whole, mean = losses
    if ranks.is_first():
        print_line(
            f"warning: the criterion of {sum(counts)} samples is {whole:.6g}, and the mean of those of "
            f"{counts[0]} and {counts[1]} of them {mean:.6g}: it is not a mean over samples, so val_loss "
            "depends on the batch size and the number of processes. A criterion that returns cross_entropy() "
            "or nll_loss() may have weight= and ignore_index=; else let Metrics(best=) name a metric"
        )
    return True


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

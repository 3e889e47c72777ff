"""Figures as sums: sums over processes, batches and steps add up exactly, means do not."""

from collections.abc import Callable, Iterable

import torch

from common.exits import BadInput


def batch_sums(loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return [loss_sum, correct, count] of one batch, float64 [3] on the batch's device, without
    synchronising: zeros if the loss is not finite.

    loss: mean over the batch (scalar). `correct` is NaN, and stays NaN in every sum, unless the job is a
    classification: logits [N, classes], at least two classes, labels int64 [N]. count: len(labels).
    """
    found = _sums(loss, logits, labels)
    nothing = torch.zeros_like(found)
    nothing[1] = found[1] * 0
    return torch.where(torch.isfinite(loss.detach()), found, nothing)


def _sums(loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    if loss.ndim:
        raise BadInput(f"the criterion returned a tensor of shape {list(loss.shape)}: {_EXPECTED}")
    count = torch.full((), len(labels), dtype=torch.float64, device=loss.device)
    correct = torch.full_like(count, torch.nan)
    if logits.ndim == 2 and logits.shape[1] > 1 and labels.ndim == 1 and labels.dtype == torch.int64:
        correct = (logits.argmax(dim=1) == labels).sum()
    return torch.stack([loss.detach().double() * count, correct.double(), count])


_EXPECTED = "expected one number, the mean over the batch (reduction='mean')"


@torch.no_grad()
def evaluate(
    model: torch.nn.Module,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    criterion: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    stop: Callable[[], bool] = lambda: False,
    mirrored: bool = False,
) -> torch.Tensor:
    """Return [loss_sum, correct, count] over all batches as batch_sums() does, float64 [3] on the model's
    device, and restore the model's mode.

    batches: iterable of (images float [N, C, H, W], labels [N, ...]) on the model's device; may be empty.
    Pass the raw model: a DistributedDataParallel wrapper communicates in forward(), and ranks may have
    different numbers of batches. criterion(logits, labels): that of the training, mean over the batch.
    stop: called before each batch; if true, returns early with incomplete sums. mirrored: evaluate the mean
    of the logits of each image and of its mirror image; twice the work. Raises BadInput for a criterion that
    sums or does not reduce.
    """
    reduction = getattr(criterion, "reduction", "mean")
    if reduction in ("sum", "none"):
        raise BadInput(f"the criterion has reduction={reduction!r}: {_EXPECTED}")
    training = model.training
    model.eval()
    total = torch.zeros(3, dtype=torch.float64, device=next(model.parameters()).device)
    for images, labels in batches:
        if stop():
            break
        logits = model(images)
        if mirrored:
            logits = (logits + model(images.flip(3))) / 2
        total += _sums(criterion(logits, labels), logits, labels)
    model.train(training)
    return total

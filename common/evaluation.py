"""Figures as sums: sums of any processes, batches and steps add up exactly, means do not."""

import torch

from common import preemption


def sums(loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[loss_sum, correct, count] of one batch, float64 [3] on the batch's device, without synchronising:
    zeros where the loss is not finite.

    loss: mean over the batch (scalar). logits: [N, classes]. labels: int64 [N].
    """
    found = _sums(loss, logits, labels)
    return torch.where(torch.isfinite(loss.detach()), found, torch.zeros_like(found))


def _sums(loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    correct = (logits.argmax(dim=1) == labels).sum()
    return torch.stack(
        [loss.detach().double() * len(labels), correct.double(), correct.new_tensor(len(labels)).double()]
    )


@torch.no_grad()
def evaluate(model: torch.nn.Module, batches, mirrored: bool = False) -> torch.Tensor:
    """[loss_sum, correct, count] over all batches, float64 [3] on the model's device; the model's mode is
    restored.

    batches: iterable of (images float [N, C, H, W], labels int64 [N]) on the model's device; may be empty.
    Pass the raw model: a DistributedDataParallel wrapper communicates in forward(), and ranks may have
    different numbers of batches. The loss is plain cross entropy. mirrored: of the mean of the logits of each
    image and of its mirror image; twice the work. Ends early, with sums that mean nothing,
    where the process is asked to stop.
    """
    training = model.training
    model.eval()
    total = torch.zeros(3, dtype=torch.float64, device=next(model.parameters()).device)
    for images, labels in batches:
        if preemption.asked():
            break
        logits = model(images)
        if mirrored:
            logits = (logits + model(images.flip(3))) / 2
        total += _sums(torch.nn.functional.cross_entropy(logits, labels), logits, labels)
    model.train(training)
    return total

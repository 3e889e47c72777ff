"""Undo what a step that is skipped has changed in the buffers of a model: BatchNorm's statistics."""

import torch


class Statistics:
    """The buffers of a model, and their values after the last good step.

    A forward pass changes the statistics of BatchNorm, also if its loss is not finite.
    """

    def __init__(self, model: torch.nn.Module):
        # `.data`: between two backward() calls of a step, autograd must not see that a buffer is written; in
        # training BatchNorm's backward() does not read it
        self._buffers: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in model.buffers():
            self._buffers.setdefault(buffer.dtype, []).append(buffer.data)
        self._after_step = {dtype: _flat(buffers) for dtype, buffers in self._buffers.items()}
        self._after_loss = self._after_step

    @torch.no_grad()
    def judge_loss(self, is_bad: torch.Tensor | bool) -> None:
        """Keep the values after a good loss; after a bad one, restore those of the last good step.

        Called after each backward(). is_bad: a tensor [] if the device decides; then all buffers of a dtype
        take a few operations, and the host does not wait.
        """
        self._after_loss = {}
        for dtype, buffers in self._buffers.items():
            good = self._after_step[dtype]
            if is_bad is False:
                self._after_loss[dtype] = _flat(buffers)
                continue
            if is_bad is True:
                values = good
            else:
                # the host does not learn the answer here: the device selects without a wait
                values = torch.where(is_bad, good, _flat(buffers))
            self._after_loss[dtype] = values
            parts = values.split([buffer.numel() for buffer in buffers])
            shaped = [part.view_as(buffer) for buffer, part in zip(buffers, parts, strict=True)]
            copy_all(buffers, shaped)

    def end_step(self) -> None:
        """Keep the values after the last loss as those of a good step: a bad loss has restored them."""
        self._after_step = self._after_loss


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors into others of the same shapes."""
    if hasattr(torch, "_foreach_copy_"):  # not in torch 2.1
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _flat(buffers: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([buffer.reshape(-1) for buffer in buffers])

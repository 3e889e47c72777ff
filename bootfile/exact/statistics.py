"""Undo what a step that is skipped has changed in the buffers of a model: BatchNorm's statistics."""

import torch


class Statistics:
    """The buffers of a model, and their values after the last good step.

    A forward pass changes the statistics of BatchNorm, also if its loss is not finite.
    """

    def __init__(self, model: torch.nn.Module):
        self._buffers: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in model.buffers():
            # `.data`: autograd must not see that a buffer is written between two backward() calls of a step.
            # In training BatchNorm's backward() does not read it
            self._buffers.setdefault(buffer.dtype, []).append(buffer.data)
        # dtype -> the values of all buffers in one tensor
        self._values_of_step = {dtype: _flat(buffers) for dtype, buffers in self._buffers.items()}
        self._values_of_loss = self._values_of_step

    @torch.no_grad()
    def judge_loss(self, is_bad: torch.Tensor | bool) -> None:
        """Keep the values of the buffers after a good loss; after a bad one, restore those of the last step.

        Called after each backward(). is_bad: a bool, or a tensor [] of the device; then the host does not
        wait for the device.
        """
        self._values_of_loss = {}
        for dtype, buffers in self._buffers.items():
            last = self._values_of_step[dtype]
            if is_bad is False:
                self._values_of_loss[dtype] = _flat(buffers)
                continue
            values = last if is_bad is True else torch.where(is_bad, last, _flat(buffers))
            self._values_of_loss[dtype] = values
            parts = values.split([buffer.numel() for buffer in buffers])
            shaped = [part.view_as(buffer) for buffer, part in zip(buffers, parts, strict=True)]
            copy_all(buffers, shaped)

    def end_step(self) -> None:
        """End a step: a later bad loss restores the values that the buffers have now."""
        self._values_of_step = self._values_of_loss


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy tensors into others of the same shapes."""
    if hasattr(torch, "_foreach_copy_"):  # not in torch 2.1
        torch._foreach_copy_(targets, sources)
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _flat(buffers: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([buffer.reshape(-1) for buffer in buffers])

"""Average the weights of a training: the average often predicts better than the last weights."""

import argparse

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from common.console import arguments


def decay(text: str) -> float:
    """Return the value of an option for the decay of a MovingAverage, 0 to less than 1."""
    value = arguments.non_negative_float(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text}: expected less than 1, or the average never changes")
    return value


_STATISTICS = ("running_mean", "running_var")  # buffers of a normalisation


class MovingAverage(AveragedModel):
    """The exponential moving average of a model's weights and running statistics, from the first step on.

    module: the average, a model. decay: the share of the average that remains in each step, 0..1.
    Other buffers are copied: a mean of counters, or of the unit vectors of a spectral norm, has no meaning.
    state_dict() is that of torch's AveragedModel.
    """

    def __init__(self, model: torch.nn.Module, decay: float):
        super().__init__(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)
        self.decay = decay
        self.n_averaged = self.n_averaged.to(next(model.parameters()).device)

    @torch.no_grad()
    def update_parameters(self, model: torch.nn.Module, found_inf: torch.Tensor | None = None) -> None:
        """Add the weights after a step to the average.

        found_inf: Checkpointer.found_inf, a float [] on the device: 1 if the step was skipped; then the
        average does not change. The host does not wait for it. The average equals that of torch up to
        rounding.
        """
        averages = []
        currents = []
        copied = []
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        for (name, average), current in zip(named, [*model.parameters(), *model.buffers()], strict=True):
            is_averaged = isinstance(average, torch.nn.Parameter) or name.rpartition(".")[2] in _STATISTICS
            if is_averaged and current.is_floating_point():
                averages.append(average.detach())
                currents.append(current.detach())
            else:
                copied.append((average, current))
        if found_inf is None:
            super().update_parameters(model)
        else:
            taken = 1 - found_inf  # 0 in a step that was skipped, which only the device knows
            differences = torch._foreach_sub(currents, averages)
            torch._foreach_mul_(differences, torch.where(self.n_averaged > 0, 1 - self.decay, 1.0) * taken)
            torch._foreach_add_(averages, differences)
            self.n_averaged += taken.to(self.n_averaged.dtype)
        # last: torch's own average is of all buffers of floats
        for average, current in copied:
            average.copy_(current)

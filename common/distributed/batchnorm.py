"""BatchNorm over the global batch: the statistics of one process, whatever the number of processes.

torch.nn.SyncBatchNorm needs a GPU and nccl. This is the same over gloo, on any device, so that the
mathematics of a job can be proven equal at any world size without a GPU.
"""

from typing import Any

import torch
from torch import nn


def convert_sync_batchnorm(model: nn.Module) -> nn.Module:
    """Return the model with every BatchNorm2d synchronised over the ranks; its state_dict does not change.

    torch.nn.SyncBatchNorm.convert_sync_batchnorm() with nccl; with gloo the same mathematics in this module.
    """
    if torch.distributed.get_world_size() == 1:
        return model
    if torch.distributed.get_backend() == "nccl":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = _SyncBatchNorm2d
    return model


class _SyncBatchNorm2d(nn.BatchNorm2d):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(features)
        output, mean, variance, count = _Normalize.apply(features, self.weight, self.bias, self.eps)
        with torch.no_grad():
            assert self.running_mean is not None and self.running_var is not None  # track_running_stats
            assert self.num_batches_tracked is not None and self.momentum is not None
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * (count / (count - 1)), self.momentum)
        return output


class _Normalize(torch.autograd.Function):
    """S. Ioffe and C. Szegedy, arXiv:1502.03167, Algorithm 1 and its gradients, with sums over all
    processes. Both passes are torch's own for fixed statistics, which is one over the memory each."""

    @staticmethod
    def forward(
        ctx: Any, features: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, ...]:
        # Local moments in the features' precision, combined in float64: no cancellation, few bytes to send.
        # Not torch.var_mean, which takes ten times as long over this dimension.
        rows = features.permute(0, 2, 3, 1).reshape(-1, features.shape[1]).to(weight.dtype)
        mean = rows.sum(0) / len(rows)
        square = (rows - mean).square_().sum(0)
        mean, square = mean.double(), square.double()
        count = mean.new_full((1,), len(rows))
        sums = torch.cat([count * mean, square + count * mean.square(), count])
        torch.distributed.all_reduce(sums)
        count = sums[-1]
        mean, square = sums[:-1].div(count).chunk(2)
        variance = square - mean.square()
        count, mean, variance = (each.to(weight.dtype) for each in (count, mean, variance))
        ctx.save_for_backward(features, weight, mean, variance, count)
        ctx.eps = eps
        output = torch.nn.functional.batch_norm(features, mean, variance, weight, bias, eps=eps)
        ctx.mark_non_differentiable(mean, variance, count)
        return output, mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        features, weight, mean, variance, count = ctx.saved_tensors
        fixed, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, features, weight, mean, variance, None, None, False, ctx.eps, (True, True, True)
        )
        sums = torch.cat([of_bias, of_weight]).double()
        torch.distributed.all_reduce(sums)
        first, second = sums.div(count).chunk(2)
        # What is missing where the statistics depend on the features: a line in them, for each channel.
        mean, scale = mean.double(), (variance.double() + ctx.eps).rsqrt()
        slope = weight.double() * scale.square() * second
        level = weight.double() * scale * first - slope * mean
        # In the weights' precision: rounded to the features' first, a channel's would not add up to 0.
        line = torch.addcmul(_column(level, weight), features, _column(slope, weight))
        of_features = fixed.sub_(line)
        return of_features, of_weight, of_bias, None


def _column(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.to(like.dtype).view(1, -1, 1, 1)

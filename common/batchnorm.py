"""BatchNorm over the global batch: the statistics of one process, whatever the number of processes.

torch.nn.SyncBatchNorm needs a GPU and nccl. This is the same over gloo, on any device, so that the
mathematics of a job can be proven equal at any world size without a GPU.
"""

import torch
from torch import nn


def synchronize_batchnorm(model: nn.Module) -> nn.Module:
    """Replace every BatchNorm2d, parameters and buffers kept, so that state_dicts do not change. Returns the
    model.

    torch's own under nccl, ours under gloo; the identity in a group of one process.
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
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * (count / (count - 1)), self.momentum)
        return output


class _Normalize(torch.autograd.Function):
    """S. Ioffe and C. Szegedy, arXiv:1502.03167, Algorithm 1 and its gradients, with sums over all
    processes."""

    @staticmethod
    def forward(ctx, features, weight, bias, eps):
        # Local moments in the features' precision, combined in float64: no cancellation, few bytes to send.
        variance, mean = torch.var_mean(features, dim=(0, 2, 3), correction=0)
        mean, variance = mean.double(), variance.double()
        count = mean.new_full((1,), features.numel() // features.shape[1])
        sums = torch.cat([count * mean, count * (variance + mean.square()), count])
        torch.distributed.all_reduce(sums)
        count = sums[-1]
        mean, square = sums[:-1].div(count).chunk(2)
        variance = square - mean.square()
        mean, scale = _column(mean, features), _column((variance + eps).rsqrt(), features)
        normalized = (features - mean) * scale
        ctx.save_for_backward(normalized, weight, scale, count)
        output = normalized * _column(weight, features) + _column(bias, features)
        statistics = mean.flatten(), variance.to(features.dtype), count.to(features.dtype)
        ctx.mark_non_differentiable(*statistics)
        return output, *statistics

    @staticmethod
    def backward(ctx, gradient, *_):
        normalized, weight, scale, count = ctx.saved_tensors
        bias_gradient = gradient.sum(dim=(0, 2, 3))
        weight_gradient = (gradient * normalized).sum(dim=(0, 2, 3))
        sums = torch.cat([bias_gradient, weight_gradient]).double()
        torch.distributed.all_reduce(sums)
        first, second = sums.div(count).chunk(2)
        features_gradient = gradient - _column(first, gradient) - normalized * _column(second, gradient)
        return features_gradient * (scale * _column(weight, gradient)), weight_gradient, bias_gradient, None


def _column(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.to(like.dtype).view(1, -1, 1, 1)

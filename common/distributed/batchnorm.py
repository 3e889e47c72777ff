"""BatchNorm over the global batch: the statistics are the same for any number of processes.

torch.nn.SyncBatchNorm needs a GPU and nccl, and the host waits for the GPU in each of its forward passes.
Here it does not wait. Over gloo the same mathematics run on any device, so a test can prove without a GPU
that a job is equal at any world size.
"""

from typing import Any

import torch
from torch import nn


def convert_sync_batchnorm(model: nn.Module) -> nn.Module:
    """Return the model with every BatchNorm2d synchronised over the ranks; its state_dict does not change.

    With nccl it uses torch.nn.SyncBatchNorm, but does not wait for the device in the forward pass. With gloo
    this module computes the same. Every rank must have a sample in every step.
    """
    if torch.distributed.get_world_size() == 1:
        return model
    if torch.distributed.get_backend() == "nccl":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        for module in model.modules():
            if (
                type(module) is nn.SyncBatchNorm
                and module.track_running_stats
                and module.momentum is not None
            ):
                module.__class__ = _SyncBatchNorm
        return model
    for module in model.modules():
        if type(module) is nn.BatchNorm2d:
            module.__class__ = _SyncBatchNorm2d
    return model


class _SyncBatchNorm(nn.SyncBatchNorm):
    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(features)
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        return _NormalizeOnGPU.apply(
            features, self.weight, self.bias, self.running_mean, self.running_var, self.eps, self.momentum
        )


class _NormalizeOnGPU(torch.autograd.Function):
    """The operators of torch.nn.SyncBatchNorm without its mask. torch selects the ranks that have samples by
    a boolean mask, and waits for the size of the selection (pytorch/pytorch#78549). Here every rank has
    samples."""

    @staticmethod
    def forward(
        ctx: Any,
        features: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor,
        running_var: torch.Tensor,
        eps: float,
        momentum: float,
    ) -> torch.Tensor:
        features = _dense(features)
        mean, scale = torch.batch_norm_stats(features, eps)  # scale: 1 / sqrt(variance + eps)
        channels, world_size = len(mean), torch.distributed.get_world_size()
        local = torch.cat([mean, scale, mean.new_full((1,), features.numel() // channels)])
        gathered = local.new_empty(world_size * len(local))
        _gather(gathered, local)
        means, scales, counts = gathered.view(world_size, -1).split([channels, channels, 1], dim=1)
        counts = counts.flatten().to(running_mean.dtype)
        mean, scale = torch.batch_norm_gather_stats_with_counts(
            features, means, scales, running_mean, running_var, momentum, eps, counts
        )
        ctx.save_for_backward(features, weight, mean, scale, counts.to(torch.int32))
        return torch.batch_norm_elemt(features, weight, bias, mean, scale, eps)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        features, weight, mean, scale, counts = ctx.saved_tensors
        gradient = _dense(gradient)
        first, second, of_weight, of_bias = torch.batch_norm_backward_reduce(
            gradient, features, mean, scale, weight, *ctx.needs_input_grad[:3]
        )
        of_features = None
        if ctx.needs_input_grad[0]:
            sums = torch.cat([first, second])
            torch.distributed.all_reduce(sums)
            first, second = sums.chunk(2)
            weight = None if weight is None else weight.to(mean.dtype)
            of_features = torch.batch_norm_backward_elemt(
                gradient, features, mean, scale, weight, first, second, counts
            )
        return of_features, of_weight, of_bias, None, None, None, None


def _gather(output: torch.Tensor, tensor: torch.Tensor) -> None:
    """Fill output [world_size * n] with the tensors [n] of all ranks."""
    named = (
        "all_gather_single" if hasattr(torch.distributed, "all_gather_single") else "all_gather_into_tensor"
    )
    getattr(torch.distributed, named)(output, tensor)  # newer torch deprecates the second name


def _dense(features: torch.Tensor) -> torch.Tensor:
    """Return the features in a memory format that the operators accept."""
    if features.is_contiguous(memory_format=torch.channels_last):
        return features
    return features.contiguous()


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
    """S. Ioffe and C. Szegedy, arXiv:1502.03167, Algorithm 1 and its gradients, with sums over all ranks.
    Both use torch's kernels for fixed statistics, which read the memory once."""

    @staticmethod
    def forward(
        ctx: Any, features: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, ...]:
        # Local moments have the weights' precision and are combined in float64: this avoids cancellation and
        # sends few bytes. torch.var_mean takes ten times as long over this dimension.
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
        # Add the gradient through the batch statistics; per channel it is affine in the features.
        mean, scale = mean.double(), (variance.double() + ctx.eps).rsqrt()
        slope = weight.double() * scale.square() * second
        level = weight.double() * scale * first - slope * mean
        # In the weights' precision: in that of the features, the gradients of a channel would not sum to 0.
        line = torch.addcmul(_column(level, weight), features, _column(slope, weight))
        of_features = fixed.sub_(line)
        return of_features, of_weight, of_bias, None


def _column(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.to(like.dtype).view(1, -1, 1, 1)

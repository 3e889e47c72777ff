"""BatchNorm over the global batch: the statistics are the same for any number of processes.

torch.nn.SyncBatchNorm needs a GPU and nccl. Over gloo the same mathematics run here on any device, so a test
can prove without a GPU that a job is equal at any world size.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from bootfile.ground import accelerator
from bootfile.ground.errors import BadInput
from bootfile.processes import ranks

_VENDORS = ("nccl", "hccl", "xccl")  # their devices have the kernels of torch.nn.SyncBatchNorm
_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def convert_sync_batchnorm(model: nn.Module) -> nn.Module:
    """Synchronise BatchNorm of every dimension over the ranks, in place, and return the model.

    With nccl, hccl and xccl the layers become torch.nn.SyncBatchNorm, else GlooSyncBatchNorm. Their names,
    parameters and buffers do not change. In every step every rank must have a sample. Raises BadInput if a
    layer is of another class derived from BatchNorm, because its forward() cannot be replaced.

    A job calls it on every rank before it makes the optimizer and the DistributedDataParallel.
    """
    if torch.distributed.get_world_size() == 1:
        return model
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    # all are checked before the first one changes
    for layer in layers:
        if type(layer) not in _KINDS:
            raise BadInput(
                f"a layer {type(layer).__name__} cannot be synchronised over the processes: expected one of "
                f"{', '.join(kind.__name__ for kind in _KINDS)}"
            )
    kind: type[_BatchNorm] = GlooSyncBatchNorm
    if torch.distributed.get_backend() in _VENDORS:
        kind = nn.SyncBatchNorm
    for layer in layers:  # torch's own conversion makes new layers, but not for the second name of a layer
        layer.__class__ = kind
        layer.process_group = None  # type: ignore[assignment]  # None stands for all ranks, as in SyncBatchNorm
    return model


class GlooSyncBatchNorm(_BatchNorm):
    """torch.nn.SyncBatchNorm for gloo: inputs float [n, C, ...] of any dimension, on any device. As torch's,
    it uses the statistics of its own batch if track_running_stats is False and it evaluates. Raises
    ValueError if the global batch has one value per channel."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input [n, C, ...], got {input.dim()} dimensions")

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Normalise a batch. In training all ranks wait for each other here, and in the backward pass."""
        if not self.training:
            return super().forward(features)
        self._check_input_dim(features)
        weight = self.weight
        bias = self.bias
        # without affine parameters: the kernels below expect a weight and a bias
        if weight is None:
            options = {"dtype": torch.promote_types(features.dtype, torch.float32), "device": features.device}
            weight = torch.ones(self.num_features, **options)
            bias = torch.zeros_like(weight)
        output, mean, variance, count = _Normalize.apply(features, weight, bias, self.eps)
        if self.running_mean is None or self.running_var is None:
            return output
        with torch.no_grad():
            assert self.num_batches_tracked is not None  # it is tracked with the running statistics
            self.num_batches_tracked += 1
            momentum = self.momentum
            if momentum is None:  # the mean over all batches so far
                momentum = 1 / int(self.num_batches_tracked)
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
            # the running variance is the unbiased one, as torch's
            variance = variance * (count / (count - 1))
            self.running_var.lerp_(variance.to(self.running_var.dtype), momentum)
        return output


class _Normalize(torch.autograd.Function):
    """S. Ioffe and C. Szegedy, arXiv:1502.03167, Algorithm 1 and its gradients, with sums over all ranks.
    Both use torch's kernels for fixed statistics, which read the memory once."""

    @staticmethod
    def forward(
        ctx: Any, features: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, ...]:
        """Return the output, and the mean, the variance and the number of values of the global batch. All
        ranks wait for each other here."""
        # Local moments have the weights' precision and are combined in float64: this avoids cancellation and
        # sends few bytes. torch.var_mean takes ten times as long over this dimension.
        rows = features.movedim(1, -1).reshape(-1, features.shape[1]).to(weight.dtype)
        mean = rows.sum(0) / len(rows)
        square = (rows - mean).square_().sum(0)
        mean = accelerator.double(mean)
        square = accelerator.double(square)
        count = mean.new_full((1,), len(rows))
        sums = torch.cat([count * mean, square + count * mean.square(), count])
        with ranks.waiting():
            torch.distributed.all_reduce(sums)
        count = sums[-1]
        if count < 2:
            raise ValueError(
                f"expected more than 1 value per channel in training, got {list(features.shape)}"
            )
        mean, square = sums[:-1].div(count).chunk(2)
        variance = (square - mean.square()).to(weight)
        mean = mean.to(weight)
        count = count.to(weight)
        ctx.save_for_backward(features, weight, mean, variance, count)
        ctx.eps = eps
        output = torch.nn.functional.batch_norm(features, mean, variance, weight, bias, eps=eps)
        ctx.mark_non_differentiable(mean, variance, count)
        return output, mean, variance, count

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of the features, the weight and the bias. autograd calls it in the backward
        pass; all ranks wait for each other here. The gradients of weight and bias are those of this rank."""
        # first the gradient as if the statistics were constants; their part needs the sums of all ranks
        features, weight, mean, variance, count = ctx.saved_tensors
        unsaved = mean.new_empty(0)  # the forward kernel saves no fixed statistics; CUDA's refuses None
        fixed, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, features, weight, mean, variance, unsaved, unsaved, False, ctx.eps, (True, True, True)
        )
        sums = accelerator.double(torch.cat([of_bias, of_weight]))
        with ranks.waiting():
            torch.distributed.all_reduce(sums)
        first, second = sums.div(count.to(sums)).chunk(2)
        # Add the gradient through the batch statistics; per channel it is affine in the features.
        factor = accelerator.double(weight)
        mean = accelerator.double(mean)
        scale = (accelerator.double(variance) + ctx.eps).rsqrt()
        slope = factor * scale.square() * second
        level = factor * scale * first - slope * mean
        # In the weights' precision: in that of the features, the gradients of a channel would not sum to 0.
        shape = [1, -1, *[1] * (features.dim() - 2)]
        level = level.to(weight).view(shape)
        slope = slope.to(weight).view(shape)
        of_features = fixed.sub_(torch.addcmul(level, features, slope))
        return of_features, of_weight, of_bias, None

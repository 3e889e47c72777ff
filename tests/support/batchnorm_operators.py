"""The five operators of torch.nn.SyncBatchNorm for the CPU and for fake tensors: torch's are for CUDA only.

Formulas and types are those of torch's kernels (aten/src/ATen/native/cuda/Normalization.cuh).
"""

import torch

_libraries = []  # a registration lives as long as its library


def register() -> None:
    """Register the operators in this process."""
    for key in ("CPU", "Meta"):
        library = torch.library.Library("aten", "IMPL", key)
        for operator in (_stats, _gather_stats_with_counts, _elemt, _backward_reduce, _backward_elemt):
            library.impl(f"batch_norm{operator.__name__}", operator)
        _libraries.append(library)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return the type in which the kernels add: float64 for float64, else float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _column(values, like):
    return values.view(1, -1, *[1] * (like.ndim - 2))


def _other_dimensions(features):
    return [0, *range(2, features.ndim)]


def _stats(features, eps):
    features = _wide(features)
    dimensions = _other_dimensions(features)
    mean = features.mean(dimensions)
    variance = (features - _column(mean, features)).square().mean(dimensions)
    return mean, (variance + eps).rsqrt()


def _gather_stats_with_counts(features, means, scales, running_mean, running_var, momentum, eps, counts):
    assert counts.dtype == running_mean.dtype and counts.shape == means.shape[:1]
    count, weights = counts.sum(), counts.view(-1, 1)
    mean = (weights * means).sum(0) / count
    squares = (weights * (scales.square().reciprocal() - eps + (means - mean).square())).sum(0)
    running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    running_var.lerp_((squares / (count - 1)).to(running_var.dtype), momentum)
    return mean, (squares / count + eps).rsqrt()


def _elemt(features, weight, bias, mean, scale, eps):
    output = (_wide(features) - _column(mean, features)) * _column(scale * weight, features)
    return (output + _column(bias, features)).to(features.dtype)


def _backward_reduce(gradient, features, mean, scale, weight, input_g, weight_g, bias_g):
    dimensions = _other_dimensions(features)
    gradient, features = _wide(gradient), _wide(features)
    first = gradient.sum(dimensions)
    second = (gradient * (features - _column(mean, features))).sum(dimensions)
    return first, second, (second * scale).to(weight.dtype), first.to(weight.dtype)


def _backward_elemt(gradient, features, mean, scale, weight, first, second, counts):
    assert counts.dtype == torch.int32 and mean.dtype == weight.dtype
    count = counts.sum()
    change = (_wide(features) - _column(mean, features)) * _column(second / count * scale.square(), features)
    found = _wide(gradient) - _column(first / count, features) - change
    return (found * _column(scale * weight, features)).to(features.dtype)

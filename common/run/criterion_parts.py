"""Find out whether a criterion is a mean over samples: call it for parts of a batch and for the whole."""

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

_HALF = (torch.float16, torch.bfloat16)


def compare_parts(criterion: Callable[..., Any], *parts: tuple[Any, Any]) -> tuple[float, float] | None:
    """Return the criterion of the samples of all parts, and the mean over the samples of the parts' criteria,
    if they differ by more than rounding. None if they agree, or if the parts cannot be joined.

    parts: (outputs, targets), any nesting of tensors [n, ...]. Random state and the buffers of the criterion
    do not change.
    """
    tensors_of_parts = []
    counts = []
    for part in parts:
        tensors, structure = tree_flatten(part)
        tensors_of_parts.append(tensors)
    first = tensors_of_parts[0][0]
    device = torch.device("cpu")
    if torch.is_tensor(first):
        device = first.device
    try:
        for tensors in tensors_of_parts:
            sizes = {len(tensor) for tensor in tensors}
            # without one row for each sample the parts cannot be joined
            if len(sizes) != 1:
                return None
            counts.append(sizes.pop())
        joined = [torch.cat(pieces) for pieces in zip(*tensors_of_parts, strict=True)]
        devices = []
        if device.type != "cpu":
            devices.append(device)
        # a criterion that draws random numbers must not take them from the run
        with torch.random.fork_rng(devices, device_type=device.type):
            whole = _call(criterion, tree_unflatten(joined, structure))
            values = [_call(criterion, part) for part in parts]
    except Exception:  # a criterion of the user may raise any, for example if it needs a whole batch
        return None
    total = sum(value * count for value, count in zip(values, counts, strict=True))
    mean = total / sum(counts)
    rounding = 1e-3
    if any(tensor.dtype in _HALF for tensor in joined):
        rounding = 0.03
    if math.isnan(whole) or math.isclose(whole, mean, rel_tol=rounding, abs_tol=1e-6):
        return None
    return whole, mean


def _call(criterion: Callable[..., Any], part: tuple[Any, Any]) -> float:
    """Return the criterion of a part. A criterion that is a module computes with copies of its buffers."""
    buffers: dict[str, Any] = {}
    if isinstance(criterion, torch.nn.Module):
        buffers = {name: buffer.clone() for name, buffer in criterion.named_buffers()}
    if not buffers:
        return float(criterion(*part))
    return float(torch.func.functional_call(cast(torch.nn.Module, criterion), buffers, part))

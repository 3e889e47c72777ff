"""Mixed precision: the type that a device computes fastest in, and the scaler that float16 needs.

bfloat16 has the range of float32, so its gradients need no scale. Training and prediction both use this
module, so they compute in the same type.
"""

from typing import Any

import torch


def choose(device: torch.device, wanted: bool | None) -> tuple[torch.autocast, Any]:
    """Return (autocast context, gradient scaler) for a device; both do nothing without mixed precision.

    wanted: None means True on a GPU and False on a CPU.
    """
    enabled = device.type == "cuda" if wanted is None else wanted
    dtype = fastest_dtype(device)
    return torch.autocast(device.type, dtype=dtype, enabled=enabled), make_scaler(enabled, dtype)


def fastest_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16, or float16 on GPUs that do not compute in bfloat16 (before compute capability 8.0)."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return torch.float16
    return torch.bfloat16


def make_scaler(enabled: bool, dtype: torch.dtype) -> Any:
    """Return a GradScaler. It is disabled unless the type is float16."""
    scalers = torch.amp if hasattr(torch.amp, "GradScaler") else torch.cuda.amp  # before torch 2.3
    return scalers.GradScaler(enabled=enabled and dtype == torch.float16)

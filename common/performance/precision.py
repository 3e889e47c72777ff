"""Mixed precision: the type that a device computes fastest in, and the scaler that float16 needs."""

from typing import Any

import torch


def choose(device: torch.device, wanted: bool | None) -> tuple[torch.autocast, Any]:
    """Return (autocast context, gradient scaler) for a device; both do nothing without mixed precision.

    wanted: None is yes on a GPU and no on a CPU. bfloat16, or float16 on GPUs without it (before compute
    capability 8.0); only float16 needs the scaler.
    """
    enabled = device.type == "cuda" if wanted is None else wanted
    dtype = torch.bfloat16
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        dtype = torch.float16
    return torch.autocast(device.type, dtype=dtype, enabled=enabled), scaler(enabled, dtype)


def scaler(enabled: bool, dtype: torch.dtype) -> Any:
    """Return a GradScaler, which does nothing unless the type is float16."""
    scalers = torch.amp if hasattr(torch.amp, "GradScaler") else torch.cuda.amp  # before torch 2.3
    return scalers.GradScaler(enabled=enabled and dtype == torch.float16)

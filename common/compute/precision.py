"""Mixed precision: the type that a device computes fastest in, and the scaler that float16 needs.

bfloat16 has the range of float32, so its gradients need no scale. Training and prediction both use this
module, so they compute in the same type.
"""

from typing import Any

import torch


def choose(device: torch.device, wanted: bool | None) -> tuple[torch.autocast, Any]:
    """Return (autocast context, gradient scaler) for a device; both do nothing without mixed precision.

    The type is bfloat16, or float16 on GPUs that do not compute in bfloat16 (before compute capability 8.0).
    wanted: None means True on a GPU and False on a CPU.
    """
    enabled = device.type == "cuda" if wanted is None else wanted
    half = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    scalers = torch.amp if hasattr(torch.amp, "GradScaler") else torch.cuda.amp  # before torch 2.3
    dtype = torch.float16 if half else torch.bfloat16
    return torch.autocast(device.type, dtype=dtype, enabled=enabled), scalers.GradScaler(
        enabled=enabled and half
    )

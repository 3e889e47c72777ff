"""Mixed precision: the type that a device computes fastest in, and the scaler that float16 needs.

bfloat16 has the range of float32, so its gradients need no scale. Training and prediction both use this
module, so they compute in the same type.
"""

from typing import Any

import torch

from bootfile.ground import accelerator
from bootfile.processes import ranks

GradScaler = (torch.amp if hasattr(torch.amp, "GradScaler") else accelerator.of("cuda").amp).GradScaler


def choose(device: torch.device, wanted: bool | None) -> tuple[torch.autocast, Any]:
    """Return (autocast context, gradient scaler) for a device; both do nothing without mixed precision.

    The type is bfloat16, or float16 on GPUs that do not compute in bfloat16 (before compute capability 8.0).
    wanted: None means True on a GPU and False on a CPU. Call it on every rank: BadInput if another one has
    another type.
    """
    enabled = wanted
    if enabled is None:
        enabled = device.type != "cpu"
    dtype = half_type(device)
    if enabled:
        # GPUs of different kinds: gradients of two types would be added without an error
        ranks.assert_equal_across_ranks("the type of --amp (--amp false: float32)", str(dtype))
    autocast = torch.autocast(device.type, dtype=dtype, enabled=enabled)
    return autocast, GradScaler(enabled=enabled and dtype == torch.float16)


def half_type(device: torch.device) -> torch.dtype:
    """Return bfloat16, or float16 if the device has no units for bfloat16."""
    is_old = device.type == "cuda" and accelerator.of(device).get_device_capability(device) < (8, 0)
    return torch.float16 if is_old else torch.bfloat16

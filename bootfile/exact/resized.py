"""Buffers that have another size in a checkpoint than in a model that was just made: the training has resized
them, or filled them, if they were registered as None. load_state_dict() refuses both."""

from collections.abc import Iterator
from typing import Any

import torch

from bootfile.ground import accelerator


def may_be_resized(model: torch.nn.Module, name: str) -> bool:
    """Return whether a name in the state of a model is that of a buffer, also if it is None now."""
    return name in {path for path, _, _ in _buffers(model)}


def resize(model: torch.nn.Module, saved: dict[str, Any]) -> None:
    """Give the buffers of a model the sizes that they have in a saved state."""
    for path, part, name in _buffers(model):
        there = saved.get(path)
        buffer = part._buffers[name]
        if not isinstance(there, torch.Tensor) or (buffer is not None and buffer.shape == there.shape):
            continue
        if buffer is None:  # the training makes it on the device of its inputs
            buffer = torch.empty(0, dtype=there.dtype, device=accelerator.device_of(model))
        part._buffers[name] = buffer.new_empty(there.shape)


def _buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str]]:
    """Yield (path in the state, module, name) of each buffer."""
    for path, part in model.named_modules():
        for name in part._buffers:
            yield f"{path}.{name}".lstrip("."), part, name

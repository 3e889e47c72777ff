"""Buffers that have another size in a checkpoint than in a model that was just made: the training has resized
them, or filled them, if they were registered as None. load_state_dict() refuses both."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from bootfile.exact import files
from bootfile.ground import accelerator


def check_shapes(model: torch.nn.Module, saved: dict[str, Any]) -> list[str]:
    """Return a line for each buffer that has another shape in a saved state of the model. Raises Refused if a
    weight or a buffer is missing on one side, or a weight has another shape."""
    # here and not in load_state_dict(), which names all keys at once and would change a part of the model
    here = model.state_dict()
    buffers = {path for path, _, _ in _buffers(model)}
    notes = []
    for name in sorted(saved.keys() | here.keys()):
        shape_there = _shape(name, saved)
        shape_here = _shape(name, here)
        if shape_there == shape_here:
            continue
        if name not in saved or name not in buffers:
            raise files.Refused(
                f"its model is different: {name} is {shape_there}, this run's is {shape_here}"
            )
        notes.append(f"{name} of the model is {shape_there} in the checkpoint, and was {shape_here} here")
    return notes


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
    """Yield (path in the state, module, name) of each buffer that a checkpoint has."""
    # a module that is there under two names is in the state under both
    for path, part in model.named_modules(remove_duplicate=False):
        for name in part._buffers.keys() - part._non_persistent_buffers_set:
            yield f"{path}.{name}".lstrip("."), part, name


def _shape(name: str, weights: Mapping[str, Any]) -> object:
    """Return the shape of a tensor in a state_dict; for the extra state of a module, that it has one."""
    if name not in weights:
        return "missing"
    value = weights[name]
    if name.endswith("_extra_state") or not isinstance(value, torch.Tensor):
        return "present"
    return list(value.shape)

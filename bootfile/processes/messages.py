"""Send a value of tensors and plain types between ranks. A run of one process does not load this module.

torch's own functions for objects use pickle. Here reading a value runs no code.
"""

import io
from collections.abc import Callable
from typing import Any

import torch

from bootfile.ground.errors import BadInput


def broadcast(value: Any, source: int, device: torch.device) -> Callable[[], Any]:
    """Send the value of one rank to every rank, and return a function that returns it. Call it on every rank.
    device: of the backend."""
    is_source = torch.distributed.get_rank() == source
    data = _encode(value if is_source else None, device)
    # the length first: the other ranks have to make room for the bytes
    size = torch.tensor([len(data)], device=device)
    torch.distributed.broadcast(size, source)
    data = data if is_source else data.new_empty(int(size))
    torch.distributed.broadcast(data, source)
    return lambda: _decode(data)


def gather(value: Any, device: torch.device) -> list[Any]:
    """Return the values of all ranks on every rank. device: of the backend."""
    data = _encode(value, device)
    count = torch.distributed.get_world_size()
    sizes = [torch.tensor([0], device=device) for _ in range(count)]
    torch.distributed.all_gather(sizes, torch.tensor([len(data)], device=device))
    # all_gather takes equal sizes only: each value is padded to the longest
    padded = data.new_zeros(max(map(int, sizes)))
    padded[: len(data)] = data
    parts = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(parts, padded)
    return [_decode(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]


def _encode(value: object, device: torch.device) -> torch.Tensor:
    """Return a value as bytes on a device."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return torch.frombuffer(bytearray(buffer.getbuffer()), dtype=torch.uint8).to(device)


def _decode(data: torch.Tensor) -> Any:
    """Return the value of _encode(), which another rank has sent. Raises BadInput."""
    try:
        return torch.load(io.BytesIO(data.cpu().numpy().tobytes()), "cpu", weights_only=True)
    except Exception as error:  # it is not of this program
        raise BadInput(f"a process sent a value that cannot be read ({type(error).__name__})") from error

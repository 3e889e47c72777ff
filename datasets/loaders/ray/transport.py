"""How a batch travels between processes: a pickle of its form, and its numbers beside it as plain bytes.

Torch's own pickle of a tensor copies it through its storage, and Ray keeps a tensor's bytes inside the
pickle: a batch is then copied several times. As buffers of pickle protocol 5 (PEP 574) the bytes of tensors
and NumPy arrays lie outside, Ray puts them into its object store as they are, and they are read where they
lie.
"""

import io
import os
import pickle
import sys
import tempfile

import numpy as np

from common.exits import import_optional

RAY = '"ray>=2.52"'  # as pip knows it; 2.52 is the first with tokens
_ALIGNED = 64  # bytes: what vector instructions and torch like


class _Pickler(pickle.Pickler):
    """Tensors as bytes outside; everything that pickle can do stays as it is."""

    def __init__(self, file, buffers: list):
        super().__init__(file, 5, buffer_callback=lambda buffer: buffers.append(_flat(buffer)))

    def reducer_override(self, value):
        return _reduced(value)


def _reduced(value):
    torch = sys.modules.get("torch")
    if torch is None or type(value) is not torch.Tensor:
        return NotImplemented
    if value.device.type != "cpu" or value.layout != torch.strided or value.requires_grad:
        return NotImplemented
    if value.is_quantized or value.is_conj() or value.is_neg():
        return NotImplemented
    order = sorted(range(value.ndim), key=lambda axis: -value.stride(axis))
    dense = value.permute(order).contiguous()  # a copy only where there are gaps
    raw = dense.reshape(-1).view(torch.uint8).numpy()
    return _tensor, (pickle.PickleBuffer(raw), str(value.dtype), tuple(dense.shape), tuple(order))


def _tensor(buffer, dtype: str, shape: tuple, order: tuple):
    """The tensor that these bytes are, with its dimensions in memory as they were."""
    import torch

    raw = np.asarray(buffer)
    flat = torch.from_numpy(raw if raw.flags.writeable else raw.copy())
    dense = flat.view(getattr(torch, dtype.removeprefix("torch."))).view(shape)
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return dense.permute(inverse)


def _flat(buffer: pickle.PickleBuffer) -> np.ndarray:
    return np.asarray(buffer.raw())  # not frombuffer(), which takes nothing empty


def pack(value) -> tuple[bytes, list[np.ndarray]]:
    """(the form, the bytes uint8 [n] of its tensors and arrays, not copied where they are contiguous)."""
    file, buffers = io.BytesIO(), []
    _Pickler(file, buffers).dump(value)
    return file.getvalue(), buffers


def pack_code(value) -> tuple[bytes, list[np.ndarray]]:
    """The same for what may be defined in the script that runs, or be a lambda: with Ray's pickle."""
    cloudpickle = import_optional("ray.cloudpickle", "Ray cannot be imported", RAY)

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, value):
            reduced = _reduced(value)
            return super().reducer_override(value) if reduced is NotImplemented else reduced

    file, buffers = io.BytesIO(), []
    Pickler(file, 5, lambda buffer: buffers.append(_flat(buffer))).dump(value)
    return file.getvalue(), buffers


def unpack(form: bytes, buffers):
    """What pack() was given. Arrays and tensors lie in the buffers; tensors are copied where those are
    read-only."""
    return pickle.loads(form, buffers=buffers)


def places(buffers) -> tuple[list[tuple[int, int]], int]:
    """((first, last) of every buffer in one piece of memory, its size), in bytes."""
    found, end = [], 0
    for buffer in buffers:
        first = -(-end // _ALIGNED) * _ALIGNED
        end = first + len(buffer)
        found.append((first, end))
    return found, end


def anonymous(size: int) -> int:
    """A descriptor of so much memory. Other processes may be given it, and it goes with the last of them."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("batches", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor

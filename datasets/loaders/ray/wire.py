"""Messages between processes: a pickle, followed by the bytes of its tensors and arrays.

Ray's pickle sends functions and classes of the running script by value. Torch's pickle copies a tensor
several times, so plain tensors are sent as buffers of pickle protocol 5 (PEP 574).
"""

import contextlib
import io
import os
import pickle
import socket
import subprocess
import sys
from typing import Any

import numpy as np
import torch

from common.exits import import_optional
from common.files import ROOT

RAY = '"ray>=2.52"'  # the requirement for pip; 2.52 is the first version with tokens

Message = tuple[bytes, list]  # the pickle of a value, and the bytes of its tensors and arrays, uint8


def pack(value: Any) -> Message:
    """Pickle a value. The buffers are views of its tensors and arrays. Raises pickle's exceptions."""
    cloudpickle: Any = import_optional("ray.cloudpickle", "Ray cannot be imported", RAY)

    class Pickler(cloudpickle.Pickler):  # type: ignore[name-defined]  # an optional package
        def reducer_override(self, value: Any) -> Any:
            if type(value) is torch.Tensor and _is_plain(value):
                raw: Any = value.reshape(-1).view(torch.uint8).numpy()
                return _tensor, (pickle.PickleBuffer(raw), value.dtype, value.shape)
            return super().reducer_override(value)

    file, buffers = io.BytesIO(), []
    Pickler(file, 5, lambda buffer: buffers.append(np.asarray(buffer.raw()))).dump(value)
    return file.getvalue(), buffers


def unpack(message: Message) -> Any:
    """Return the value of a message. Its arrays and tensors use the buffers; read-only tensors are copied."""
    form, buffers = message
    return pickle.loads(form, buffers=buffers)


def write(file: io.BufferedRWPair, header: Any, message: Message = (b"", [])) -> None:
    """Send a header, any value that can be pickled, and a message. Raises OSError."""
    form, buffers = message
    pickle.dump((header, form, [len(buffer) for buffer in buffers]), file, 5)
    for buffer in buffers:
        file.write(buffer)
    file.flush()


def read(file: io.BufferedRWPair) -> tuple[Any, Message]:
    """Receive a header and a message. Raises EOFError or OSError if the connection is lost."""
    try:
        header, form, sizes = pickle.load(file)
    except pickle.UnpicklingError as error:
        raise EOFError(str(error)) from error
    buffers: list[Any] = [np.empty(size, np.uint8) for size in sizes]
    for buffer in buffers:
        if file.readinto(buffer) < len(buffer):
            raise EOFError("the connection was closed")
    return header, (form, buffers)


def start(module: str, **environment: str) -> tuple[subprocess.Popen, socket.socket]:
    """Start main(connection) of a module of this package. Return the process and our end of the connection.

    The process ends when our end closes, also because this process is killed.
    """
    ours, theirs = socket.socketpair()
    code = f"""import socket, sys; sys.path.insert(0, {ROOT!r})
from datasets.loaders.ray import {module}; {module}.main(socket.socket(fileno={theirs.fileno()}))"""
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[theirs.fileno()], env=os.environ | environment,
            start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
    return process, ours


def stop(process: subprocess.Popen, connection: socket.socket, seconds: float) -> None:
    """End a process that start() has started, also if a fork of this process holds its connection."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _is_plain(value: torch.Tensor) -> bool:
    return (
        value.device.type == "cpu" and value.layout == torch.strided and value.is_contiguous()
        and not (value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg())
    )  # fmt: skip


def _tensor(buffer: Any, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    raw = np.asarray(buffer)
    return torch.from_numpy(raw if raw.flags.writeable else raw.copy()).view(dtype).view(shape)

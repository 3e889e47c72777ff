"""Writing while training goes on: a copy in host memory, and a thread that puts it on the disk."""

import os
import threading
from collections.abc import Callable

import torch


class BackgroundWriter:
    """At most one write is in flight; the copies' memory is used again for the next.

    submit() blocks for the copy, and for what is still in flight.
    """

    def __init__(self):
        self._buffers: dict[tuple, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def submit(self, state: dict, write: Callable[[dict], None]) -> None:
        """Copy `state` (nested dictionaries, lists and tuples of tensors and plain types) and call
        write(copy) in the background. Raises the error of the write before where nobody took it."""
        error = self.wait()
        if error:
            raise error
        copy = self._copied(state, ())
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # the copies from the device have arrived
        self._thread = threading.Thread(target=self._run, args=(write, copy), name="writer")
        self._thread.start()

    def idle(self) -> bool:
        """Whether nothing is being written."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> Exception | None:
        """Wait for the write in flight, at most so long; its error, or None."""
        if self._thread:
            self._thread.join(seconds)
        if not self.idle():
            return None
        self._thread, error, self._error = None, self._error, None
        return error

    def _run(self, write: Callable[[dict], None], copy: dict) -> None:
        try:
            write(copy)
        except Exception as error:
            self._error = error

    def _copied(self, value, place: tuple):
        if isinstance(value, torch.Tensor):
            return self._buffer(value, place).copy_(value, non_blocking=True)
        if isinstance(value, dict):
            return {key: self._copied(each, (*place, key)) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copied(each, (*place, index)) for index, each in enumerate(value))
        return value

    def _buffer(self, tensor: torch.Tensor, place: tuple) -> torch.Tensor:
        """Host memory of the tensor's shape and strides, pinned where the tensor is on a GPU."""
        kept = self._buffers.get(place)
        if kept is None or (kept.shape, kept.stride(), kept.dtype) != (
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        ):
            kept = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self._buffers[place] = kept
        return kept


def size_of(state) -> int:
    """Bytes of the tensors in nested dictionaries, lists and tuples."""
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, dict):
        return sum(map(size_of, state.values()))
    return sum(map(size_of, state)) if isinstance(state, list | tuple) else 0


def is_finite(state) -> bool:
    """Whether no tensor in it holds a NaN or an infinity."""
    if isinstance(state, torch.Tensor):
        return not state.is_floating_point() or bool(torch.isfinite(state).all())
    if isinstance(state, dict):
        return all(map(is_finite, state.values()))
    return all(map(is_finite, state)) if isinstance(state, list | tuple) else True


def describe(error: Exception, path: str) -> str:
    """An error of writing with its place: "No space left on device (12.0 MB free at PATH)"."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    try:
        space = os.statvfs(path)
    except OSError as another:  # a mount that went stale: its reason is enough
        return f"{reason} ({path}: {another.strerror})"
    return f"{reason} ({space.f_bavail * space.f_frsize / 1e6:.1f} MB free at {path})"

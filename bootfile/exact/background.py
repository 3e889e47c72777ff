"""What a save needs so that the training continues: a copy of the state in host memory, a thread that writes
it, and one that computes its digest meanwhile."""

import collections
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_flatten

from bootfile.exact import dtensors
from bootfile.ground import accelerator
from bootfile.processes import ranks

_ALIGNED = 64  # bytes: of a tensor in pinned memory
_PADDING = 2**20  # bytes for all alignment


class _Write(NamedTuple):
    """A write in flight. memory: what it reads, so that nothing else may be copied there."""

    name: str
    memory: object
    future: concurrent.futures.Future[None]


class Writer:
    """A thread that writes files, and the writes that it has not finished.
    failed: called by collect() with the name and the error of a failed write. `failures`: kind of file
        (".pt") -> why its last write failed, for the end of the run.
    """

    def __init__(self, failed: Callable[[str, BaseException], object]):
        self.failures: dict[str, str] = {}
        self._failed = failed
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "writer")
        self._writes: collections.deque[_Write] = collections.deque()  # until collect() has seen their ends

    def submit(self, name: str, memory: object, write: Callable[[], None]) -> None:
        """Call write() in the thread, after the writes before."""
        self._writes.append(_Write(name, memory, self._pool.submit(write)))

    def reads(self, memory: object) -> bool:
        """Return whether a write in flight reads this memory."""
        return any(write.memory is memory for write in self._writes)

    def collect(self, wait: bool = False) -> None:
        """Report the writes that have ended with an error. wait: wait for those in flight first."""
        # in the order of the writes: a later success of the same kind of file takes a failure back
        while self._writes and (wait or self._writes[0].future.done()):
            name, _, future = self._writes.popleft()
            if error := future.exception():
                self._failed(name, error)
            else:
                self.failures.pop(os.path.splitext(name)[1], None)

    def stop(self, seconds: float) -> None:
        """Wait for the writes in flight, at most `seconds`, and end the thread after its last write."""
        concurrent.futures.wait([write.future for write in self._writes], seconds)
        self._pool.shutdown(wait=False)


@contextlib.contextmanager
def in_parallel(work: Callable[[], object]) -> Iterator[Callable[[], object]]:
    """Call work() in a thread while the block runs, or before it if no thread can start. The block gets a
    function that waits for its end and raises what it has raised; the end of the block waits, too."""
    future: concurrent.futures.Future[object] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    # not of a pool: the program may have begun to end, and a pool takes no work then
    thread = threading.Thread(target=run, name="digest")
    is_started = False
    with contextlib.suppress(RuntimeError):  # no room for a thread, or Python has begun to end
        thread.start()
        is_started = True
    if not is_started:
        run()
    try:
        yield future.result
    finally:
        if is_started:
            thread.join()


class HostCopies:
    """Copies states to the host. All copies use the same memory, so make the next one after the last use."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[Any, ...], torch.Tensor] = {}
        # the rest of a pinned block, which tensors share because the driver takes milliseconds for each
        self._block = np.empty(0, np.uint8)
        self._size = 0  # bytes of the state that is copied, for the size of a block

    def make(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of nested dictionaries, lists and tuples of tensors and plain types. If tensors are
        sharded, call it on every rank; only rank 0 has a copy."""
        self._size = size_of(state) + _PADDING
        copy: dict[str, Any] = self._copied(state, ())
        if module := accelerator.in_use():
            # the copies were only started: the next step must not change what they read
            stream = module.current_stream() if hasattr(module, "current_stream") else module
            stream.synchronize()  # the copies from the device have arrived
        return copy

    def _copied(self, value: Any, place: tuple[Any, ...]) -> Any:
        """Return a copy of a part of a state. place: its keys in the state."""
        if isinstance(value, torch.Tensor) and not value.is_meta:
            whole = dtensors.full(value)  # a collective if the tensor is sharded
            if not ranks.is_first():
                return None
            return self._buffer(whole, place).copy_(whole, non_blocking=True)
        if isinstance(value, dict):
            return {key: self._copied(part, (*place, key)) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copied(part, (*place, index)) for index, part in enumerate(value))
        if isinstance(value, np.generic):
            return value.item()
        # the other types that may change are refused
        return value.copy() if isinstance(value, set | bytearray) else value

    def _buffer(self, tensor: torch.Tensor, place: tuple[Any, ...]) -> torch.Tensor:
        """Return host memory of the tensor's shape and strides, pinned if the tensor is on a GPU."""
        kept = self._buffers.get(place)
        if kept is None and tensor.numel() and accelerator.has_streams(tensor.device):
            kept = self._buffers[place] = self._pinned(tensor)
        if kept is None or _layout(kept) != _layout(tensor):
            pins = accelerator.has_streams(tensor.device)
            kept = self._buffers[place] = torch.empty_like(tensor, device="cpu", pin_memory=pins)
        return kept

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a part of the block as a storage of its own: torch.save() writes whole storages."""
        size = -(-tensor.nbytes // _ALIGNED) * _ALIGNED
        if len(self._block) < size:
            self._block = torch.empty(max(size, self._size), dtype=torch.uint8, pin_memory=True).numpy()
        flat = torch.frombuffer(self._block, dtype=tensor.dtype, count=tensor.numel())
        self._block = self._block[size:]
        return flat.as_strided(tensor.shape, torch.empty_like(tensor, device="meta").stride())


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def size_of(state: Any) -> int:
    """Return the bytes of the tensors in nested dictionaries, lists and tuples."""
    leaves, _ = tree_flatten(state)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not leaf.is_meta]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

"""Save checkpoints and weights in the background. A failed save is reported; the training continues."""

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from common.checkpoint import digest, files
from common.ground.exits import BadInput
from common.ground.files import explain_write, sweep, write_atomic


class Saver:
    """Writes checkpoints and weights to the output folder of a run, on rank 0.

    folder: the output folder.
    keep: the number of newest checkpoints to keep.
    log: called with one line to print.
    saved: called after each checkpoint, in the background.

    `durable` is the step of the last checkpoint that is on the disk.
    """

    def __init__(
        self,
        folder: str,
        keep: int,
        log: Callable[[str], object],
        saved: Callable[[], object] = lambda: None,
    ):
        self.folder, self.keep, self.log, self.saved = folder, keep, log, saved
        self.checkpoints = os.path.join(folder, "checkpoints")
        self.step = self.durable = 0  # of the last checkpoint that was submitted; of the last on the disk
        self._writer = BackgroundWriter()
        self._pending = ""  # the name of the file that is being written
        self._failures: dict[str, str] = {}  # kind of file -> why its last write failed
        self._digested = 0  # the step of the last state whose digest was submitted
        self._digests: list[tuple[int, str]] = []  # (step, digest) that digests() has not returned
        self._digest_done = threading.Event()
        self._digest_done.set()
        self.infinite: set[str] = set()  # names of weights that may be infinite, such as a mask
        self._is_readable = False  # whether a checkpoint of this start was read back
        self._whole: dict[str, tuple] = {}  # path -> identity of checkpoints that are known to be whole

    def save_checkpoint(self, step: int, run: str, capture: Callable[[], dict], is_planned: bool) -> None:
        """Write step_<step>.pt and delete old checkpoints, unless this step was submitted before.

        is_planned: false if it is saved only because the run stops; digests() does not return it then,
        because an uninterrupted run does not have it.
        """

        def write(state: dict) -> None:
            self._write_checkpoint(state, run, is_planned)

        if self.step != step:
            self.step = step
            self._submit(files.name_of(step), capture, write)

    def save_weights(
        self,
        name: str,
        step: int,
        model: torch.nn.Module | None,
        objects: Callable[[], dict],
        and_then: Callable[[dict], object],
    ) -> None:
        """Write weights in the background, and the digest of the state if this step has none.

        name: the file; "" writes the digest only.
        step: the optimizer steps so far.
        model: the module whose weights are written; None: those of the state.
        objects: returns the objects of a checkpoint.
        and_then: called with the weights that were written.
        """

        def capture() -> dict:
            # The keys are those of a checkpoint, so both use the same host memory for the copy.
            state = {"objects": objects()}
            if self._digested == step:
                state["objects"] = {} if model else {"model": state["objects"]["model"]}
            return state | ({"weights": model.state_dict()} if model else {})

        def write(state: dict) -> None:
            tensors = state["weights"] if model else state["objects"]["model"]
            self._prepare(self.folder, tensors)
            if self._digested != step:
                self._digest(step, state["objects"])
            if not name:
                return
            sweep(self.folder)
            files.write_weights(os.path.join(self.folder, name), tensors)
            and_then(tensors)

        if name or self._digested != step:
            self._submit(name, capture, write)

    def digests(self) -> list[tuple[int, str]]:
        """Return (step, digest) of the states since the last call. Wait for a digest that is computed now."""
        self._digest_done.wait()
        taken, self._digests = self._digests, []
        return taken

    def resume_at(self, step: int) -> None:
        """Record that the checkpoint of this step is on the disk. Delete the digests of later steps."""
        self.step = self.durable = self._digested = step
        with contextlib.suppress(OSError, BadInput):  # a digest that is missing is not an error of the run
            digest.cut(self.folder, step)
            line = digest.read(self.folder).get(step)
            self._digests = [(step, line["digest"])] if line and line.get("planned") else []

    def check(self, wait: bool = False) -> None:
        """Report a write that has ended with an error. wait: wait for the write in flight first."""
        if not self._pending or not (wait or self._writer.idle()):
            return
        error = self._writer.wait()
        if error:
            self._report(error)
        else:
            self._failures.pop(os.path.splitext(self._pending)[1], None)
        self._pending = ""

    def wait(self, seconds: float) -> None:
        """Wait for the write in flight, at most `seconds`."""
        self._writer.wait(seconds)

    def finish(self) -> list[str]:
        """Wait for the last write. Return the reasons why files are missing."""
        self.check(wait=True)
        return list(self._failures.values())

    def _submit(self, name: str, capture: Callable[[], dict], write: Callable[[dict], object]) -> None:
        def run(state: dict) -> None:
            try:
                write(state)
            finally:
                self._digest_done.set()

        self.check(wait=True)  # the last write may change values that are part of this state
        self._pending = name or digest.FILE
        self._digest_done.clear()
        try:
            self._writer.submit(capture(), run)
        except (RuntimeError, MemoryError, OSError) as error:  # no memory for the copy, or no thread
            self._digest_done.set()
            self._report(error)

    def _digest(self, step: int, objects: dict, is_planned: bool = True, is_saved: bool = False) -> None:
        """Write the digest of the state after `step` steps, before its checkpoint is on the disk: then a run
        that is resumed from the checkpoint has it."""
        line = digest.summarize(step, objects) | {"planned": is_planned, "saved": is_saved}
        self._digested = step
        if is_planned:
            self._digests.append((step, line["digest"]))
        self._digest_done.set()
        try:
            digest.write(self.folder, line)
        except OSError as error:
            self.log(f"warning: {digest.FILE} lacks step {step}: {describe(error, self.folder)}")

    def _write_checkpoint(self, state: dict[str, Any], run: str, is_planned: bool) -> None:
        self._prepare(self.checkpoints, state, state["objects"]["model"])
        self._digest(state["step"], state["objects"], is_planned, is_saved=True)
        path = os.path.join(self.checkpoints, files.name_of(state["step"]))
        files.write(path, state, step=state["step"], run=run)
        if not self._is_readable:  # once: a later state has the same types
            files.check_readable(path)
            self._is_readable = True
        write_atomic(os.path.join(self.checkpoints, files.LATEST), f"{os.path.basename(path)}\n")
        self.durable = state["step"]
        files.keep(self.checkpoints, run, self.keep, self._whole)
        self.saved()

    def _prepare(self, folder: str, state: dict, model: dict | None = None) -> None:
        """Make the folder. Raises ValueError if the weights are not finite, OSError if the disk is full."""
        tensors = state if model is None else model
        if not is_finite({name: each for name, each in tensors.items() if name not in self.infinite}):
            raise ValueError("the weights are not finite")
        if not os.path.isdir(folder):
            if self.durable:
                self.log(f"warning: {folder} was deleted and is created again: older checkpoints are lost")
            os.makedirs(folder, exist_ok=True)
        space, size = os.statvfs(folder), size_of(state)
        if space.f_bavail * space.f_frsize < size:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {size / 1e6:.1f} MB are needed")

    def _report(self, error: Exception) -> None:
        name, self._pending = self._pending, ""
        reason = f"{name} was not saved: {describe(error, self.folder)}"
        self._failures[os.path.splitext(name)[1]] = reason
        self.step = self.durable
        self.log(f"warning: {reason}; the training continues, older checkpoints are unchanged")


class BackgroundWriter:
    """Writes copies of a state in a thread; at most one write is in flight.

    submit() blocks until the previous write has ended and the copy is made. Copies reuse the same memory.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def submit(self, state: dict, write: Callable[[dict], object]) -> None:
        """Copy `state` (nested dictionaries, lists and tuples of tensors and plain types) and call
        write(copy) in the background. Raises the error of the previous write unless wait() has returned it.
        """
        error = self.wait()
        if error:
            raise error
        copy = self._copied(state, ())
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # the copies from the device have arrived
        self._thread = threading.Thread(target=self._run, args=(write, copy), name="writer")
        self._thread.start()

    def idle(self) -> bool:
        """Return whether no write is in flight."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> Exception | None:
        """Wait for the write in flight, at most `seconds`. Return its error, or None."""
        if self._thread:
            self._thread.join(seconds)
        if not self.idle():
            return None
        self._thread, error, self._error = None, self._error, None
        return error

    def _run(self, write: Callable[[dict], object], copy: dict) -> None:
        try:
            write(copy)
        except Exception as error:
            self._error = error

    def _copied(self, value: Any, place: tuple) -> Any:
        if isinstance(value, torch.Tensor):
            return self._buffer(value, place).copy_(value, non_blocking=True)
        if isinstance(value, dict):
            return {key: self._copied(each, (*place, key)) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copied(each, (*place, index)) for index, each in enumerate(value))
        return value.item() if isinstance(value, np.generic) else value

    def _buffer(self, tensor: torch.Tensor, place: tuple) -> torch.Tensor:
        """Return host memory of the tensor's shape and strides, pinned if the tensor is on a GPU."""
        kept = self._buffers.get(place)
        if kept is None or (kept.shape, kept.stride(), kept.dtype) != (
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        ):
            kept = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self._buffers[place] = kept
        return kept


def size_of(state: Any) -> int:
    """Return the bytes of the tensors in nested dictionaries, lists and tuples."""
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, dict):
        return sum(map(size_of, state.values()))
    return sum(map(size_of, state)) if isinstance(state, list | tuple) else 0


def is_finite(state: Any) -> bool:
    """Return whether no tensor in nested dictionaries, lists and tuples has a NaN or an infinity."""
    if isinstance(state, torch.Tensor):
        return not state.is_floating_point() or bool(torch.isfinite(state).all())
    if isinstance(state, dict):
        return all(map(is_finite, state.values()))
    return all(map(is_finite, state)) if isinstance(state, list | tuple) else True


def find_infinite(tensors: dict) -> set[str]:
    """Return the names of tensors that are not finite, such as the mask of an attention."""
    return {name for name, tensor in tensors.items() if not is_finite(tensor)}


def describe(error: Exception, path: str) -> str:
    """Return the text of a write error with its path: "No space left on device (12.0 MB free at PATH)"."""
    is_of_disk = isinstance(error, OSError | RuntimeError)  # torch raises RuntimeError if the disk is full
    return explain_write(error, path) if is_of_disk else str(error)

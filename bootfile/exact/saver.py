"""Save checkpoints and weights in the background. A failed save is reported; the training continues."""

import collections
import concurrent.futures
import contextlib
import errno
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_flatten

from bootfile.exact import digest, dtensors, files
from bootfile.ground import accelerator
from bootfile.ground.errors import BadInput
from bootfile.ground.files import check_mounted, explain_write, sweep
from bootfile.ground.heartbeat import watched
from bootfile.processes import ranks
from bootfile.records import STATES, cut_states, write_state

# a file system refuses what a save needs: unlike a full disk, this does not pass
_FINAL = (errno.ENOSYS, errno.EROFS, errno.EPERM, errno.EOPNOTSUPP, errno.ENODEV)
_MOST_FAILURES = 3  # such failures in a row, before the first checkpoint, end the job
_ALIGNED = 64  # bytes: of a tensor in pinned memory
_PADDING = 2**20  # bytes for all alignment


class Saver:
    """Writes checkpoints and weights to the output folder of a run, on rank 0.

    folder: the output folder.
    keep: the number of newest checkpoints to keep.
    log: called with one line to print.
    is_sharded: whether the model is. Then call save_checkpoint() and save_weights() on every rank.
    by_rank: each rank writes its part of a sharded model (dtensor_files.py); otherwise rank 0 gathers them.
    keep_every: the distance of the old checkpoints that stay, in steps (ladder.py); 0: none. None: that of
        the checkpoint from which the run continues, so that a restart without it deletes none of them.
    saved: called with the step of each new checkpoint, in the background.

    `durable` is the step of the last checkpoint that is on the disk. The training waits for a copy to host
    memory, and for writes in flight only if they use the memory that a copy needs.
    """

    def __init__(
        self,
        folder: str,
        keep: int,
        log: Callable[[str], object],
        is_sharded: bool = False,
        by_rank: bool = False,
        keep_every: int | None = None,
    ):
        """Make the saver, on every rank, before a checkpoint is read. Nothing is written yet."""
        self.folder = folder
        self.keep = keep
        self.keep_every = keep_every
        self.log = log
        self.is_sharded = is_sharded
        self.by_rank = is_sharded and by_rank
        self.saved: Callable[[int], object] | None = None
        self.checkpoints = os.path.join(folder, "checkpoints")
        check_mounted(folder)  # remembers the mount
        self._is_writer = ranks.is_first()
        self._is_alone = False  # this rank saves in place of rank 0
        self.step = 0  # the step of the last checkpoint that was submitted
        self.durable = 0  # the step of the last checkpoint on the disk
        self._states = HostCopies()
        # the weights after an epoch do not wait for the write of a checkpoint; but rank 0 may have no room
        # for a second copy of a sharded model
        self._weights = self._states if is_sharded and not by_rank else HostCopies()
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "writer")
        self._writes: collections.deque[_Write] = collections.deque()  # until collect() has seen their ends
        self._failures: dict[str, str] = {}  # kind of file -> why its last write failed
        self._refusals = 0  # failures in a row for a reason that does not pass by itself (_FINAL)
        self.hopeless = ""  # why no checkpoint can be saved in this folder: the job has to end
        # the line of state.jsonl of a checkpoint that is being written
        self._marked: dict[str, Any] | None = None
        self.newest: dict[str, Any] | None = None  # the line of the newest checkpoint that is on the disk
        self._digested = 0  # the step of the last state whose digest was submitted
        self.machines: list[dict[str, Any]] = []  # those that have computed the run, for STATES
        self.infinite: set[str] = set()  # names of weights that may be infinite, such as a mask
        self._is_readable = False  # whether it was checked that torch can read the types in a checkpoint
        # path -> identity of checkpoints that are known to be whole
        self._whole: dict[str, tuple[Any, ...]] = {}

    def save_checkpoint(
        self, step: int, run: str, capture: Callable[[], Mapping[str, Any]], is_planned: bool
    ) -> None:
        """Write step_<step>.pt and delete old checkpoints, unless this step was submitted before.

        The loop calls it after a step; the file is written in the background.

        run: the id of the run. capture: returns the state.
        is_planned: false if it is saved only because the run stops: an uninterrupted run does not have it.
        """
        # this step may be saved already, as the last one before a signal
        if not self._agree(self.step != step):
            return
        self.step = step

        def write_parts() -> Mapping[str, Any]:
            """Write the parts of all ranks now, and return the rest of the state for rank 0."""
            return self._write_parts(capture(), run, is_planned)

        def write(state: dict[str, Any]) -> None:
            """Write the copy of the state, in the thread of the writer on rank 0."""
            self._write_checkpoint(state, run, is_planned)

        take = write_parts if self.by_rank else capture
        self._submit(files.name_of(step), take, write, step)

    def write_alone(self, state: dict[str, Any], run: str) -> None:
        """Write a checkpoint at once, in place of rank 0, which is lost. Called on one other rank, whose
        process ends after it: nothing changes the tensors meanwhile. Raises OSError, ValueError."""
        self._is_writer = True
        self._is_alone = True
        self._write_checkpoint(state, run, is_planned=False)

    def save_weights(
        self,
        name: str,
        step: int,
        run: str,
        model: torch.nn.Module | None,
        objects: Callable[[], dict[str, Any]],
        write_files: Callable[[dict[str, Any]], object],
    ) -> None:
        """Write weights in the background, and the digest of the state if this step has none.

        They are copied also after save_checkpoint() of the same step: a job may have changed them since.

        name: of the file, for reports; "" writes the digest only.
        step: the optimizer steps so far.
        run: the id of the run.
        model: the module whose weights are written; None: those of the state.
        objects: returns the objects of a checkpoint.
        write_files: called with the weights, in the background; writes them.
        """

        def take_objects() -> dict[str, Any]:
            return {"objects": objects()}

        def take_weights() -> dict[str, Any]:
            weights = model.state_dict() if model is not None else objects()["model"]
            return {"objects": {"model": weights}}

        # These two run in the thread of the writer, with a copy of what the two above return.

        def write_digest(state: dict[str, Any]) -> None:
            self._check_finite(state["objects"]["model"])
            self._digest(step, run, state["objects"])

        def write(state: dict[str, Any]) -> None:
            tensors = state["objects"]["model"]
            self._check_finite(tensors)
            self._prepare(self.folder, tensors)
            write_files(tensors)

        if self._agree(self._digested != step):
            if self.by_rank:
                self._digest(step, run, objects())
                self._digested = step
            else:
                self._submit(STATES, take_objects, write_digest, step)
        if name:
            self._submit(name, take_weights, write)

    def resume_at(self, step: int, from_memory: bool = False) -> None:
        """Begin after a step: record which checkpoint is on the disk, and delete the digests of later steps.

        Called once on rank 0, before the first step of the process.

        step: of the state that was restored; 0 if no checkpoint of this run was.
        from_memory: the state came from the memory of another process (an elastic job), which had trained
            after its last checkpoint. Then the newest checkpoint in the folder counts. One of a later step
            does not: the process that wrote it was lost before the others had its step.
        """
        if from_memory:
            paths = files.list_newest_first(self.checkpoints)
            newest = files.step_of(paths[0]) if paths else 0
            step_on_disk = min(step, newest)
        else:
            step_on_disk = step
        # save_checkpoint() does not write that of this step again
        self.step = step_on_disk
        self.durable = step_on_disk
        self._digested = step_on_disk
        if self.keep_every is None:
            self.keep_every = 0
            with contextlib.suppress(files.Refused):  # a new run has no checkpoint
                path = os.path.join(self.checkpoints, files.name_of(step_on_disk))
                self.keep_every = int(files.facts_of(path).get("keep_every", 0))
        with contextlib.suppress(OSError, BadInput):  # a digest that is missing is not an error of the run
            cut_states(self.folder, step)

    def collect(self, wait: bool = False) -> None:
        """Report the writes that have ended with an error. wait: wait for those in flight first."""
        # in the order of the writes: a later success of the same kind of file takes a failure back
        while self._writes and (wait or self._writes[0].future.done()):
            name, _, future = self._writes.popleft()
            if error := future.exception():
                self._report(name, error)
            else:
                self._failures.pop(os.path.splitext(name)[1], None)

    def wait(self, seconds: float) -> None:
        """Wait for the writes in flight, at most `seconds`."""
        concurrent.futures.wait([write.future for write in self._writes], seconds)

    def stop(self) -> None:
        """End the thread that writes, after its last write."""
        self._pool.shutdown(wait=False)

    def finish(self) -> list[str]:
        """Wait for the last write. Return the reasons why files are missing."""
        self.collect(wait=True)
        return list(self._failures.values())

    def _submit(
        self,
        name: str,
        capture: Callable[[], Mapping[str, Any]],
        write: Callable[[dict[str, Any]], object],
        step: int = 0,
    ) -> None:
        """Copy what capture() returns, and write the copy in the background. step: of a whole state; 0 if it
        is only weights. The copy waits for writes that use its memory. That of a state waits for all writes:
        they may change values that are part of it."""

        def run(state: dict[str, Any]) -> None:
            try:
                with watched(self.folder):
                    write(state)
            finally:
                self._unmark()

        copies = self._states if step else self._weights
        try:
            # the loop waits here for the disk, if the copy of the last save is still being written
            if step or any(in_flight.copies is copies for in_flight in self._writes):
                self.collect(wait=True)
            # the loop continues when the state is in host memory: the next step may change the tensors
            copy = copies.make(capture())
            self._digested = step or self._digested
            if ranks.is_first():
                self._writes.append(_Write(name, copies, self._pool.submit(run, copy)))
        except (RuntimeError, MemoryError, OSError, ValueError) as error:  # no memory or thread, for example
            if step:  # then no write is in flight
                self._unmark()
            self._report(name, error)

    def _agree(self, decision: bool) -> bool:
        """Return rank 0's decision: only rank 0 knows which writes have failed."""
        return ranks.broadcast_object(decision) if self.is_sharded else decision

    def _digest(
        self, step: int, run: str, objects: dict[str, Any], is_planned: bool = True, is_saved: bool = False
    ) -> None:
        """Write the digest of the state after `step` steps, before its checkpoint is on the disk: then a run
        that is resumed from the checkpoint has it."""
        line = digest.summarize(step, objects, self._is_alone) | {
            "run": run,
            "planned": is_planned,
            "saved": is_saved,
        }
        line["machines"] = self.machines
        if not self._is_writer:
            return
        try:
            write_state(self.folder, line)
            self._marked = line if is_saved else self._marked
        except OSError as error:
            self.log(f"warning: {STATES} lacks step {step}: {describe(error, self.folder)}")

    def _unmark(self) -> None:
        """Take back the mark `saved` of a checkpoint whose write has failed."""
        line, self._marked = self._marked, None
        with contextlib.suppress(OSError):
            if line:
                write_state(self.folder, line | {"saved": False})

    def _write_parts(self, state: Mapping[str, Any], run: str, is_planned: bool) -> dict[str, Any]:
        """Write the sharded tensors of a state on every rank; the training waits. Return the rest of it."""
        objects = state["objects"]
        path = os.path.join(self.checkpoints, files.name_of(state["step"]))
        self._check_finite(objects["model"])
        self._digest(state["step"], run, objects, is_planned, is_saved=True)
        if ranks.is_first():
            files.discard(path)
        from bootfile.exact import dtensor_files

        rest, facts = dtensor_files.save(path, objects)
        return {**state, "objects": rest, "shards": facts}

    def _write_checkpoint(self, state: dict[str, Any], run: str, is_planned: bool) -> None:
        self._check_finite(state["objects"]["model"])
        if not self.by_rank:
            self._digest(state["step"], run, state["objects"], is_planned, is_saved=True)
        self._prepare(self.checkpoints, state)
        if not self._is_readable:  # once: a later state has the same types
            files.check_readable(state["objects"])
            self._is_readable = True
        facts: dict[str, Any] = {"shards": state["shards"]} if self.by_rank else {}
        every = self.keep_every or 0
        if every:
            facts["keep_every"] = every
        path = os.path.join(self.checkpoints, files.name_of(state["step"]))
        # it has its name only when all of it is on the disk: until here the run continues from the one before
        files.write(path, state, step=state["step"], run=run, **facts)
        self.durable = state["step"]
        self.newest, self._marked = self._marked, None
        self._refusals = 0
        # only now: the checkpoints before are needed until the new one is known to be whole
        files.keep(path, self.keep, self._whole, every)
        if self.saved:
            self.saved(state["step"])

    def _prepare(self, folder: str, state: dict[str, Any]) -> None:
        """Make the folder for a state, and delete what a killed write has left. Raises OSError if the disk is
        full."""
        check_mounted(self.folder)
        if os.path.islink(folder) and folder != self.folder:  # it was made after the start
            raise OSError(errno.ELOOP, f"{folder} is a link")
        if not os.path.isdir(folder):
            os.makedirs(folder, exist_ok=True)
            if self.durable:
                self.log(f"warning: {folder} was deleted and is created again: older checkpoints are lost")
        # a killed start may have left temporary files, and the disk no room for both
        sweep(folder)
        space = os.statvfs(folder)
        size = size_of(state)
        if space.f_bavail * space.f_frsize < size:
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}, {size / 1e6:.1f} MB are needed")

    def _check_finite(self, tensors: dict[str, Any]) -> None:
        if find_infinite(tensors) - self.infinite:
            raise ValueError("the weights are not finite")

    def _report(self, name: str, error: BaseException) -> None:
        reason = f"{name} was not saved: {describe(error, self.folder)}"
        if ranks.is_first():  # only it learns later whether a write succeeds
            self._failures[os.path.splitext(name)[1]] = reason
        # a later save of the same step, as the last one before a signal, tries the write again
        self.step = self.durable
        if isinstance(error, OSError) and error.errno in _FINAL:
            self._refusals += 1
        others = "older checkpoints are unchanged" if self.durable else "there is no checkpoint yet"
        if not self.durable and self._refusals == _MOST_FAILURES:
            self.hopeless = f"{reason}, {_MOST_FAILURES} times, and no checkpoint was saved before"
        self.log(f"warning: {reason}; the training continues, {others}")


class _Write(NamedTuple):
    """A write in flight. copies: with the memory that it reads."""

    name: str
    copies: "HostCopies"
    future: concurrent.futures.Future[None]


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
        if isinstance(value, set | bytearray):  # the other types that may change are refused
            return value.copy()
        return value

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
    size = 0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
            size += leaf.numel() * leaf.element_size()
    return size


def find_infinite(tensors: dict[str, Any]) -> set[str]:
    """Return the names of tensors with a NaN or an infinity, such as the mask of an attention."""
    names = set()
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.is_meta:
            continue
        # the sum is fast, and finite for nearly all; it may overflow, so that each element decides
        if not torch.isfinite(tensor.sum()) and not torch.isfinite(tensor).all():
            names.add(name)
    return names


def describe(error: BaseException, path: str) -> str:
    """Return the text of a write error with its path: "No space left on device (12.0 MB free at PATH)"."""
    return explain_write(error, path) if isinstance(error, OSError | RuntimeError) else str(error)

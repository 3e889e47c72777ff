"""Save checkpoints and weights in the background. A failed save is reported; the training continues."""

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from bootfile.exact import files
from bootfile.exact.background import HostCopies, Writer, in_parallel, size_of
from bootfile.ground import errors
from bootfile.ground.errors import BadInput
from bootfile.ground.files import check_mounted, explain_write, state_of, sweep
from bootfile.ground.heartbeat import watched
from bootfile.processes import ranks
from bootfile.records import STATES, cut_states, write_state

# a file system refuses what a save needs: unlike a full disk, this does not pass
_FINAL = (errno.ENOSYS, errno.EROFS, errno.EPERM, errno.EOPNOTSUPP, errno.ENODEV)
_MOST_FAILURES = 3  # such failures in a row, before the first checkpoint, end the job


class NotSaved(BadInput):
    """Results could not be written."""

    code = errors.NOT_SAVED


class _Task(NamedTuple):
    """A file that is written in the background."""

    name: str
    capture: Callable[[], Mapping[str, Any]]  # returns the state; called in the thread of the loop
    write: Callable[[dict[str, Any]], object]  # writes a copy of it, on rank 0, in the thread of the writer
    undo: Callable[[], object] = lambda: None  # called if one of the two fails
    step: int = 0  # number of the step of a whole state; 0: only weights


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

    A checkpoint passes these states; a step of 0 stands for none:

        `submitted`   its state is in host memory, and the thread will write it
        recorded      state.jsonl has its digest, with "saved": true
        `durable`     the file is on the disk under its name, and older ones may be deleted
        failed        its line says "saved": false, and `submitted` is that of `durable` again: the next
                      save of this step, as the last one before a signal, tries it again

    The training waits for a copy to host memory, and for writes in flight only if they use the memory that a
    copy needs.
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
        self.folder = folder
        self.keep = keep
        self.keep_every = keep_every
        self.log = log
        self.is_sharded = is_sharded
        self.by_rank = is_sharded and by_rank
        self.saved: Callable[[int], object] = lambda step: None
        self.checkpoints = os.path.join(folder, "checkpoints")
        check_mounted(folder)  # remembers the mount
        self.submitted = 0
        self.durable = 0
        self.newest: dict[str, Any] | None = None  # the line of the newest checkpoint that is on the disk
        self.hopeless = ""  # why no checkpoint can be saved in this folder: the job has to end
        self.machines: list[dict[str, Any]] = []  # those that have computed the run, for STATES
        self.infinite: set[str] = set()  # names of weights that may be infinite, such as a mask
        self._states = HostCopies()
        # the weights after an epoch do not wait for the write of a checkpoint; but rank 0 may have no room
        # for a second copy of a sharded model
        self._weights = self._states if is_sharded and not by_rank else HostCopies()
        self._writer = Writer(self._report)
        self._digested = 0  # the step of the last state whose digest was submitted
        self._refusals = 0  # failed checkpoints in a row for a reason that does not pass (_FINAL)
        self._is_readable = False  # whether it was checked that torch can read the types in a checkpoint
        self._whole: dict[str, tuple[Any, ...]] = {}  # path -> identity of known whole checkpoints

    def save_checkpoint(
        self, step: int, run: str, capture: Callable[[], Mapping[str, Any]], is_planned: bool
    ) -> None:
        """Write step_<step>.pt in the background and delete old checkpoints, unless it was submitted before.
        run: the id of the run. capture: returns the state. is_planned: false if it is saved only because the
            run stops: an uninterrupted run does not have it.
        """
        # this step may be saved already, as the last one before a signal
        if not self._agree(self.submitted != step):
            return
        self.submitted = step
        line: dict[str, Any] = {}  # the line in state.jsonl; {} before it is written

        def record(state: Mapping[str, Any]) -> None:
            self._check_finite(state["objects"]["model"])
            line.update(self._record(state, run, is_planned, is_saved=True))

        def capture_rest() -> Mapping[str, Any]:
            """Write the parts of all ranks now, and return the rest of the state, which rank 0 writes."""
            state = capture()
            record(state)
            return self._write_parts(state)

        def write(state: dict[str, Any]) -> None:
            if self.by_rank:  # capture_rest() has recorded it
                self._write_checkpoint(state, run, line)
                return
            # the digest takes a core that the write leaves idle; both read the copy
            with in_parallel(lambda: record(state)) as recorded:
                self._write_checkpoint(state, run, line, recorded)

        name = files.name_of(step)
        undo = lambda: self._take_back(line)  # noqa: E731
        self._submit(_Task(name, capture_rest if self.by_rank else capture, write, undo, step))

    def write_alone(self, state: dict[str, Any], run: str) -> None:
        """Write a checkpoint at once, on one other rank in place of rank 0, which is lost: the process ends
        after it. Raises OSError, ValueError."""
        self._check_finite(state["objects"]["model"])
        line = self._record(state, run, is_planned=False, is_saved=True, is_alone=True)
        with _undone_if_it_fails(lambda: self._take_back(line, is_alone=True)):
            self._write_checkpoint(state, run, line)

    def save_weights(
        self,
        name: str,
        step: int,
        run: str,
        model: torch.nn.Module | None,
        objects: Callable[[], dict[str, Any]],
        write_files: Callable[[dict[str, Any]], object],
    ) -> None:
        """Write weights in the background, and the digest of the state if this step has none. They are copied
        again after save_checkpoint() of this step: a job may have changed them since.
        name: of the file, for reports; "" writes the digest only. step, run: as for save_checkpoint().
        model: the module whose weights are written; None: those of the state. objects: returns the objects of
            a checkpoint. write_files: called with the weights, in the background; writes them.
        """

        def capture() -> dict[str, Any]:
            return {"step": step, "objects": objects()}

        def write_digest(state: dict[str, Any]) -> None:
            self._check_finite(state["objects"]["model"])
            self._record(state, run)

        if self._agree(self._digested != step):
            if self.by_rank:
                self._record(capture(), run)
                self._digested = step
            else:
                self._submit(_Task(STATES, capture, write_digest, step=step))

        def capture_weights() -> dict[str, Any]:
            weights = model.state_dict() if model is not None else objects()["model"]
            return {"objects": {"model": weights}}  # their place in a state, for the memory of the copy

        def write_weights(state: dict[str, Any]) -> None:
            weights = state["objects"]["model"]
            self._check_finite(weights)
            self._prepare(self.folder, weights)
            write_files(weights)

        if name:
            self._submit(_Task(name, capture_weights, write_weights))

    def resume_at(self, step: int, from_memory: bool = False) -> None:
        """Begin after a step, once on rank 0: note the checkpoint on the disk, delete the digests of later
        steps.
        step: of the state that was restored; 0 if no checkpoint of this run was. from_memory: the state came
            from another process (an elastic job), which had trained after its last checkpoint. Then the
            newest checkpoint counts that is not later: the others did not have the step of a later one.
        """
        step_on_disk = step
        if from_memory:
            steps = map(files.step_of, files.list_newest_first(self.checkpoints))
            step_on_disk = next((saved for saved in steps if saved <= step), 0)
        # save_checkpoint() does not write that of this step again
        self.submitted = self.durable = self._digested = step_on_disk
        path = os.path.join(self.checkpoints, files.name_of(step_on_disk))
        if os.path.exists(path):  # a new run has none
            from bootfile.exact import checked_files  # loaded here for each save, see _is_whole()

            if self.keep_every is None:
                with contextlib.suppress(files.Refused):
                    self.keep_every = int(checked_files.facts_of(path).get("keep_every", 0))
        self.keep_every = self.keep_every or 0
        with contextlib.suppress(OSError, BadInput):  # a digest that is missing is not an error of the run
            cut_states(self.folder, step)

    def collect(self, wait: bool = False) -> None:
        """Report the writes that have ended with an error. wait: wait for those in flight first."""
        self._writer.collect(wait)

    def give_up(self, seconds: float) -> None:
        """Wait for the writes in flight, at most `seconds`, and end the thread that writes."""
        self._writer.stop(seconds)

    def finish(self) -> list[str]:
        """Wait for the last write. Return the reasons why files are missing."""
        self._writer.collect(wait=True)
        return list(self._writer.failures.values())

    def _submit(self, task: _Task) -> None:
        """Copy a state, and write the copy in the background. The copy waits for writes that use its memory;
        one of a whole state for all writes, which may change values in it."""
        copies = self._states if task.step else self._weights
        try:
            # the loop waits here for the disk, if the copy of the last save is still being written
            if task.step or self._writer.reads(copies):
                self._writer.collect(wait=True)
            # the loop continues when the state is in host memory: the next step may change the tensors
            copy = copies.make(task.capture())
            self._digested = task.step or self._digested

            def write() -> None:
                with watched(self.folder), _undone_if_it_fails(task.undo):
                    task.write(copy)

            if ranks.is_first():
                self._writer.submit(task.name, copies, write)
        except (RuntimeError, MemoryError, OSError, ValueError) as error:  # no memory or thread, for example
            task.undo()
            self._report(task.name, error)

    def _agree(self, decision: bool) -> bool:
        """Return rank 0's decision: only rank 0 knows which writes have failed."""
        return ranks.broadcast_object(decision) if self.is_sharded else decision

    def _record(
        self,
        state: Mapping[str, Any],
        run: str,
        is_planned: bool = True,
        is_saved: bool = False,
        is_alone: bool = False,
    ) -> dict[str, Any]:
        """Add the line with the digest of a state to state.jsonl, and return it; {} with a warning if that
        fails. is_saved: its checkpoint is written next. is_alone: rank 0 is lost, and this rank writes."""
        from bootfile.exact import digest  # an import of Exact needs none

        facts = {"run": run, "planned": is_planned, "saved": is_saved, "machines": self.machines}
        line = digest.summarize(state["step"], state["objects"], is_alone) | facts
        try:
            if ranks.is_first() or is_alone:
                write_state(self.folder, line)
        except OSError as error:
            self.log(f"warning: {STATES} lacks step {state['step']}: {describe(error, self.folder)}")
            return {}
        return line

    def _take_back(self, line: dict[str, Any], is_alone: bool = False) -> None:
        """Write that a checkpoint was not saved, if its line says that it was. is_alone: as for _record()."""
        with contextlib.suppress(OSError):
            if line and (ranks.is_first() or is_alone):
                write_state(self.folder, line | {"saved": False})

    def _write_parts(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Write the sharded tensors of a state on every rank; the training waits. Return the rest of it."""
        path = os.path.join(self.checkpoints, files.name_of(state["step"]))
        if ranks.is_first():
            files.discard(path)
        from bootfile.exact import dtensor_files

        rest, facts = dtensor_files.save(path, state["objects"])
        return {**state, "objects": rest, "shards": facts}

    def _write_checkpoint(
        self,
        state: dict[str, Any],
        run: str,
        line: dict[str, Any],
        recorded: Callable[[], object] | None = None,
    ) -> None:
        """Write a state, and then delete old ones. recorded: waits for its line, before the file has its
        name."""
        self._prepare(self.checkpoints, state)
        if not self._is_readable:  # once: a later state has the same types
            files.check_readable(state)
            self._is_readable = True
        every = self.keep_every or 0
        facts: dict[str, Any] = {"shards": state["shards"]} if self.by_rank else {}
        facts |= {"keep_every": every} if every else {}
        path = os.path.join(self.checkpoints, files.name_of(state["step"]))
        # it has its name only when all of it is on the disk: until here the run continues from the one before
        files.write(path, state, recorded, step=state["step"], run=run, **facts)
        self.durable = state["step"]
        self.newest = dict(line) or None
        line.clear()  # the checkpoint is written: _take_back() has nothing to do any more
        self._refusals = 0
        # only now: the checkpoints before are needed until the new one is known to be whole
        self._whole[path] = state_of(path)  # this process has just written it: it is not read again
        files.keep(path, self.keep, self._is_whole, every)
        self.saved(state["step"])

    def _is_whole(self, path: str) -> bool:
        """Return whether a checkpoint is not damaged. Each file is read once, and none of this process."""
        if self._whole.get(path) != state_of(path):
            from bootfile.exact import checked_files  # it is of an earlier start

            try:
                checked_files.verify(path)
            except files.Refused:
                return False
            self._whole[path] = state_of(path)
        return True

    def _prepare(self, folder: str, state: dict[str, Any]) -> None:
        """Make the folder for a state, and delete what a killed write has left. Raises OSError without
        room."""
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
        """Raise ValueError if weights are infinite or NaN that were not so before the training."""
        if find_infinite(tensors) - self.infinite:
            raise ValueError("the weights are not finite")

    def _report(self, name: str, error: BaseException) -> None:
        """Print that a write has failed. A later save of the step of a failed checkpoint tries it again."""
        reason = f"{name} was not saved: {describe(error, self.folder)}"
        kind = os.path.splitext(name)[1]
        if ranks.is_first():  # on other ranks no later write would remove it
            self._writer.failures[kind] = reason
        if kind == ".pt":  # a checkpoint, not weights or a digest
            self.submitted = self.durable
            self._refusals += isinstance(error, OSError) and error.errno in _FINAL
            if not self.durable and self._refusals == _MOST_FAILURES:
                self.hopeless = f"{reason}, {_MOST_FAILURES} times, and no checkpoint was saved before"
        kept = "older checkpoints are unchanged" if self.durable else "there is no checkpoint yet"
        self.log(f"warning: {reason}; the training continues, {kept}")


@contextlib.contextmanager
def _undone_if_it_fails(undo: Callable[[], object]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        undo()
        raise


def find_infinite(tensors: dict[str, Any]) -> set[str]:
    """Return the names of tensors with a NaN or an infinity, such as the mask of an attention."""
    names = set()
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.is_meta:
            continue
        # torch cannot add numbers of 8 bits
        values = tensor.float() if tensor.element_size() == 1 else tensor
        # the sum is fast, and finite for nearly all; it may overflow, so that each element decides
        if not torch.isfinite(values.sum()) and not torch.isfinite(values).all():
            names.add(name)
    return names


def describe(error: BaseException, path: str) -> str:
    """Return the text of a write error with its path: "No space left on device (12.0 MB free at PATH)"."""
    return explain_write(error, path) if isinstance(error, OSError | RuntimeError) else str(error)

"""Checkpoints on disk: write them atomically, with a checksum. checked_files.py verifies and reads them.

    FOLDER/step_400.pt         a dictionary of plain types, torch.load(..., weights_only=True)
    FOLDER/step_400.pt.json    its size in bytes, step and run, and the CRC-32 of its bytes

A file appears under its name only when it and its checksum are on the disk (temporary file, fsync, rename,
fsync of the folder): a job that is killed at any moment leaves the files of other names as they were. One
that is killed while it overwrites a checkpoint may leave it with another checksum: then it is refused.
"""

import contextlib
import glob
import hashlib
import io
import json
import os
import shutil
import warnings
import zlib
from collections.abc import Callable, Mapping
from typing import IO, Any, cast

import numpy as np
import torch

from bootfile.ground.files import (
    open_atomic,
    sync_folder,
    write_atomic,
)
from bootfile.ground.results import checkpoint_names, dtensor_folder
from bootfile.records import write_state

CRC = "crc32:"  # a checksum begins with it; that of a file of a sharded checkpoint is a sha256


class Refused(Exception):
    """A checkpoint cannot be used. The message has the reason."""


def name_of(step: int) -> str:
    return f"step_{step}.pt"


def step_of(path: str) -> int:
    """Return the step of the checkpoint with this path."""
    return int(os.path.basename(path).removeprefix("step_").removesuffix(".pt"))


def write(
    path: str, state: dict[str, Any], before_name: Callable[[], object] | None = None, **facts: Any
) -> None:
    """Write a checkpoint atomically, and next to it <path>.json with its checksum and `facts` (plain types).

    state: nested dictionaries and lists of tensors and plain types. before_name: called when the content is
    written, and before the file has its name; what it raises prevents the checkpoint. Raises OSError.
    """
    with open_atomic(path) as file:
        target = _Target(file)
        target.save(state)
        if before_name:
            before_name()
        write_facts(path, facts | target.facts())  # first: so a checkpoint always has a checksum
    # after the renames: without it a power cut may take the new names back
    sync_folder(os.path.dirname(path))


def write_facts(path: str, facts: dict[str, Any]) -> None:
    """Write the .json of a checkpoint: the facts, with a digest that shows if this file itself is damaged."""
    write_atomic(f"{path}.json", seal(facts))


def write_weights(path: str, weights: dict[str, Any]) -> None:
    """Write a plain state_dict atomically, and its size and checksum to state.jsonl. Raises OSError."""
    folder, name = os.path.split(path)
    with open_atomic(path) as file:
        target = _Target(file)
        target.save(weights)
        # before the file is renamed: if the process is killed in between, the old file has an older line
        write_state(folder, {"file": name, **target.facts()})
    sync_folder(folder)


def check_readable(state: Mapping[str, Any]) -> None:
    """Raise ValueError with the name and the type of a part that torch.load(weights_only=True) refuses.
    state: the content of a checkpoint (SavedState). Numbers of NumPy become plain ones."""
    if _is_readable(dict(state)):
        return
    from bootfile.exact.digest import leaves  # only a refusal needs it

    part = "one of its parts"
    rest = {name: value for name, value in state.items() if name != "objects"}
    for name, leaf in [*leaves(state["objects"]), *leaves(rest)]:
        if not _is_readable(leaf):
            part = f"{name}, a {type(leaf).__name__}"
            break
    raise ValueError(f"it cannot hold {part}: use tensors, numbers, text, lists and dictionaries")


def _is_readable(value: Any) -> bool:
    """Return whether torch.load(weights_only=True) of this version reads a value, by writing it to memory."""
    file = io.BytesIO()
    with contextlib.suppress(Exception):  # pickle raises many types
        torch.save(_outline(value), file)
        file.seek(0)
        torch_load(file)
        return True
    return False


def torch_load(file: Any) -> Any:
    """Return what torch.save wrote to a file, on the CPU; nothing in it is executed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # torch 2.1 warns of its own code
        return torch.load(file, map_location="cpu", weights_only=True)


def _outline(value: Any) -> Any:
    """Return a nested value with empty tensors."""
    if isinstance(value, torch.Tensor):
        return torch.empty(0)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key: _outline(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return [_outline(part) for part in value]
    return value


def seal(facts: dict[str, Any]) -> str:
    """Return the content of the .json of a checkpoint: the facts, with a digest of themselves."""
    seal = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return json.dumps(facts | {"seal": seal})


def list_newest_first(folder: str) -> list[str]:
    """Return the paths of the checkpoints in a folder, the highest step first. Raises BadInput."""
    return [os.path.join(folder, name) for name in reversed(checkpoint_names(folder))]


def keep(newest: str, count: int, is_whole: Callable[[str], bool], every: int = 0) -> None:
    """Delete the checkpoints in a folder except the last `count` whole ones, and the old ones of ladder.py.
    A damaged checkpoint is not counted, and is deleted only if there are `count` whole ones.

    newest: the checkpoint that was just written; it stays.
    is_whole: returns whether an older checkpoint is not damaged.
    every: the distance of the old checkpoints that stay, in steps (ladder.py); 0: none stay.
    """
    folder = os.path.dirname(newest)
    stays = {newest}
    paths = list_newest_first(folder)
    for path in paths:
        if len(stays) < count and path not in stays and is_whole(path):
            stays.add(path)
    # with fewer whole ones, a damaged checkpoint may be all that is left of its step
    if len(stays) >= count:
        if every:
            from bootfile.exact import ladder  # most runs keep only the newest ones

            by_step = {step_of(path): path for path in paths}
            kept = ladder.find_kept(by_step, every, lambda step: is_whole(by_step[step]))
            stays |= {by_step[step] for step in kept}
        for path in paths:
            if path not in stays:
                discard(path)
    # the parts are written before the .pt: a job that was killed in between has left parts alone
    for shards in glob.glob(os.path.join(glob.escape(folder), "*.shards")):
        path = f"{shards.removesuffix('.shards')}.pt"
        if not os.path.exists(path):
            discard(path)


def discard(path: str) -> None:
    """Delete a checkpoint, or what a killed job has left of it."""
    folder = dtensor_folder(path)
    # the data first: if the job is killed in between, a .json alone is left, which is not a checkpoint
    for file in (path, f"{path}.json", folder):
        with contextlib.suppress(OSError):
            os.unlink(file)  # a link to the folder of another run, too; a folder itself is deleted below
    shutil.rmtree(folder, ignore_errors=True)


class _Target:
    """A file for torch.save that adds its bytes to a checksum, and keeps the error of the system."""

    def __init__(self, file: IO[bytes]):
        self.flush = file.flush
        self._file = file
        self._error: OSError | None = None
        self._size = 0
        self._crc = 0

    def save(self, state: dict[str, Any]) -> None:
        """Save a state with torch.save. Raises OSError."""
        try:
            torch.save(state, cast("IO[bytes]", self))  # it calls write() and flush() only
        except RuntimeError as error:  # torch raises it if the disk is full, for example
            raise self._error or error from None
        if self._error:
            raise self._error

    def write(self, chunk: bytes | memoryview) -> int:
        try:
            self._file.write(chunk)
        except OSError as error:
            self._error = error
            raise
        self._crc = zlib.crc32(chunk, self._crc)
        self._size += len(chunk)
        return len(chunk)

    def facts(self) -> dict[str, Any]:
        """Return the size and the checksum of what was written."""
        return {"size": self._size, "sum": text_of(self._crc)}


def text_of(crc: int) -> str:
    """Return a CRC-32 as a checkpoint's .json has it."""
    return f"{CRC}{crc:08x}"

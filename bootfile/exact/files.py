"""Checkpoints on disk: write them atomically, verify them by checksum, and refuse damaged ones.

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
import pickle
import re
import shutil
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping
from typing import IO, Any, BinaryIO, cast

import numpy as np
import torch

from bootfile.exact.background import in_parallel
from bootfile.ground.errors import in_one_line
from bootfile.ground.files import (
    explained,
    open_atomic,
    opener,
    read_file,
    sha256_file,
    state_of,
    sync_folder,
    write_atomic,
)
from bootfile.ground.results import checkpoint_names, dtensor_folder
from bootfile.records import write_state

_ZIP = b"PK\3\4"  # the first bytes of a zip file
_TORCHSCRIPT = "constants.pkl"  # a file in an archive of TorchScript
_PIECE = 2**20  # bytes that are read and added at a time
_CRC = "crc32:"  # a checksum begins with it; that of a file of a sharded checkpoint is a sha256
_OF_SHA256 = 64  # characters


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
    write_atomic(f"{path}.json", _sealed(facts))


def write_weights(path: str, weights: dict[str, Any]) -> None:
    """Write a plain state_dict atomically, and its size and checksum to state.jsonl. Raises OSError."""
    folder, name = os.path.split(path)
    with open_atomic(path) as file:
        target = _Target(file)
        target.save(weights)
        # before the file is renamed: if the process is killed in between, the old file has an older line
        write_state(folder, {"file": name, **target.facts()})
    sync_folder(folder)


def sum_file(path: str, is_former: bool = False) -> tuple[int, str]:
    """Return the size of a file in bytes and its checksum (is_former: as before 0.52). Raises Refused."""
    with explained("it cannot be read", kind=Refused), open(path, "rb", opener=opener) as file:
        return os.fstat(file.fileno()).st_size, _sum_bytes(file, is_former)


def verify(path: str) -> dict[str, Any]:
    """Check every byte of a checkpoint and return its facts (facts_of). Raises Refused with the reason."""
    facts = facts_of(path)
    shards = facts.get("shards", {})
    folder = dtensor_folder(path)
    # a link points to the folder of another run, which may change it at any time
    if shards and os.path.islink(folder):
        raise Refused(f"its folder {os.path.basename(folder)} is a link")
    for name, (size, sha256) in shards.items():
        _verify_file(os.path.join(folder, name), size, f"its file {name}", sha256)
    _verify_file(path, facts["size"], "it", facts["sum"])
    return facts


def _verify_file(path: str, size: int, words: str, expected: str) -> None:
    """Raise Refused if a file has another size or checksum. words: the file, in the message."""
    with explained(f"{words} cannot be read", kind=Refused), open(path, "rb", opener=opener) as file:
        # a file that was cut off is refused without reading it
        present = os.fstat(file.fileno()).st_size
        if present != size:
            raise Refused(f"{words} has {present} bytes, expected {size}")
        if len(expected) == _OF_SHA256:
            actual = sha256_file(file)
        else:
            actual = _sum_bytes(file, is_former=not expected.startswith(_CRC))
        if actual != expected:
            raise Refused(f"{words} changed after it was written: the checksum differs")


def facts_of(path: str) -> dict[str, Any]:
    """Return a checkpoint's .json: size (bytes), sum and the facts of write(). Raises Refused."""
    name = os.path.basename(f"{path}.json")
    with explained(f"its checksum {name} cannot be read", kind=Refused):
        content = read_file(f"{path}.json", 2**20)
    facts = parse_facts(content, name)
    match = re.fullmatch(r"step_(\d+)\.pt\.json", name)
    # a copy under the name of another step, which would be chosen as the newest one
    if match and facts.get("step", int(match[1])) != int(match[1]):
        raise Refused(f"it is the checkpoint of step {facts['step']}, not of step {match[1]}")
    return facts


def parse_facts(content: bytes, name: str) -> dict[str, Any]:
    """Return the facts in the content of a checkpoint's .json. name: of this file. Raises Refused."""
    # every failure of this block has one meaning, a damaged file
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
        facts: dict[str, Any] = json.loads(content)
        del facts["seal"]
        shards = facts.get("shards", {})
        pairs = [(facts["size"], facts["sum"]), *shards.values()]
        have_types = all([*map(type, pair)] == [int, str] for pair in pairs)
        # the names become paths: a file from elsewhere must not name one outside of its folder
        are_plain = all(name == os.path.basename(name) and name.strip(".") for name in shards)
        is_whole = _sealed(facts).encode() == content and type(facts.get("keep_every", 0)) is int
        if is_whole and have_types and are_plain:
            return facts
    raise Refused(f"its checksum {name} is damaged")


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
        _torch_load(file)
        return True
    return False


def _torch_load(file: Any) -> Any:
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


def _sealed(facts: dict[str, Any]) -> str:
    seal = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return json.dumps(facts | {"seal": seal})


def read(path: str, whole: bool = True) -> dict[str, Any]:
    """Verify a checkpoint and return its state, as load() does. Raises Refused."""
    # a thread computes the checksum while torch reads the same bytes
    with in_parallel(lambda: verify(path)) as check:
        try:
            return load(path, whole=whole)
        finally:
            check()  # what torch says of a damaged file is not the reason


def load(path: str, most: int = sys.maxsize, whole: bool = True) -> dict[str, Any]:
    """Return the dictionary that torch.save wrote to a file, on the CPU; nothing in it is executed.
    most: its tensors. whole: read the folder of a sharded checkpoint, too; otherwise its sharded tensors are
        meta tensors, and "shards" is the path for dtensor_files.load().
    Raises Refused, also for the formats of torch before 1.6 and for TorchScript archives, which torch.load of
        torch before 2.6 may execute (CVE-2025-32434).
    """
    with explained("it cannot be read", kind=Refused), open(path, "rb", opener=opener) as opened:
        start = opened.read(64)
        size = os.fstat(opened.fileno()).st_size
    # refused by the first bytes: for the other formats torch.load would run their pickle
    if not start.startswith(_ZIP):
        from bootfile.exact import foreign_files

        raise Refused(foreign_files.explain_start(path, start, _ZIP))
    try:
        # what torch would read is looked at before it reads it
        records = torch._C.PyTorchFileReader(path).get_all_records()  # torch.load reads the same list
        # torch.load takes an archive with this file for TorchScript, and may execute it
        if _TORCHSCRIPT in records:
            from bootfile.exact import foreign_files

            raise Refused(foreign_files.explain_script(path))
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(record.file_size for record in archive.infolist())
        # a compressed file may unpack to terabytes: it is refused before torch allocates them
        if len(records) > most or unpacked > size:  # torch.save does not compress
            raise Refused(f"it has {len(records)} records and {size} bytes, and unpacks to {unpacked} bytes")
        state = _torch_load(path)
        if isinstance(state, dict) and "shards" in state:
            state["shards"] = path
            if whole:
                from bootfile.exact import dtensor_files

                state["objects"] = dtensor_files.load_whole(state.pop("shards"), state["objects"])
    except Refused:
        raise
    except pickle.UnpicklingError as error:
        from bootfile.exact import foreign_files

        raise Refused(foreign_files.explain_objects(path)) from error
    except Exception as error:  # a damaged file can make torch raise any exception
        raise Refused(f"torch cannot load it: {in_one_line(error)}") from error
    if not isinstance(state, dict):
        raise Refused(f"it holds a {type(state).__name__}, not a dictionary")
    return state


def list_newest_first(folder: str) -> list[str]:
    """Return the paths of the checkpoints in a folder, the highest step first. Raises BadInput."""
    return [os.path.join(folder, name) for name in reversed(checkpoint_names(folder))]


def keep(newest: str, count: int, whole: dict[str, tuple[Any, ...]], every: int = 0) -> None:
    """Delete the checkpoints in a folder except the last `count` whole ones, and the old ones of ladder.py.
    A damaged checkpoint is not counted, and is deleted only if there are `count` whole ones.

    newest: the checkpoint that was just written; it stays.
    whole: the checkpoints that are known to be whole, path -> identity; updated, so each file is read once.
    every: the distance of the old checkpoints that stay, in steps (ladder.py); 0: none stay.
    """
    folder = os.path.dirname(newest)
    stays = {newest}
    whole[newest] = state_of(newest)  # this process has just written it: it is not read again
    paths = list_newest_first(folder)
    for path in paths:
        if len(stays) < count and path not in stays and _is_whole(path, whole):
            stays.add(path)
    # with fewer whole ones, a damaged checkpoint may be all that is left of its step
    if len(stays) >= count:
        if every:
            from bootfile.exact import ladder  # most runs keep only the newest ones

            by_step = {step_of(path): path for path in paths}
            kept = ladder.find_kept(by_step, every, lambda step: _is_whole(by_step[step], whole))
            stays |= {by_step[step] for step in kept}
        for path in paths:
            if path not in stays:
                discard(path)
    # the parts are written before the .pt: a job that was killed in between has left parts alone
    for shards in glob.glob(os.path.join(glob.escape(folder), "*.shards")):
        path = f"{shards.removesuffix('.shards')}.pt"
        if not os.path.exists(path):
            discard(path)


def _is_whole(path: str, known: dict[str, tuple[Any, ...]]) -> bool:
    """Return whether a checkpoint is not damaged. known: path -> identity of those that were read before."""
    if known.get(path) != state_of(path):
        try:
            verify(path)
        except Refused:
            return False
        known[path] = state_of(path)
    return True


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
        return {"size": self._size, "sum": _text(self._crc)}


def _sum_bytes(file: BinaryIO, is_former: bool) -> str:
    if is_former:  # a later version deletes this with former.py
        from bootfile.exact.digest import add_bytes

        added, place = 0, 0
        while piece := file.read(_PIECE):
            added += int(add_bytes(np.frombuffer(piece, np.uint8), place))
            place += len(piece)
        return f"{added % 2**64:016x}"
    crc = 0
    while piece := file.read(_PIECE):
        crc = zlib.crc32(piece, crc)
    return _text(crc)


def _text(crc: int) -> str:
    return f"{_CRC}{crc:08x}"

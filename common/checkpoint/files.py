"""Checkpoints on disk: write them atomically, verify them by checksum, and refuse damaged ones.

    FOLDER/step_400.pt         a dictionary of plain types, torch.load(..., weights_only=True)
    FOLDER/step_400.pt.json    its sha256, size in bytes, step and run
    FOLDER/latest              the name of the newest checkpoint, written after that checkpoint is on the disk

A file appears under its name only when it and its checksum are on the disk (temporary file, fsync, rename,
fsync of the folder). So a job that is killed at any moment leaves the files of other names as they were.
Overwriting a checkpoint needs two renames, for the checksum and the data. If the job is killed between them,
this checkpoint is refused.
"""

import contextlib
import hashlib
import io
import json
import os
import pickle
import re
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterable
from typing import IO, Any, cast

import numpy as np
import torch

from common.ground.exits import BadInput
from common.ground.files import open_atomic, opener, sha256_file, sweep, sync_folder, write_atomic

LATEST = "latest"
_NAME = re.compile(r"step_(\d+)\.pt")
Chunk = bytes | memoryview  # the types that torch.save writes
_TAIL = 4096  # bytes
_ZIP, _TORCHSCRIPT = b"PK\3\4", "constants.pkl"
_PAGE = "it is an HTML or XML page, as a failed download leaves it"


class Refused(Exception):
    """A checkpoint cannot be used. The message has the reason."""


def name_of(step: int) -> str:
    return f"step_{step}.pt"


def write(path: str, state: dict, **facts: Any) -> None:
    """Write a checkpoint atomically, and next to it <path>.json with its checksum and `facts` (plain types).

    state: nested dictionaries and lists of tensors and plain types. Raises OSError with the system's reason.
    Files of other names are not touched.
    """
    folder = os.path.dirname(path)
    checksum = hashlib.sha256()
    size = 0

    def record(chunk: Chunk) -> None:
        nonlocal size
        checksum.update(chunk)
        size += len(chunk)

    with open_atomic(path) as file:
        _save(state, file, record)
        # The checksum is written first, so a checkpoint always has one.
        write_atomic(f"{path}.json", _sealed({"sha256": checksum.hexdigest(), "size": size} | facts))
    sync_folder(folder)


def write_weights(path: str, weights: dict) -> None:
    """Write a plain state_dict atomically, without a checksum. Raises OSError."""
    with open_atomic(path) as file:
        _save(weights, file, lambda chunk: None)
    sync_folder(os.path.dirname(path))


def verify(path: str) -> dict:
    """Check every byte of a checkpoint and return its facts (facts_of). Raises Refused with the reason."""
    facts = facts_of(path)
    try:
        with open(path, "rb", opener=opener) as file:
            start, size = file.read(64), os.fstat(file.fileno()).st_size
            if not size:
                raise Refused("it is empty")
            if start.lstrip()[:1] == b"<":
                raise Refused(_PAGE)
            if size != facts["size"]:
                kind = "truncated" if size < facts["size"] else "too long"
                raise Refused(f"it is {kind}: {size} bytes instead of {facts['size']}")
            file.seek(0)
            if sha256_file(file) == facts["sha256"]:
                return facts
            file.seek(max(0, size - _TAIL))
            if not file.read().strip(b"\0"):
                raise Refused("it ends in zeros: its last blocks were never written")
    except OSError as error:
        raise Refused(f"it cannot be read: {error.strerror}") from error
    raise Refused("its content changed after it was written: the sha256 differs")


def facts_of(path: str) -> dict:
    """Return the content of a checkpoint's .json: sha256, size (bytes) and the facts of write(). Raises
    Refused."""
    name = os.path.basename(f"{path}.json")
    try:
        with open(f"{path}.json", encoding="utf-8", opener=opener) as file:
            text = file.read(2**20)
        facts = json.loads(text)
        del facts["seal"]
        if _sealed(facts) == text:
            return facts
    except FileNotFoundError:
        raise Refused(f"its checksum {name} is missing") from None
    except OSError as error:
        raise Refused(f"its checksum {name} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise Refused(f"its checksum {name} is damaged")


def find_unreadable(value: Any, name: str = "") -> str:
    """Return the name and the type of a part that torch.load(weights_only=True) refuses; "" if all are read.

    value: nested dictionaries, lists and tuples. Tensors are not read. Numbers of NumPy become plain ones.
    """
    file = io.BytesIO()
    try:
        torch.save(_outline(value), file)
        file.seek(0)
        _torch_load(file)
        return ""
    except Exception:  # pickle raises many types
        parts: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else ()
        parts = enumerate(value) if isinstance(value, list | tuple) else parts
        inner = (find_unreadable(each, f"{name}.{part}".lstrip(".")) for part, each in parts)
        return next(filter(None, inner), f"{name}, a {type(value).__name__}")


def _torch_load(file: str | IO[bytes]) -> Any:
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
        return {key: _outline(each) for key, each in value.items()}
    return [_outline(each) for each in value] if type(value) in (list, tuple) else value


def _sealed(facts: dict) -> str:
    """Return the facts as JSON, with a digest that shows if the checksum file itself is damaged."""
    seal = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return json.dumps(facts | {"seal": seal})


def read(path: str) -> dict:
    """Verify a checkpoint and return its state, on the CPU; nothing in it is executed. Raises Refused."""
    verify(path)
    return load(path)


def check_readable(path: str) -> None:
    """Read a checkpoint that was written just now; if this fails, delete it and raise ValueError."""
    try:
        read(path)
    except Refused as reason:
        _discard(path)
        raise ValueError(f"it cannot be read back: {reason}") from reason


def load(path: str, most: int = sys.maxsize) -> dict:
    """Return the dictionary that torch.save wrote to a file, on the CPU; nothing in it is executed.

    most: its tensors. Raises Refused, also for the formats of torch before 1.6 and for TorchScript archives:
    torch.load of torch before 2.6 may execute these (CVE-2025-32434).
    """
    try:
        with open(path, "rb", opener=opener) as file:
            start, size = file.read(64), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise Refused(f"it cannot be read: {error.strerror}") from error
    if not start.startswith(_ZIP):
        if start.lstrip()[:1] == b"<":
            raise Refused(_PAGE)
        raise Refused(f"it begins with {start[:8]!r}, expected {_ZIP!r}: torch.save writes a zip file")
    try:
        records = torch._C.PyTorchFileReader(path).get_all_records()  # torch.load reads the same list
        if _TORCHSCRIPT in records:
            raise Refused("it is a TorchScript archive, a program: save model.state_dict()")
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(record.file_size for record in archive.infolist())
        if len(records) > most or unpacked > size:  # torch.save does not compress
            raise Refused(f"it has {len(records)} records and {size} bytes, and unpacks to {unpacked} bytes")
        state = _torch_load(path)
    except Refused:
        raise
    except pickle.UnpicklingError as error:
        raise Refused(
            "torch cannot load it: it is damaged, or holds objects that are not tensors or plain types (save "
            "model.state_dict(), not the model)"
        ) from error
    except Exception as error:  # a damaged file can make torch raise any exception
        raise Refused(f"torch cannot load it: {_first_line(error)}") from error
    if not isinstance(state, dict):
        raise Refused(f"it holds a {type(state).__name__}, not a dictionary")
    return state


def list_newest_first(folder: str) -> list[str]:
    """Return the paths of the checkpoints in a folder, in the order in which to try them: first those of the
    run of `latest`, then those of other runs; within each, the highest step first."""
    try:
        names = [name for name in os.listdir(folder) if _NAME.fullmatch(name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise BadInput(f"checkpoints in {folder} cannot be listed: {error.strerror}") from error
    current = _run_of(os.path.join(folder, _latest(folder)))

    def rank(name: str) -> tuple[bool, int]:
        return _run_of(os.path.join(folder, name)) == current, int(
            name.removeprefix("step_").removesuffix(".pt")
        )

    return [os.path.join(folder, name) for name in sorted(names, key=rank, reverse=True)]


def keep(folder: str, run: str, count: int, whole: dict[str, tuple]) -> None:
    """Delete old checkpoints: those of other runs, and those of this run except the last `count` whole ones.

    Temporary files of killed writers are deleted too. The checkpoint that `latest` names stays. A damaged
    checkpoint is not counted, and is deleted only if there are `count` whole ones.

    folder: the folder of the checkpoints.
    run: the id of this run.
    count: the number of whole checkpoints to keep.
    whole: the checkpoints that are known to be whole, path -> identity; updated, so each file is read once.
    """
    latest = os.path.join(folder, _latest(folder))
    whole[latest] = _identity(latest)
    own, stays = [], {latest}
    for path in list_newest_first(folder):
        if _run_of(path) in (run, None):
            own.append(path)
        else:
            _discard(path)
    for path in own:
        if len(stays) < count and path not in stays and _is_whole(path, whole):
            stays.add(path)
    if len(stays) >= count:
        for path in own:
            if path not in stays:
                _discard(path)
    sweep(folder)


def _is_whole(path: str, known: dict[str, tuple]) -> bool:
    if known.get(path) != _identity(path):
        try:
            verify(path)
        except Refused:
            return False
        known[path] = _identity(path)
    return True


def _identity(path: str) -> tuple:
    """Return a value that changes when the file is replaced, truncated or written to."""
    with contextlib.suppress(OSError):
        status = os.stat(path)
        return status.st_ino, status.st_size, status.st_mtime_ns
    return ()


def _discard(path: str) -> None:
    _remove(path)
    _remove(f"{path}.json")


def _latest(folder: str) -> str:
    try:
        with open(os.path.join(folder, LATEST), encoding="utf-8", opener=opener) as file:
            return os.path.basename(file.read(256).strip())
    except (OSError, UnicodeDecodeError):
        return ""


def _run_of(path: str) -> str | None:
    try:
        return facts_of(path).get("run")
    except Refused:
        return None


def _save(state: dict, file: IO[bytes], record: Callable[[Chunk], object]) -> None:
    """Save into a file with torch.save. record: called with every chunk that is written."""
    target = _Recorded(file, record)
    try:
        torch.save(state, cast("IO[bytes]", target))  # it calls write() and flush() only
    except RuntimeError as error:  # torch raises it if the disk is full, for example
        raise target.error or error from None
    if target.error:
        raise target.error
    file.flush()
    os.fsync(file.fileno())  # before the checksum appears


class _Recorded:
    """A file for torch.save that passes every chunk to `record` and keeps the error of the system."""

    def __init__(self, file: IO[bytes], record: Callable[[Chunk], object]):
        self.file, self.record = file, record
        self.error: OSError | None = None

    def write(self, chunk: Chunk) -> int:
        try:
            written = self.file.write(chunk)
        except OSError as error:
            self.error = error
            raise
        self.record(chunk)
        return written

    def flush(self) -> None:
        self.file.flush()


def _remove(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)

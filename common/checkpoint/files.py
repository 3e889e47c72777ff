"""Checkpoints on disk: whole and proven, or refused by name.

    FOLDER/step_400.pt         a dictionary of plain types, torch.load(..., weights_only=True)
    FOLDER/step_400.pt.json    its sha256, size in bytes, step and run
    FOLDER/latest              the name of the newest, moved when that is on the disk

A file appears under its name only when it and its checksum are on the disk (temporary file, fsync, rename,
fsync of the folder), so a job killed at any moment leaves the files of other names as they were. Writing over
a name is two renames, checksum and data: killed between them, that one checkpoint is refused.
"""

import contextlib
import hashlib
import json
import os
import pickle
import re
from collections.abc import Callable
from typing import IO, Any, cast

import torch

from common.exits import BadInput
from common.files import open_atomic, opener, sha256_file, sweep, sync_folder, write_atomic

LATEST = "latest"
_NAME = re.compile(r"step_(\d+)\.pt")
Chunk = bytes | memoryview  # what torch.save writes
_TAIL = 4096  # bytes
_ZIP, _TORCHSCRIPT = b"PK\3\4", "constants.pkl"
_PAGE = "it is an HTML or XML page, as a failed download leaves it"


class Refused(Exception):
    """A checkpoint that cannot be used. The message says why."""


def name_of(step: int) -> str:
    return f"step_{step}.pt"


def write(path: str, state: dict, **facts: Any) -> None:
    """Make `path` appear, whole, with its checksum and these facts (plain types) beside it.

    state: nested dictionaries and lists of tensors and plain types. Raises OSError, with the reason that the
    system gave; files of other names are not touched.
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
        # The checksum first: a file under its own name has one.
        write_atomic(f"{path}.json", _sealed({"sha256": checksum.hexdigest(), "size": size} | facts))
    sync_folder(folder)


def write_weights(path: str, weights: dict) -> None:
    """Make `path` appear, whole: a plain state_dict, without a checksum. Raises OSError."""
    with open_atomic(path) as file:
        _save(weights, file, lambda chunk: None)
    sync_folder(os.path.dirname(path))


def verify(path: str) -> dict:
    """The facts beside a checkpoint that is what was written, byte for byte. Raises Refused with why."""
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
    raise Refused("its bytes are not those that were written: the sha256 differs")


def facts_of(path: str) -> dict:
    """What is recorded beside a checkpoint: sha256, size (bytes), what write() got. Raises Refused."""
    name = os.path.basename(f"{path}.json")
    try:
        with open(f"{path}.json", encoding="utf-8", opener=opener) as file:
            text = file.read()
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


def _sealed(facts: dict) -> str:
    """As JSON, with a digest of itself: a checksum that changed is not to be believed either."""
    seal = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return json.dumps(facts | {"seal": seal})


def read(path: str) -> dict:
    """The state in a checkpoint, on the CPU, after verify(); nothing in it is executed. Raises Refused."""
    verify(path)
    return load(path)


def load(path: str) -> dict:
    """Return the dictionary that torch.save wrote to a file, on the CPU; nothing in it is executed. Raises
    Refused, also for the formats of torch before 1.6 and for TorchScript archives: torch.load of torch before
    2.6 may execute these (CVE-2025-32434)."""
    try:
        with open(path, "rb") as file:
            start = file.read(64)
    except OSError as error:
        raise Refused(f"it cannot be read: {error.strerror}") from error
    if not start.startswith(_ZIP):
        if start.lstrip()[:1] == b"<":
            raise Refused(_PAGE)
        raise Refused(f"it begins with {start[:8]!r}, expected {_ZIP!r}: torch.save writes a zip file")
    try:
        records = torch._C.PyTorchFileReader(path).get_all_records()  # what torch.load looks at, too
        state = None if _TORCHSCRIPT in records else torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise Refused(
            "torch cannot load it: it is damaged, or holds objects that are not tensors or plain types (save "
            "model.state_dict(), not the model)"
        ) from error
    except Exception as error:  # whatever a damaged file makes torch raise
        raise Refused(f"torch cannot load it: {_first_line(error)}") from error
    if _TORCHSCRIPT in records:
        raise Refused("it is a TorchScript archive, a program: save model.state_dict()")
    if not isinstance(state, dict):
        raise Refused(f"it holds a {type(state).__name__}, not a dictionary")
    return state


def found(folder: str) -> list[str]:
    """Paths of the checkpoints in a folder, the one to try first at the front: those of the run that `latest`
    belongs to, then the others, each by step, highest first."""
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
    """Remove the checkpoints of other runs, all but the last `count` whole ones of this run, and what killed
    writers left. The one that `latest` names was written last, and stays. A damaged one does not count, and
    is removed only if there are `count` whole ones.

    whole: what is known to be whole, path -> identity of the file; updated, so each file is read once.
    """
    latest = os.path.join(folder, _latest(folder))
    whole[latest] = _identity(latest)
    own, stays = [], {latest}
    for path in found(folder):
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
    """Another one whenever the file is replaced, cut or written to."""
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return found.st_ino, found.st_size, found.st_mtime_ns
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
        torch.save(state, cast("IO[bytes]", target))  # which calls write() and flush()
    except RuntimeError as error:  # what torch makes of a full disk, for one
        raise target.error or error from None
    if target.error:
        raise target.error
    file.flush()
    os.fsync(file.fileno())  # before the checksum appears


class _Recorded:
    """A file for torch.save that shows every chunk to `record`, and keeps the system's own error."""

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

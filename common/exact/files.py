"""Checkpoints on disk: write them atomically, verify them by checksum, and refuse damaged ones.

    FOLDER/step_400.pt         a dictionary of plain types, torch.load(..., weights_only=True)
    FOLDER/step_400.pt.json    its sha256, size in bytes, step and run

A file appears under its name only when it and its checksum are on the disk (temporary file, fsync, rename,
fsync of the folder). So a job that is killed at any moment leaves the files of other names as they were.
Overwriting a checkpoint needs two renames, for the checksum and the data. If the job is killed between them,
this checkpoint is refused.
"""

import contextlib
import glob
import hashlib
import io
import json
import os
import pickle
import shutil
import sys
import warnings
import zipfile
from typing import IO, Any, cast

import numpy as np
import torch

from common.exact.digest import leaves
from common.ground.files import (
    explained,
    open_atomic,
    opener,
    read_file,
    sha256_file,
    state_of,
    sync_folder,
    write_atomic,
)
from common.ground.results import checkpoint_names, dtensor_folder

CONVERT = "python -c \"import torch; torch.save({}, 'new.pth')\""  # of a state_dict
_ZIP, _TORCHSCRIPT = b"PK\3\4", "constants.pkl"
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # in names of tensors
_OLD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # the first bytes of torch before 1.6


class Refused(Exception):
    """A checkpoint cannot be used. The message has the reason."""


def name_of(step: int) -> str:
    return f"step_{step}.pt"


def step_of(path: str) -> int:
    """Return the step of the checkpoint with this path."""
    return int(os.path.basename(path).removeprefix("step_").removesuffix(".pt"))


def write(path: str, state: dict, **facts: Any) -> None:
    """Write a checkpoint atomically, and next to it <path>.json with its checksum and `facts` (plain types).

    state: nested dictionaries and lists of tensors and plain types. Raises OSError with the system's reason.
    Files of other names are not touched.
    """
    with open_atomic(path) as file:
        digest = _save(state, file)
        # The checksum is written first, so a checkpoint always has one.
        write_facts(path, {"sha256": digest, "size": file.tell()} | facts)
    sync_folder(os.path.dirname(path))


def write_facts(path: str, facts: dict) -> None:
    """Write the .json of a checkpoint: the facts, with a digest that shows if this file itself is damaged."""
    write_atomic(f"{path}.json", _sealed(facts))


def write_weights(path: str, weights: dict) -> None:
    """Write a plain state_dict atomically, without a checksum. Raises OSError."""
    with open_atomic(path) as file:
        _save(weights, file)
    sync_folder(os.path.dirname(path))


def plain_names(model: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a model with the names that it has without wrappers of the model or its parts."""
    parallel = torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel
    modules = dict(model.named_modules(remove_duplicate=False))

    def plain(name: str) -> str:
        parts = name.split(".")
        owners = (modules.get(".".join(parts[:place])) for place in range(len(parts)))
        pairs = zip(parts, owners, strict=True)
        return ".".join(each for each, own in pairs if each not in WRAPPERS and not isinstance(own, parallel))

    return {plain(name): each for name, each in state.items()}


def verify(path: str) -> dict:
    """Check every byte of a checkpoint and return its facts (facts_of). Raises Refused with the reason."""
    facts = facts_of(path)
    folder = dtensor_folder(path)
    files = {os.path.join(folder, name): each for name, each in facts.get("shards", {}).items()}
    for each, (size, sha256) in ({path: (facts["size"], facts["sha256"])} | files).items():
        it = "it" if each == path else f"its file {os.path.basename(each)}"
        try:
            with open(each, "rb", opener=opener) as file:
                if (own := os.fstat(file.fileno()).st_size) != size:
                    raise Refused(f"{it} has {own} bytes, expected {size}")
                if sha256_file(file) != sha256:
                    raise Refused(f"{it} changed after it was written: the sha256 differs")
        except OSError as error:
            raise Refused(f"{it} cannot be read: {error.strerror}") from error
    return facts


def facts_of(path: str) -> dict:
    """Return the content of a checkpoint's .json: sha256, size (bytes) and the facts of write(). Raises
    Refused."""
    name = os.path.basename(f"{path}.json")
    try:
        content = read_file(f"{path}.json", 2**20)
    except FileNotFoundError:
        raise Refused(f"its checksum {name} is missing") from None
    except OSError as error:
        raise Refused(f"its checksum {name} cannot be read: {error.strerror}") from error
    return parse_facts(content, name)


def parse_facts(content: bytes, name: str) -> dict:
    """Return the facts in the content of a checkpoint's .json. name: of this file. Raises Refused."""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        facts = json.loads(content)
        del facts["seal"]
        is_plain = all(name == os.path.basename(name) for name in facts.get("shards", {}))
        types = type(facts["size"]), type(facts["sha256"])
        if _sealed(facts).encode() == content and types == (int, str) and is_plain:
            return facts
    raise Refused(f"its checksum {name} is damaged")


def check_readable(objects: dict) -> None:
    """Raise ValueError with the name and the type of a part that torch.load(weights_only=True) refuses.

    objects: nested dictionaries, lists and tuples. Tensors are not read. Numbers of NumPy become plain ones.
    """
    if not _is_readable(objects):
        names = (
            f"{name}, a {type(each).__name__}" for name, each in leaves(objects) if not _is_readable(each)
        )
        name = next(names, "one of its parts")
        raise ValueError(f"it cannot hold {name}: use tensors, numbers, text, lists and dictionaries")


def _is_readable(value: Any) -> bool:
    file = io.BytesIO()
    with contextlib.suppress(Exception):  # pickle raises many types
        torch.save(_outline(value), file)
        file.seek(0)
        _torch_load(file)
        return True
    return False


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
    seal = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    return json.dumps(facts | {"seal": seal})


def read(path: str, whole: bool = True) -> dict:
    """Verify a checkpoint and return its state, as load() does. Raises Refused."""
    verify(path)
    return load(path, whole=whole)


def load(path: str, most: int = sys.maxsize, whole: bool = True) -> dict:
    """Return the dictionary that torch.save wrote to a file, on the CPU; nothing in it is executed.

    most: its tensors.
    whole: read the folder of a sharded checkpoint, too. Otherwise its sharded tensors are meta tensors, and
        "shards" is the path for dtensor_files.load().
    Raises Refused, also for the formats of torch before 1.6 and for TorchScript archives: torch.load of torch
    before 2.6 may execute these (CVE-2025-32434).
    """
    try:
        with open(path, "rb", opener=opener) as file:
            start, size = file.read(64), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise Refused(f"it cannot be read: {error.strerror}") from error
    if not start.startswith(_ZIP):  # an HTML page shows here that a download has failed
        reason = f"it begins with {start[:15]!r}, expected {_ZIP!r}: torch.save writes a zip file"
        if start.startswith(_OLD):
            reason += "; it is of torch before 1.6: " + CONVERT.format(
                f"torch.load({path!r}, weights_only=True)"
            )
        elif start.startswith(b"version https://git-lfs"):
            reason += "; it is a pointer of Git LFS: git lfs pull"
        raise Refused(reason)
    try:
        records = torch._C.PyTorchFileReader(path).get_all_records()  # torch.load reads the same list
        if _TORCHSCRIPT in records:
            script = CONVERT.format(f"torch.jit.load({path!r}).state_dict()")
            raise Refused(
                f"it is a TorchScript archive, a program: save model.state_dict(); if you trust it: {script}"
            )
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(record.file_size for record in archive.infolist())
        if len(records) > most or unpacked > size:  # torch.save does not compress
            raise Refused(f"it has {len(records)} records and {size} bytes, and unpacks to {unpacked} bytes")
        state = _torch_load(path)
        if isinstance(state, dict) and "shards" in state:
            state["shards"] = path
            if whole:
                from common.exact import dtensor_files

                state["objects"] = dtensor_files.load_whole(state.pop("shards"), state["objects"])
    except Refused:
        raise
    except pickle.UnpicklingError as error:
        raise Refused(
            "torch cannot load it: it is damaged, or holds objects that are not tensors or plain types (save "
            "model.state_dict(), not the model). If you trust it, with its modules on PYTHONPATH: "
            + CONVERT.format(f"torch.load({path!r}, weights_only=False).state_dict()")
            + " (of a dictionary: ['state_dict'], for example, in place of .state_dict())"
        ) from error
    except Exception as error:  # a damaged file can make torch raise any exception
        raise Refused(f"torch cannot load it: {first_line(error)}") from error
    if not isinstance(state, dict):
        raise Refused(f"it holds a {type(state).__name__}, not a dictionary")
    return state


def list_newest_first(folder: str) -> list[str]:
    """Return the paths of the checkpoints in a folder, the highest step first."""
    with explained(f"checkpoints in {folder} cannot be listed"):
        return [os.path.join(folder, name) for name in reversed(checkpoint_names(folder))]


def keep(newest: str, count: int, whole: dict[str, tuple]) -> None:
    """Delete the checkpoints in a folder except the last `count` whole ones.

    A damaged checkpoint is not counted, and is deleted only if there are `count` whole ones.

    newest: the checkpoint that was just written; it stays.
    count: the number of whole checkpoints to keep.
    whole: the checkpoints that are known to be whole, path -> identity; updated, so each file is read once.
    """
    folder, stays = os.path.dirname(newest), {newest}
    whole[newest] = state_of(newest)
    paths = list_newest_first(folder)
    for path in paths:
        if len(stays) < count and path not in stays and _is_whole(path, whole):
            stays.add(path)
    for path in paths if len(stays) >= count else ():
        if path not in stays:
            discard(path)
    for each in glob.glob(os.path.join(glob.escape(folder), "*.shards")):  # left by a job that was killed
        if not os.path.exists(path := f"{each.removesuffix('.shards')}.pt"):
            discard(path)


def _is_whole(path: str, known: dict[str, tuple]) -> bool:
    if known.get(path) != state_of(path):
        try:
            verify(path)
        except Refused:
            return False
        known[path] = state_of(path)
    return True


def discard(path: str) -> None:
    """Delete a checkpoint, or what a killed job has left of it."""
    for each in (path, f"{path}.json"):
        with contextlib.suppress(OSError):
            os.unlink(each)
    shutil.rmtree(dtensor_folder(path), ignore_errors=True)


def _save(state: dict, file: IO[bytes]) -> str:
    """Save into a file with torch.save, and return the sha256 of what was written."""
    target = _Hashed(file)
    try:
        torch.save(state, cast("IO[bytes]", target))  # it calls write() and flush() only
    except RuntimeError as error:  # torch raises it if the disk is full, for example
        raise target.error or error from None
    if target.error:
        raise target.error
    return target.sha256.hexdigest()


class _Hashed:
    """A file for torch.save that computes the sha256 and keeps the error of the system."""

    def __init__(self, file: IO[bytes]):
        self.file, self.flush, self.sha256 = file, file.flush, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, chunk: bytes | memoryview) -> int:
        try:
            self.file.write(chunk)
        except OSError as error:
            self.error = error
            raise
        self.sha256.update(chunk)
        return len(chunk)


def first_line(error: Exception) -> str:
    """Return the class of an error and the first line of its text."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"

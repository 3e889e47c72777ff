"""Verify checkpoints by their checksums, read them, and refuse damaged ones.

A new run has no checkpoint to read: a start loads this module when it finds one, and a save when the folder
has one that this process has not written.
"""

import contextlib
import json
import os
import pickle
import re
import sys
import zipfile
import zlib
from typing import Any, BinaryIO

import numpy as np
import torch

from bootfile.exact.background import in_parallel
from bootfile.exact.files import CRC, Refused, seal, text_of, torch_load
from bootfile.ground.errors import in_one_line
from bootfile.ground.files import explained, opener, read_file, sha256_file
from bootfile.ground.results import dtensor_folder

_ZIP = b"PK\3\4"  # the first bytes of a zip file
_TORCHSCRIPT = "constants.pkl"  # a file in an archive of TorchScript
_PIECE = 2**20  # bytes that are read and added at a time
_OF_SHA256 = 64  # characters


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
            actual = _sum_bytes(file, is_former=not expected.startswith(CRC))
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
        is_whole = seal(facts).encode() == content and type(facts.get("keep_every", 0)) is int
        if is_whole and have_types and are_plain:
            return facts
    raise Refused(f"its checksum {name} is damaged")


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
        state = torch_load(path)
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


def sum_file(path: str, is_former: bool = False) -> tuple[int, str]:
    """Return the size of a file in bytes and its checksum (is_former: as before 0.52). Raises Refused."""
    with explained("it cannot be read", kind=Refused), open(path, "rb", opener=opener) as file:
        return os.fstat(file.fileno()).st_size, _sum_bytes(file, is_former)


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
    return text_of(crc)

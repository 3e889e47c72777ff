"""The samples that a run has left out of all its batches (--without), in removed.txt of its output folder:
one id a line."""

import hashlib
import os

import numpy as np

from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained, read_file, write_atomic
from bootfile.ground.numbers import counted

FILE = "removed.txt"
_MOST = 2**30  # bytes of a file of ids


def parse(option: str, path: str) -> np.ndarray:
    """Return the ids in the file of an option, ascending, each once: int64 [n]. Empty lines, and lines that
    begin with #, do not count. Raises BadInput."""
    with explained(f"{option}: cannot read {path}"):
        content = read_file(path, _MOST)
    ids = set()
    for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        # 18 digits fit into int64
        if not text.isdecimal() or len(text) > 18:
            raise BadInput(
                f"{option} {path}: line {number} is {text[:40]!r}: expected the id of a sample, such as 17 "
                "(`launch data RUN --sample FILE` shows the id of an image)"
            )
        ids.add(int(text))
    if not ids:
        raise BadInput(f"{option} {path}: the file has no id: expected one on each line")
    return np.array(sorted(ids), np.int64)


def read(folder: str) -> np.ndarray:
    """Return the ids of the samples that a run has left out, int64 [n]; [0] for another run. Raises
    BadInput."""
    path = os.path.join(folder, FILE)
    if not os.path.exists(path):
        return np.zeros(0, np.int64)
    return parse("removed samples", path)


def write(folder: str, ids: np.ndarray) -> None:
    """Write the file of a run."""
    content = "".join(f"{id}\n" for id in ids.tolist())
    write_atomic(os.path.join(folder, FILE), content.encode())


def describe(ids: np.ndarray) -> str | None:
    """Return the list in short, as checkpoints and messages have it: "3 samples (1f0c...)"; None for []."""
    if not len(ids):
        return None
    digest = hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()[:12]
    return f"{count(len(ids))} ({digest})"


def count(samples: int) -> str:
    """Return "1 sample" or "2 samples"."""
    return counted(samples, "sample")

"""Leave samples out of the batches of a run: the others keep their batch, their crops and their seeds.

FOLDER/removed.txt     their ids, one on each line (--without)
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained, read_file, write_atomic
from bootfile.ground.numbers import counted
from bootfile.sampling.sampler import BatchSampler

REMOVED = "removed.txt"
_MOST = 2**30  # bytes of a file


class Removal:
    """The samples that the batches of a loader do not have: int64 [n]. Loader.removal and Plan.removal have
    one."""

    def __init__(self, ids: np.ndarray):
        self.ids = ids
        self._counted: tuple[int, int] | None = None  # (step, parts) of _counts
        self._counts: tuple[int, ...] = ()

    def find_rest(self, ids: np.ndarray) -> np.ndarray:
        """Return which samples of a batch stay, bool [n]. ids: int64 [n]."""
        return np.isin(ids, self.ids, invert=True)

    def cut(self, draws: Iterable[tuple[np.ndarray, Any]]) -> Iterator[tuple[np.ndarray, Any]]:
        """Yield the draws of a sampler (BatchSampler.draws) with the ids that stay. If none of a batch stays,
        it has all: the loop gets a batch, and what it computes is thrown away."""
        for ids, epoch in draws:
            rest = self.find_rest(ids)
            rest |= not rest.any()
            yield ids[rest], epoch[rest] if np.ndim(epoch) else epoch

    def takes_all(self, ids: np.ndarray) -> bool:
        """Return whether all samples of a batch are removed. cut() yields such a batch with all its ids."""
        return len(ids) > 0 and not self.find_rest(ids).any()

    def count(self, sampler: BatchSampler, step: int, parts: int = 1) -> tuple[int, ...]:
        """Return how many samples stay in each of the equal parts of a step, over all ranks."""
        if self._counted != (step, parts):  # a loop asks several times in a step
            ids = sampler.for_rank(0, 1).batch(step - 1)
            rests = np.array_split(self.find_rest(ids), parts)
            self._counts = tuple(int(rest.sum()) for rest in rests)
            self._counted = (step, parts)
        return self._counts


def parse_ids(option: str, path: str) -> np.ndarray:
    """Return the ids in the file of an option, ascending, each once: int64 [n]. Empty lines, and lines that
    begin with #, do not count. Raises BadInput."""
    with explained(f"{option}: cannot read {path}"):
        content = read_file(path, _MOST)
    lines = [line.strip() for line in content.decode("utf-8-sig", "replace").splitlines()]
    ids = set()
    for number, text in enumerate(lines, 1):
        if text.isdecimal() and len(text) <= 18:  # 18 digits fit into int64
            ids.add(int(text))
        elif text and not text.startswith("#"):
            raise BadInput(
                f"{option} {path}: line {number} is {text[:40]!r}: expected the id of a sample, such as 17 "
                "(`launch data RUN --sample FILE` shows the id of an image)"
            )
    if not ids:
        raise BadInput(f"{option} {path}: the file has no id: expected one on each line")
    return np.array(sorted(ids), np.int64)


def read_removed(folder: str) -> np.ndarray:
    """Return the ids of the samples that a run has left out of all its batches, int64 [n]; [0] for another
    run. Raises BadInput."""
    path = os.path.join(folder, REMOVED)
    return parse_ids("removed samples", path) if os.path.exists(path) else np.zeros(0, np.int64)


def write_removed(folder: str, ids: np.ndarray) -> None:
    """Write the samples that a run leaves out. Raises OSError."""
    write_atomic(os.path.join(folder, REMOVED), "".join(f"{id}\n" for id in ids.tolist()))


def describe_removed(ids: np.ndarray) -> str | None:
    """Return the samples in short, as checkpoints and messages have them: "3 samples (1f0c...)"; None for
    []."""
    if not len(ids):
        return None
    digest = hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()[:12]
    return f"{counted(len(ids), 'sample')} ({digest})"


def name_samples(ids: list[int]) -> str:
    """Return samples in words: "sample 17", "samples 3, 17", "samples 1, 2, 3, 4, 5 and 8 more"."""
    text = f"{'sample' if len(ids) == 1 else 'samples'} {', '.join(map(str, ids[:5]))}"
    return f"{text} and {len(ids) - 5} more" if len(ids) > 5 else text

"""Compare every sample in a cache with its file, byte for byte."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from datasets.folders import image_folder, image_index
from datasets.folders.walk import progress, shown
from datasets.stores import forms
from datasets.stores.files import FileStore

MISSING = "missing"
DAMAGED = "damaged"
DIFFERENT = "different"
KINDS = (MISSING, DAMAGED, DIFFERENT)
Read = Callable[[np.ndarray], list]  # ids -> samples, or MISSING, or DAMAGED
_PART = 256  # samples that a thread compares at a time


def check(read: Read, index: image_index.ImageFolderIndex, form: str, workers: int) -> int:
    """Compare the samples of a split, print the result, and return the number of wrong ones.

    `launch cache check` calls it for each split. read: called in `workers` threads.

    Raises BadInput if a file cannot be read or was changed since the scan.
    """
    files = FileStore(index, verified=True)
    paths_of: dict[str, list[str]] = {kind: [] for kind in KINDS}
    parts = np.split(np.arange(len(index)), range(_PART, len(index), _PART))
    with progress(len(index), f"checking {index.split}") as bar:

        def compare(part: np.ndarray) -> list[tuple[str, int]]:
            """Return (kind, id) of the wrong samples among these ids, in a thread of the pool."""
            wrong = []
            for id, kept in zip(part.tolist(), read(part), strict=True):
                if isinstance(kept, str):
                    wrong.append((kept, id))
                elif not _same(kept, forms.make(files, id, form)):
                    wrong.append((DIFFERENT, id))
            return wrong

        # the threads read and decode; this one counts, in the order of the ids
        pool = ThreadPoolExecutor(workers, "check")
        try:
            for part, wrong in zip(parts, pool.map(compare, parts), strict=True):
                for kind, id in wrong:
                    paths_of[kind].append(index.path(id))
                bar.update(len(part))
        finally:
            pool.shutdown(cancel_futures=True)
    tell = image_folder.one_line(print)
    count = 0
    counts = ""
    for kind, paths in paths_of.items():
        if paths:
            tell(f"{kind}: {shown(paths)}")
            count += len(paths)
            counts += f", {len(paths)} {kind}"
    equal = f"{len(index) - count} of {len(index)} samples are stored and equal to the files"
    print(f"{index.split}: {equal}{counts}", flush=True)
    return count


def _same(kept: bytes | np.ndarray, made: forms.Sample) -> bool:
    """Return whether a stored sample has the size and the bytes of one that was just made from the file."""
    if isinstance(kept, np.ndarray) and kept.shape[:2] != made[:2]:
        return False
    return np.array_equal(np.frombuffer(kept, np.uint8), np.frombuffer(made.content, np.uint8))

"""Compare every sample in a cache with its file, byte for byte."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from datasets.folders import image_folder
from datasets.folders.listing import progress
from datasets.stores import forms
from datasets.stores.files import FileStore
from launch.cache.sets import Place

MISSING, DAMAGED, DIFFERENT = KINDS = ("missing", "damaged", "different")
_PART = 256  # samples that a thread compares at a time
_SHOWN = 20  # samples that are named, of each kind


def check(
    place: Place,
    index: image_folder.ImageFolderIndex,
    form: str,
    short_side: int,
    workers: int,
) -> dict:
    """Return {"split", "samples", "equal": numbers; "missing", "damaged", "different": paths}.

    Raises BadInput if a file cannot be read or was changed since the scan.
    """
    files, found = FileStore(index, verified=True), {kind: [] for kind in KINDS}
    parts = np.split(np.arange(len(index)), range(_PART, len(index), _PART))
    with (
        place.reader(index, form, short_side) as read,
        progress(len(index), f"checking {index.split}") as bar,
    ):

        def compare(part: np.ndarray) -> list[tuple[str, int]]:
            wrong = []
            for id, kept in zip(part.tolist(), read(part), strict=True):
                if isinstance(kept, str):
                    wrong.append((kept, id))
                elif not _same(kept, forms.make(files, id, form, short_side)):
                    wrong.append((DIFFERENT, id))
            return wrong

        pool = ThreadPoolExecutor(workers, "check")
        try:
            for part, wrong in zip(parts, pool.map(compare, parts), strict=True):
                for kind, id in wrong:
                    found[kind].append(index.path(id))
                bar.update(len(part))
        finally:
            pool.shutdown(cancel_futures=True)
    equal = len(index) - sum(map(len, found.values()))
    return {"split": index.split, "samples": len(index), "equal": equal} | found


def describe(found: dict) -> None:
    """Print the result of check()."""
    tell = image_folder.one_line(print)
    for kind in KINDS:
        for path in found[kind][:_SHOWN]:
            tell(f"{kind}: {path}")
        if len(found[kind]) > _SHOWN:
            print(f"{kind}: and {len(found[kind]) - _SHOWN} more (--json names all)")
    counts = "".join(f", {len(found[kind])} {kind}" for kind in KINDS if found[kind])
    split, equal, samples = (found[name] for name in ("split", "equal", "samples"))
    print(f"{split}: {equal} of {samples} samples are stored and equal to the files{counts}", flush=True)


def _same(kept: bytes | np.ndarray, made: forms.Sample) -> bool:
    if isinstance(kept, np.ndarray) and kept.shape[:2] != made[:2]:
        return False
    return np.array_equal(np.frombuffer(kept, np.uint8), np.frombuffer(made.content, np.uint8))

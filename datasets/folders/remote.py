"""List folders of images below a URL without copying them, as datasets/folders/listing.py lists folders."""

import os
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from common.exits import BadInput
from common.object_store.paths import check_keys
from common.object_store.store import ObjectStore
from datasets.folders import images
from datasets.folders.listing import SHOWN, Listing, Log, by_class, divide, layout, number, read_list
from datasets.staged_copy import time_of


def look(url: str, split: str, classes: Sequence[str] | None, log: Log, val_share: float = 0.0) -> Listing:
    """Return the Listing of a split without reading an image. Arguments: those of image_folder.load().
    Raises BadInput."""
    with ObjectStore(url) as store:
        root = store.location.url()
        entries = {entry.key: entry for entry in store.list()}
        check_keys(entries, root)
        folders = {key[:place] for key in entries for place in _slashes(key)}
        base, source, spelling = layout(
            root,
            split,
            lambda path: _below(path, root) in entries,
            lambda path: _below(path, root) in folders,
        )
        if source != base:
            text = store.read(_below(source, root)).decode("utf-8-sig", "surrogateescape")
            paths, names = read_list(text.splitlines(), source)
            if paths[0] not in entries and spelling in folders:
                base = os.path.join(root, spelling)
        else:
            paths, names = by_class(base, *_walk(base, root, entries), classes, log)
    classes, labels = number(names, classes, source, source != base)
    val_share = 0.0 if spelling else val_share
    if val_share:
        paths, labels = divide(root, split, paths, labels, val_share, log)
    keys = [_below(os.path.join(base, path), root) for path in paths]
    missing = [path for path, key in zip(paths, keys, strict=True) if key not in entries]
    if missing:
        shown = ", ".join(missing[:SHOWN])
        raise BadInput(f"{len(missing)} of {len(paths)} files are missing in {base}: {shown}")
    sizes = np.array([entries[key].size for key in keys], dtype=np.int64)
    mtimes = np.array([time_of(entries[key]) for key in keys], dtype=np.int64)
    return Listing(root, split, base, classes, paths, labels, sizes, mtimes, val_share)


def reader(root: str) -> Callable[[str, int, int | None], bytes]:
    """Return a function (path below the root, its size, None or the number of first bytes to read) -> bytes.
    Threads may share it; it raises BadInput."""
    store = ObjectStore(root)
    return lambda path, size, head: store.read(_below(path, root), 0, head)


def _walk(base: str, root: str, entries: Iterable[str]) -> tuple[list[str], int, set[str]]:
    """Return what listing.walk() returns."""
    start = f"{_below(base, root)}/" if base != root else ""
    paths, others, own = [], 0, set()
    for key in entries:
        if not key.startswith(start):
            continue
        path = key[len(start) :]
        folder, nested, _ = path.partition("/")
        if any(part.startswith(".") for part in path.split("/")):
            others += 1
            continue
        if nested:
            own.add(folder)
        if path.lower().endswith(images.EXTENSIONS):
            paths.append(path)
        else:
            others += 1
    return paths, others, own


def _below(path: str, root: str) -> str:
    return path[len(root) + 1 :]


def _slashes(key: str) -> list[int]:
    return [place for place, letter in enumerate(key) if letter == "/"]

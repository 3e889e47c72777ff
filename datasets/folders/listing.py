"""What lies in folders of images now: paths, labels, sizes and times of change, found without reading a file.

A split of a root folder is the first of these that is there ("val" may also be spelled validation, valid or
test):

1. <root>/train.txt: a list of lines `relative/path label`, relative to the root or else to <root>/train, and
   below it. The label is a class name or a number;
2. <root>/train/<class>/**: class folders of any depth, or images of one class directly in <root>/train;
3. <root>/<class>/**: no folders of splits; then the path of an image decides to which split it belongs
   (in_val()).

Classes are numbered in the order of their names, images in the order of their paths. Links are followed.
"""

import hashlib
import itertools
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from common.exits import BadInput
from datasets.folders import images

Log = Callable[[str], object]  # takes a line
THREADS = 16  # more than cores: on a network file system most of them wait
TOGETHER = 64  # files that a thread takes at a time
_LONGEST, _LABEL = 4096, 255  # characters of a path and of a label in a list
SHOWN = 10  # of a long list in a message
VAL_SHARE = 0.1  # of the images of a folder without splits
SPLITS = {"train": ("train",), "val": ("val", "validation", "valid", "test")}


class Listing(NamedTuple):
    """What lies in the folders now, in the order of the paths."""

    root: str
    split: str
    base: str  # paths are relative to it
    classes: tuple[str, ...]
    paths: list[str]
    labels: np.ndarray  # int64, as are the next
    sizes: np.ndarray
    mtimes: np.ndarray
    val_share: float = 0.0  # if the path of an image decides to which split it belongs

    def stamp(self) -> str:
        """Of all that can be seen without reading the files."""
        known = json.dumps([self.base, self.classes, len(self.paths)])
        digest = hashlib.blake2b(known.encode(), digest_size=16)
        digest.update(os.fsencode("\0".join(self.paths)))
        for column in (self.labels, self.sizes, self.mtimes):
            digest.update(np.ascontiguousarray(column).data)
        return digest.hexdigest()


def look(root: str, split: str, classes: Sequence[str] | None, log: Log, val_share: float = 0.0) -> Listing:
    """What a split of a root folder holds, without reading a file. Arguments: those of image_folder.load().
    Raises BadInput."""
    if not os.path.isdir(root):
        raise BadInput(f"{root} does not exist or is not a folder")
    base, source, spelling = layout(root, split)
    listed = source != base
    if listed:
        try:
            with open(source, encoding="utf-8-sig", errors="surrogateescape") as file:
                paths, names = read_list(file, source)
        except OSError as error:
            raise BadInput(f"cannot read {source}: {error.strerror}") from error
        folder = os.path.join(root, spelling)
        if not os.path.exists(os.path.join(root, paths[0])) and os.path.isdir(folder):
            base = folder
    else:
        paths, names = by_class(base, *walk(base), classes, log)
    classes, labels = number(names, classes, source, listed)
    val_share = 0.0 if spelling else val_share
    if val_share:
        paths, labels = divide(root, split, paths, labels, val_share, log)
    sizes, mtimes = stat_files(base, paths)
    return Listing(root, split, base, classes, paths, labels, sizes, mtimes, val_share)


def in_val(paths: list[str], labels: np.ndarray, share: float) -> np.ndarray:
    """Which images are for validation: bool [n], those whose hash is below the share.

    The hash is that of the path without its ending, so an image stays in its split when others come or go,
    and on every machine. Two exceptions: a class whose images would all be for validation keeps the one with
    the highest hash for training; if there is no image for validation, the one with the lowest hash is
    taken, out of the classes that have several.

    paths: relative, with /. labels: int64 [n]. share: above 0, below 1.
    """
    hashes = np.array([_hash(path) for path in paths], np.uint64)
    val = hashes < np.uint64(int(share * 2**64))
    counts = np.bincount(labels)
    kept = np.bincount(labels[~val], minlength=len(counts))
    for label in np.flatnonzero((counts > 0) & (kept == 0)):
        rows = np.flatnonzero(labels == label)
        val[rows[hashes[rows].argmax()]] = False
    several = np.flatnonzero(counts[labels] > 1)
    if not val.any() and len(several):
        val[several[hashes[several].argmin()]] = True
    return val


def _hash(path: str) -> int:
    """In 0..2^64-1."""
    name = os.fsencode(os.path.splitext(path)[0])
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")


def divide(
    root: str,
    split: str,
    paths: list[str],
    labels: np.ndarray,
    val_share: float,
    log: Log,
) -> tuple[list[str], np.ndarray]:
    """(paths, labels) of a split of a folder without splits. Raises BadInput if none remains for "val"."""
    val = in_val(paths, labels, val_share)
    many = int(val.sum())
    if split == "train":
        log(
            f"train={len(val) - many} test={many} split of {root} by path, --val_share {100 * val_share:g}%"
            + ": no image for validation, for each class has one" * (not many)
        )
    elif not many:
        raise BadInput(
            f"{root} has {len(paths)} images in as many classes: none remains for validation. "
            "Add val/ beside train/, or more images"
        )
    rows = np.flatnonzero(val if split == "val" else ~val)
    return [paths[row] for row in rows.tolist()], labels[rows]


def layout(
    root: str,
    split: str,
    is_file: Callable[[str], bool] = os.path.isfile,
    is_folder: Callable[[str], bool] = os.path.isdir,
) -> tuple[str, str, str]:
    """(base folder, the list or the same folder, the split's spelling: "" if there are no splits)."""
    for name in SPLITS[split]:
        folder, source = os.path.join(root, name), os.path.join(root, f"{name}.txt")
        if is_file(source):
            return root, source, name
        if is_folder(folder):
            return folder, folder, name
    expected = " or ".join(f"{name}/ or {name}.txt" for name in SPLITS[split])
    for name in (*SPLITS["train"], *SPLITS["val"]):
        if is_folder(os.path.join(root, name)) or is_file(os.path.join(root, f"{name}.txt")):
            raise BadInput(f"{root} has {name}, but no {expected}")
    return root, root, ""


def walk(base: str) -> tuple[list[str], int, set[str]]:
    """(relative paths of the images in a tree, the number of its other files, the folders directly in it).
    Raises BadInput where a folder cannot be listed."""
    paths, others, own, level = [], 0, set(), [("", ())]
    with ThreadPoolExecutor(THREADS) as pool, progress(None, f"listing {base}") as bar:
        while level:
            deeper = []
            for below, found, other in pool.map(lambda folder: _entries(base, *folder), level):
                deeper += below
                paths += found
                others += other
                bar.update(len(found))
            own = own or {folder.rstrip("/") for folder, _ in deeper}
            level = deeper
    return paths, others, own


def by_class(
    base: str, paths: list[str], others: int, class_folders: set[str], classes: Sequence[str] | None, log: Log
) -> tuple[list[str], list[str]]:
    """(paths, the class name of each) of what walk() found."""
    nested = [path for path in paths if "/" in path]
    loose = len(paths) - len(nested) if nested else 0
    if others or loose:
        log(f"{base}: ignored {others} hidden or other files and {loose} images outside class folders")
    if not paths:
        raise BadInput(f"{base} holds no image ({' '.join(images.EXTENSIONS)})")
    paths = sorted(nested or paths)
    names = [path.partition("/")[0] if nested else "" for path in paths]
    empty = sorted(class_folders - set(names)) if nested and classes is None else []
    if empty:  # left out, they would change the numbers of the others
        raise BadInput(f"{base}: {len(empty)} class folders hold no image: {', '.join(empty[:SHOWN])}")
    return paths, names


def _entries(base: str, relative: str, above: tuple) -> tuple[list, list[str], int]:
    """(folders, images, number of other files) of one folder. above: the identities of those it is in."""
    path = os.path.join(base, relative)
    folders, found, others = [], [], 0
    try:
        above = (*above, _identity(os.stat(path)))
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    others += 1
                elif entry.is_dir():
                    if entry.is_symlink() and _identity(entry.stat()) in above:
                        continue  # a link back up: it would never end
                    folders.append((f"{relative}{entry.name}/", above))
                elif entry.name.lower().endswith(images.EXTENSIONS) and (
                    entry.is_file() or entry.is_symlink()  # a link to nothing is reported as missing
                ):
                    found.append(relative + entry.name)
                else:
                    others += 1
    except OSError as error:
        raise BadInput(f"cannot list {path}: {error.strerror}") from error
    return folders, found, others


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def read_list(lines: Iterable[str], source: str) -> tuple[list[str], list[str]]:
    """Return (paths, the label of each as it is written) of a list. source: for messages. Raises BadInput."""
    rows = []
    for number, line in enumerate(lines, 1):
        words = line.strip().rsplit(maxsplit=1)  # from the right: a path may hold spaces
        path, label = words if len(words) == 2 else ("", "")
        if words and (not path or "\0" in path + label or len(path) > _LONGEST or len(label) > _LABEL):
            found = " ".join(words)
            shown = repr(found[:60]) + f"... ({len(found)} characters)" * (len(found) > 60)
            raise BadInput(f"{source}, line {number}: expected `path label`, found {shown}")
        if os.path.isabs(path) or ".." in path.split("/"):
            raise BadInput(f"{source}, line {number}: {path} is not below the folder of {source}")
        if words:
            rows.append((path, label))
    rows.sort()
    if not rows:
        raise BadInput(f"{source} lists no image")
    for (path, label), (other, label_too) in itertools.pairwise(rows):
        if path == other:
            raise BadInput(f"{source} lists {path} twice, with labels {label} and {label_too}")
    return [path for path, _ in rows], [label for _, label in rows]


def number(
    names: list[str], classes: Sequence[str] | None, source: str, listed: bool
) -> tuple[tuple[str, ...], np.ndarray]:
    """Return (classes, labels int64 [n]). names: the label of each image, as it is written.

    classes: those of the train split, if they are known. listed: the labels are those of a list, which may be
    numbers. source: for messages. Raises BadInput.
    """
    found = set(names)
    strange = sorted(found.difference(classes)) if classes is not None else []
    if listed and (classes is None or strange) and all(re.fullmatch("-?[0-9]+", name) for name in found):
        # numbers, and not names that look like numbers
        numbers = {name: int(name) for name in found}
        count = len(set(numbers.values()) if classes is None else classes)
        outside = sorted(value for value in numbers.values() if not 0 <= value < count)
        if outside:
            raise BadInput(f"{source}: label {outside[0]} is not in 0..{count - 1} ({count} classes)")
        ordered = tuple(map(str, range(count)) if classes is None else classes)
    elif classes is not None and strange:
        count, owner = names.count(strange[0]), f"class {strange[0]!r}" if strange[0] else "no class folder"
        raise BadInput(
            f"{source}: {count} images belong to {owner}, but the train split has {len(classes)} classes: "
            + ", ".join(classes[:SHOWN])
        )
    else:
        ordered = tuple(sorted(found) if classes is None else classes)
        numbers = {name: place for place, name in enumerate(ordered)}
    return ordered, np.fromiter(map(numbers.__getitem__, names), np.int64, len(names))


def stat_files(base: str, paths: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """(sizes, mtimes in nanoseconds) of files. Raises BadInput where some are missing."""

    def states(first: int) -> np.ndarray:
        part = np.full((min(TOGETHER, len(paths) - first), 2), -1, dtype=np.int64)
        for row, path in enumerate(paths[first : first + TOGETHER]):
            try:
                status = os.stat(os.path.join(base, path))
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode):
                part[row] = status.st_size, status.st_mtime_ns
        return part

    parts = []
    with ThreadPoolExecutor(THREADS) as pool, progress(len(paths), f"looking through {base}") as bar:
        for part in pool.map(states, range(0, len(paths), TOGETHER)):
            parts.append(part)
            bar.update(len(part))
    sizes, mtimes = np.concatenate(parts).T
    missing = np.flatnonzero(sizes < 0)
    if len(missing):
        shown = ", ".join(paths[row] for row in missing[:SHOWN])
        raise BadInput(f"{len(missing)} of {len(paths)} files are missing in {base}: {shown}")
    return sizes, mtimes


def progress(total: int | None, text: str) -> tqdm:
    """A bar that counts images."""
    # Not a terminal: one line every 10 s, so that a long scan is not taken for a hang.
    return tqdm(total=total, desc=text, unit="image", delay=2, mininterval=10 * (not os.isatty(2)))

"""List folders of images: paths, labels, sizes and modification times, without reading an image.

A split of a root folder is the first of these that exists ("val" may also be named validation, valid or
test):

1. <root>/train.txt: a list of lines `relative/path label`. Paths are below the root, or else below
   <root>/train. The label is a class name or a number, or several of them: `relative/path 3,17`. Then
   `relative/path ,` is an image without a label;
2. <root>/train/<class>/**: class folders of any depth, or images of one class directly in <root>/train;
3. <root>/<class>/**: no folders of splits. The hash of its path decides the split of an image.

Classes are numbered in the order of their names, images in the order of their paths. Links are followed.
"""

import hashlib
import itertools
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
from tqdm import tqdm

from common.ground.exits import BadInput
from common.ground.files import explained
from datasets import files
from datasets.folders import images

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
Log = Callable[[str], object]  # called with one line of text
_THREADS = 16  # more than cores: on a network file system most threads wait
_TURN = 64  # tasks that threads do before the waiting is measured again, for the first time
FILES_PER_TASK = 64  # files per task
_LONGEST = 4096  # characters of a line in a list
_SHOWN = 10  # entries of a long list in a message
VAL_SHARE = 0.1  # of the images of a folder without splits
SPLITS = {"train": ("train",), "val": ("val", "validation", "valid", "test")}


class Listing(NamedTuple):
    """The present files of a split, in the order of the paths."""

    root: str
    split: str
    base: str  # paths are relative to it
    classes: tuple[str, ...]
    paths: list[str]
    labels: np.ndarray  # int64, as are sizes and mtimes; bool [n, classes] if images have several labels
    sizes: np.ndarray
    mtimes: np.ndarray
    val_share: float = 0.0  # if the path of an image decides its split, otherwise 0

    def stamp(self) -> str:
        """Return a digest of all that is known without reading the files."""
        known = json.dumps([self.base, self.classes, len(self.paths)])
        digest = hashlib.blake2b(known.encode(), digest_size=16)
        digest.update(os.fsencode("\0".join(self.paths)))
        for column in (self.labels, self.sizes, self.mtimes):
            digest.update(np.ascontiguousarray(column).data)
        return digest.hexdigest()


def look(root: str, split: str, classes: Sequence[str] | None, log: Log, val_share: float = 0.0) -> Listing:
    """Return the Listing of a split without reading an image. Arguments: those of image_folder.load().
    Raises BadInput."""
    root = os.path.abspath(files.local_folder(root))
    name = find_split(root, split)
    if not name and (other := find_split(root, "val" if split == "train" else "train")):
        expected = " or ".join(f"{name}/ or {name}.txt" for name in SPLITS[split])
        raise BadInput(f"{root} has {other}, but no {expected}")
    base = os.path.join(root, name) if name else root
    source = f"{base}.txt"
    if listed := bool(name) and os.path.isfile(source):
        paths, names = _read_list(source)
        if os.path.exists(os.path.join(root, paths[0])) or not os.path.isdir(base):
            base = root
    else:
        source = base
        paths, names = _by_class(base, classes, log)
    number = number_sets if listed and any("," in name for name in names) else number_classes
    classes, labels = number(names, classes, source, listed)
    val_share = 0.0 if name else val_share
    if val_share:
        rows = divide(root, split, paths, labels, val_share, log)
        paths, labels = [paths[row] for row in rows.tolist()], labels[rows]
    sizes, mtimes = stat_files(base, paths)
    return Listing(root, split, base, classes, paths, labels, sizes, mtimes, val_share)


def find_split(root: str, split: str) -> str:
    """Return the name of a split's list or folder in a root folder; "" if it has none."""
    for name in SPLITS[split]:
        path = os.path.join(root, name)
        if os.path.isdir(path) or os.path.isfile(f"{path}.txt"):
            return name
    return ""


def shown(texts: Sequence[str]) -> str:
    """Return the first texts of a long list, and the number of the others."""
    more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return "; ".join(texts[:_SHOWN]) + more


def divide(root: str, split: str, paths: list[str], labels: np.ndarray, share: float, log: Log) -> np.ndarray:
    """Return the rows of the images of a split: int64, ascending. An image is in "val" if its hash is low.

    The hash is that of the path without its ending. So an image is in the same split on every machine, also
    after other images are added or removed. Two exceptions: a class keeps at least one image for training,
    the one with the highest hash. At least one image is for validation: the one with the lowest hash, of the
    classes with several images. Raises BadInput if "val" is empty.
    """
    stems = (os.fsencode(os.path.splitext(path)[0]) for path in paths)
    digests = b"".join(hashlib.blake2b(stem, digest_size=8).digest() for stem in stems)
    hashes = np.frombuffer(digests, ">u8").astype(np.uint64)
    val = hashes < np.uint64(int(share * 2**64))
    counts = np.bincount(labels)
    kept = np.bincount(labels[~val], minlength=len(counts))
    for label in np.flatnonzero((counts > 0) & (kept == 0)):
        rows = np.flatnonzero(labels == label)
        val[rows[hashes[rows].argmax()]] = False
    several = np.flatnonzero(counts[labels] > 1)
    if not val.any() and len(several):
        val[several[hashes[several].argmin()]] = True
    many = int(val.sum())
    if split == "train":
        log(
            f"train={len(val) - many} test={many} split of {root} by path, --val_share {100 * share:g}%"
            + ": no image for validation, because each class has only one" * (not many)
        )
    elif not many:
        raise BadInput(
            f"{root} has {len(paths)} images, one in each class: none remains for validation. "
            "Add val/ next to train/, or more images"
        )
    return np.flatnonzero(val if split == "val" else ~val)


def walk(base: str) -> tuple[list[str], int, set[str]]:
    """Return (relative paths of the images in a tree, number of its other files, the folders directly in it).
    Raises BadInput if a folder cannot be listed."""

    def fail(error: OSError) -> None:
        raise BadInput(f"cannot list {error.filename}: {error.strerror}") from error

    paths, others, own = [], 0, set()
    above: dict[str, tuple[str, ...]] = {
        base: (os.path.realpath(base),)
    }  # folder -> its real path and those of its parents
    with progress(None, f"listing {base}") as bar:
        for folder, folders, names in os.walk(base, onerror=fail, followlinks=True):
            found = [name for name in names if name[0] != "." and name.lower().endswith(images.EXTENSIONS)]
            others += len(names) - len(found) + sum(name.startswith(".") for name in folders)
            paths += [os.path.join(folder[len(base) :].lstrip("/"), name) for name in found]
            parents = above.pop(folder)
            below = {name: os.path.realpath(os.path.join(folder, name)) for name in folders}
            # without links to a parent folder, which are endless loops
            folders[:] = [name for name in folders if name[0] != "." and below[name] not in parents]
            above |= {os.path.join(folder, name): (*parents, below[name]) for name in folders}
            own |= set(folders) if folder == base else set()
            bar.update(len(found))
    return paths, others, own


def _by_class(base: str, classes: Sequence[str] | None, log: Log) -> tuple[list[str], list[str]]:
    """Return (paths, class name of each path) of a tree. classes: as in number_classes(). Raises BadInput."""
    paths, others, class_folders = walk(base)
    nested = [path for path in paths if "/" in path]
    loose = len(paths) - len(nested) if nested else 0
    if others or loose:
        log(f"{base}: ignored {others} hidden or other files and {loose} images outside class folders")
    if not paths:
        raise BadInput(f"{base} holds no image ({' '.join(images.EXTENSIONS)})")
    paths = sorted(nested or paths)
    names = [path.partition("/")[0] if nested else "" for path in paths]
    empty = sorted(class_folders - set(names)) if nested and classes is None else []
    if empty:  # skipping them would change the numbers of the other classes
        raise BadInput(f"{base}: {len(empty)} class folders hold no image: {shown(empty)}")
    return paths, names


def _read_list(source: str) -> tuple[list[str], list[str]]:
    """Return (paths, labels as text) of a list. Raises BadInput."""
    with (
        explained(f"cannot read {source}"),
        open(source, encoding="utf-8-sig", errors="surrogateescape") as file,
    ):
        lines = [line.strip() for line in file]
    labels: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        path, *rest = line.rsplit(maxsplit=1)  # from the right: a path may contain spaces
        if not rest or "\0" in line or len(line) > _LONGEST:
            raise BadInput(f"{source}, line {number}: expected `path label`, found {line[:60]!r}")
        if os.path.isabs(path) or ".." in path.split("/"):
            raise BadInput(f"{source}, line {number}: {path} is not below the folder of {source}")
        if path in labels:
            raise BadInput(f"{source} lists {path} twice, with labels {labels[path]} and {rest[0]}")
        labels[path] = rest[0]
    if not labels:
        raise BadInput(f"{source} lists no image")
    paths = sorted(labels)
    return paths, [labels[path] for path in paths]


def number_classes(
    names: list[str], classes: Sequence[str] | None, source: str, listed: bool
) -> tuple[tuple[str, ...], np.ndarray]:
    """Return (classes, labels int64 [n]).

    names: the label of each image as text.
    classes: those of the train split, if they are known.
    source: for messages.
    listed: the labels are from a list, so they may be numbers.
    Raises BadInput.
    """
    known = set(names)
    ordered = tuple(sorted(known) if classes is None else classes)
    strange = sorted(known.difference(ordered))
    if listed and (classes is None or strange) and all(re.fullmatch("-?[0-9]+", name) for name in known):
        # the labels are numbers, not class names that look like numbers
        numbers = {name: int(name) for name in known}
        if classes is None:
            ordered = tuple(map(str, range(len(set(numbers.values())))))
        outside = sorted(value for value in numbers.values() if not 0 <= value < len(ordered))
        if outside:
            raise BadInput(
                f"{source}: label {outside[0]} is not in 0..{len(ordered) - 1} ({len(ordered)} classes)"
            )
    elif strange:
        count, owner = names.count(strange[0]), f"class {strange[0]!r}" if strange[0] else "no class folder"
        raise BadInput(
            f"{source}: {count} images belong to {owner}, but the train split has {len(ordered)} classes: "
            + shown(ordered)
        )
    else:
        numbers = {name: place for place, name in enumerate(ordered)}
    return ordered, np.fromiter(map(numbers.__getitem__, names), np.int64, len(names))


def number_sets(
    names: list[str], classes: Sequence[str] | None, source: str, listed: bool
) -> tuple[tuple[str, ...], np.ndarray]:
    """Return (classes, labels bool [n, classes]) for images with several labels, "a,b". Arguments: those of
    number_classes(). Raises BadInput."""
    sets = [[*filter(None, name.split(","))] for name in names]
    if not any(sets):
        raise BadInput(f"{source}: no image has a label")
    ordered, numbers = number_classes([*itertools.chain(*sets)], classes, source, listed)
    labels = np.zeros((len(sets), len(ordered)), bool)
    labels[np.repeat(np.arange(len(sets)), [*map(len, sets)]), numbers] = True
    return ordered, labels


def stat_files(base: str, paths: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return (sizes, mtimes in nanoseconds) of files. Raises BadInput if some are missing."""

    def states(first: int) -> np.ndarray:
        part = np.full((min(FILES_PER_TASK, len(paths) - first), 2), -1, dtype=np.int64)
        for row, path in enumerate(paths[first : first + FILES_PER_TASK]):
            try:
                status = os.stat(prefix + path)
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode):
                part[row] = status.st_size, status.st_mtime_ns
        return part

    parts, prefix = [], os.path.join(base, "")
    with progress(len(paths), f"looking through {base}") as bar:
        for part in map_files(states, range(0, len(paths), FILES_PER_TASK)):
            parts.append(part)
            bar.update(len(part))
    sizes, mtimes = np.concatenate(parts).T
    missing = np.flatnonzero(sizes < 0)
    if len(missing):
        which = shown([paths[row] for row in missing])
        raise BadInput(f"{len(missing)} of {len(paths)} files are missing in {base}: {which}")
    return sizes, mtimes


def map_files(task: Callable[[_Task], _Result], tasks: Iterable[_Task]) -> Iterator[_Result]:
    """Yield task(each) in order, for tasks that read files.

    This thread does the tasks while they take less than twice their CPU time. Several threads would take five
    times as long for files in the page cache, because they wait for Python's lock at each call. If tasks
    wait, as for a disk or a network, _THREADS threads do the next ones, in turns that become longer.
    """
    waiting, turn = iter(tasks), _TURN
    with ThreadPoolExecutor(_THREADS) as pool:
        for each in waiting:
            begin, used = time.perf_counter(), time.thread_time()
            result = task(each)
            waits = time.perf_counter() - begin > 2 * (time.thread_time() - used)
            yield result
            if waits:
                yield from pool.map(task, itertools.islice(waiting, turn))
            turn = 2 * turn if waits else _TURN


def progress(total: int | None, text: str, done: int = 0, unit: str = "image") -> tqdm:
    """Return a progress bar that counts images. done: those that were ready before."""
    # not a terminal: print every 10 s, so that a long scan does not look like a hang
    interval = 10 * (not os.isatty(2)) or 0.1
    return tqdm(total=total, initial=done, desc=text, unit=unit, delay=2, mininterval=interval)

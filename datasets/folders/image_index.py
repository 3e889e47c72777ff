"""The stored index of a folder of images: memory-mapped arrays with one row per image, and their checksums.
image_folder.py scans the files and writes it. A process that has its folder opens it without the images."""

import bisect
import contextlib
import functools
import hashlib
import json
import os
import zlib
from collections.abc import Sequence
from typing import IO

import numpy as np

from bootfile.ground.again import is_folder
from bootfile.ground.errors import BadInput, Unavailable
from bootfile.ground.files import explained, read_again
from common.ground.files import make_folder_atomic
from datasets.folders import tar_files
from datasets.folders.walk import Log, shown

CHANGED = "changed"  # file in the folder of an index: a read has found a file that was changed
_FORMAT = 3  # increase it if the columns or the results of images.inspect() change
COLUMNS = {  # name -> type: a memory-mapped file each, with one row per image
    "labels": "<i8",
    "widths": "<i4",
    "heights": "<i4",
    "plain": "|b1",
    "bytes": "<i8",
    "crc32": "<u4",
    "traits": "<u2",
    "mtimes": "<i8",
    "ctimes": "<i8",
    "offsets": "<i8",  # in names: of the image's path, and one more for the end
    "names": "|u1",  # the bytes of all paths
}


class ImageFolderIndex:
    """The good images of a split by id, 0..len-1. The arrays are memory-mapped, with one entry per image.

    labels: int64; bool [n, classes] if images have several labels.
    widths, heights: int32, pixels of the upright image.
    plain, traits: bool and uint16, see images.Header.
    bytes, crc32, mtimes: int64, uint32 and int64 (nanoseconds), of the files.
    ctimes: int64, when the files or their attributes were changed last, in nanoseconds; 0 for images in tar
        files.
    classes: names by label.
    excluded: (path, reason) of the bad images.
    division: that of the Listing.
    fingerprint: of classes, relative paths without their endings, labels, sizes and contents; the same for
        every copy of the data.
    A pickle contains only the name of the index's folder and the fingerprint.
    """

    labels: np.ndarray
    widths: np.ndarray
    heights: np.ndarray
    plain: np.ndarray
    traits: np.ndarray
    bytes: np.ndarray
    crc32: np.ndarray
    mtimes: np.ndarray
    ctimes: np.ndarray
    offsets: np.ndarray
    names: np.ndarray

    unit = "images", 1  # what a log counts per second, and how many a sample has

    def __init__(self, folder: str):
        # another process may replace the folder meanwhile: the columns would be those of two indexes
        inode = os.stat(folder).st_ino
        with open(os.path.join(folder, "index.json"), encoding="utf-8") as file:
            meta = json.load(file)
        if meta["format"] != _FORMAT:
            raise ValueError(f"its format is {meta['format']}, expected {_FORMAT}")
        for name, dtype in COLUMNS.items():
            column = np.asarray(np.load(os.path.join(folder, f"{name}.npy"), mmap_mode="r"))
            has_sets = name == "labels" and column.ndim == 2 and column.dtype == bool
            if not has_sets and (column.dtype != dtype or column.ndim != 1):
                raise ValueError(f"{name}.npy is {column.dtype} {list(column.shape)}")
            setattr(self, name, column)
        if os.stat(folder).st_ino != inode:
            raise ValueError("it was replaced while it was opened")
        self.folder = folder
        self.root = meta["root"]
        self.split = meta["split"]
        self.base = meta["base"]
        self.division = meta["division"]
        self.source = self.base  # for the log
        self.classes = tuple(meta["classes"])
        self.class_names = self.classes  # for classes.json
        self.fingerprint = meta["fingerprint"]
        self.checksums = meta["checksums"]
        self.bad = meta["bad"]
        self.is_complete = bool(meta["stamp"])
        self.excluded = [(os.path.join(self.base, path), reason) for path, _, _, reason in self.bad]

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, id: int) -> str:
        """Return the absolute path of an image."""
        return os.path.join(self.base, self.name(id))

    def name(self, id: int) -> str:
        """Return the path of an image below `base`."""
        if not 0 <= id < len(self):
            raise IndexError(f"id {id} is not in 0..{len(self) - 1}")
        return os.fsdecode(self.names[self.offsets[id] : self.offsets[id + 1]].tobytes())

    def find(self, path: str) -> int | None:
        """Return the id of an image; None if the index does not have it. path: absolute, or below `base`."""
        name = os.path.relpath(os.path.join(self.base, path), self.base)
        for listed in (name, f"./{name}"):  # as a table may have it
            id = bisect.bisect_left(range(len(self)), listed, key=self.name)  # the names ascend
            if id < len(self) and self.name(id) == listed:
                return id
        return None

    def describe(self) -> str:
        """Return the counts of images, of all and of the first classes, and the place, for the log."""
        tars: dict[str, None] = {}  # the first and the last one
        for id in (0, len(self) - 1):
            member = tar_files.split_path(self.path(id))
            if member:
                tars[member[0]] = None
        place = " to ".join(tars) or self.base
        if self.labels.ndim == 2:  # an image has several labels
            counts = self.labels.sum(0)
        else:
            counts = np.bincount(self.labels, minlength=len(self.classes))
        classes = shown(
            [f"{name} {count}" for name, count in zip(self.classes, counts.tolist(), strict=True)]
        )
        return f"{len(self)} images of {len(self.classes)} classes ({classes}) in {place}"

    def report_change(self) -> None:
        """Make the next start compare all files, if this process may write to the index. FileStore calls it
        when it reads a file that was changed, in any thread or process."""
        with contextlib.suppress(OSError):
            open(os.path.join(self.folder, CHANGED), "w").close()

    def __reduce__(self):
        return open_index, (self.folder, self.fingerprint)


def open_index(folder: str, fingerprint: str | None = None) -> ImageFolderIndex:
    """Return the index in a cache folder without comparing it with the images. The other processes of a node
    call it when the first one has indexed the images, and each process that gets an index in a pickle. Raises
    BadInput, also if it has another fingerprint than the given one."""
    failure = f"the index {folder} is damaged or of another version"
    with explained(failure, EOFError, ValueError, KeyError, TypeError, RecursionError):
        index = read_again(functools.partial(ImageFolderIndex, folder), folder)
    if fingerprint not in (None, index.fingerprint):
        raise BadInput(f"the index {folder} was {fingerprint} and is now {index.fingerprint}: data changed")
    return index


def open_intact(folder: str, log: Log | None = None) -> ImageFolderIndex | None:
    """Return the index if it exists, and its columns have its checksums and its fingerprint; otherwise None.
    The process that indexes the images calls it at each start. log: gets the reason of a new scan."""
    if not is_folder(folder):
        return None
    try:
        index = open_index(folder)
        for name in COLUMNS:
            if zlib.crc32(getattr(index, name)) != index.checksums[name]:
                raise BadInput(f"the index {folder} is damaged: the CRC-32 of {name}.npy differs")
        if _fingerprint(index.classes, vars(index)) != index.fingerprint:
            raise BadInput(f"the index {folder} is damaged: its columns do not have its fingerprint")
        return index
    except Unavailable:  # a new scan may take hours
        raise
    except (BadInput, ValueError, TypeError, LookupError) as error:
        if log:
            log(f"{error}: scanning again")
        return None


def write_index(folder: str, paths: list[str], columns: dict[str, np.ndarray], **meta) -> ImageFolderIndex:
    """Write an index atomically, in place of an older one, and open it. The caller holds the lock.

    paths: relative, ascending. columns: the others of ImageFolderIndex. meta: root, base, split, classes,
    division, stamp, bad (path, size, mtime, reason). Raises OSError.
    """
    names = os.fsencode("\0".join(paths)).split(b"\0") if paths else []
    offsets = np.cumsum([0, *map(len, names)])
    columns = columns | {"offsets": offsets, "names": np.frombuffer(b"".join(names), np.uint8)}
    has_sets = columns["labels"].ndim == 2  # several labels for each image
    types = COLUMNS | ({"labels": "|b1"} if has_sets else {})
    columns = {name: np.ascontiguousarray(columns[name], dtype) for name, dtype in types.items()}
    meta |= {"format": _FORMAT, "fingerprint": _fingerprint(meta["classes"], columns)}
    meta["checksums"] = {name: zlib.crc32(column.data) for name, column in columns.items()}
    # a process that is killed while it writes leaves the old index
    with make_folder_atomic(folder) as new:
        for name, content in columns.items():
            with open(os.path.join(new, f"{name}.npy"), "wb") as file:
                np.save(file, content)
                _flush(file)
        with open(os.path.join(new, "index.json"), "w", encoding="utf-8") as file:
            json.dump(meta, file, indent=1)
            _flush(file)
    return open_index(folder)


def _fingerprint(classes: Sequence[str], columns: dict[str, np.ndarray]) -> str:
    """Return the fingerprint of the images in an index. It is computed when an index is written, and at each
    start. Raises ValueError if the columns do not fit together."""
    names = columns["names"]
    starts = columns["offsets"][:-1]
    ends = columns["offsets"][1:]
    if (np.diff(columns["offsets"]) < 0).any() or [*columns["offsets"][[0, -1]]] != [0, len(names)]:
        raise ValueError("its offsets are not those of names")
    digest = hashlib.blake2b(json.dumps([classes, len(ends)]).encode(), digest_size=16)
    # a .JPEG and a .png may be the same data: the names count without their endings, as of splitext()
    dots = np.append(-1, np.flatnonzero(names == ord(".")))
    slashes = np.append(-1, np.flatnonzero(names == ord("/")))
    # of each path the last ones
    dot = dots[np.searchsorted(dots, ends) - 1]
    slash = slashes[np.searchsorted(slashes, ends) - 1]
    first = np.maximum(slash + 1, starts)
    stems = np.where(dot >= first, dot, ends)
    # a dot begins the name, or follows another one: splitext() decides
    follows_dot = (dot > first) & (names[np.maximum(dot, 1) - 1] == ord("."))
    for row in np.flatnonzero((dot == first) | follows_dot):
        stems[row] = starts[row] + len(os.path.splitext(names[starts[row] : ends[row]].tobytes())[0])
    lengths = stems - starts
    digest.update(lengths.data)
    parts = np.stack([lengths, ends - stems], axis=1).ravel()  # in turns: bytes of a stem, and of its ending
    is_stem = np.arange(len(parts)) % 2 == 0
    digest.update(names[np.repeat(is_stem, parts)].data)
    for name in ("labels", "bytes", "crc32"):
        digest.update(columns[name].data)
    return digest.hexdigest()


def _flush(file: IO) -> None:
    """Write a file to the disk: make_folder_atomic() then gives the folder its name."""
    file.flush()
    os.fsync(file.fileno())

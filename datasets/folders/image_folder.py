"""Index folders of images: every file is scanned once, and the index is stored in a cache folder.

datasets/folders/listing.py defines the folders. This module reads and inspects each file once, and stores the
results in an index: memory-mapped arrays with one row per image, and their checksums. A file is read again if
its size, mtime or ctime changes. A process that has the folder of an index opens it without the images.

The first scan reads every byte, not only headers: damaged files are known before the first step, and the
CRC-32 of each file is part of the fingerprint, which names the data in checkpoints, packs and receipts. A
start with an index lists the folders again. It compares the size and times of 16,384 files, evenly spaced:
those of a million files would take twice as long as the list, and minutes over a network. So a start finds
all files that were added, removed or renamed, and most changes of many files; a read finds each file that was
rewritten (datasets/stores/files.py). The times of folders would save the list as well, but not all file
systems change them.
"""

import bisect
import contextlib
import functools
import glob
import hashlib
import itertools
import json
import math
import os
import socket
import stat
import zlib
from collections.abc import Callable, Sequence
from typing import IO, Any

import numpy as np

from bootfile.ground.again import is_folder, is_temporary, refusal
from bootfile.ground.errors import BadInput, Unavailable, printable
from bootfile.ground.files import explained, read_again
from common.ground.files import is_url
from common.ground.shared_folders import locked, make_folder_atomic, own_place
from datasets import files as data_files
from datasets.dead_links import describe_dead_links
from datasets.folders import images, listing, tar_files
from datasets.folders.listing import VAL_SHARE, Listing
from datasets.folders.walk import FILES_PER_TASK, SHOWN, Log, map_files, progress, shown

_COMPARED = 2**14  # files whose size and time a start compares; of a small data set all
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
            if member := tar_files.split_path(self.path(id)):
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
    # the last dot and the last slash of each path
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


def load(
    root: str,
    split: str,
    cache: str,
    max_bad: float = 0.0,
    classes: tuple[str, ...] | None = None,
    log: Log = print,
    val_share: float = VAL_SHARE,
    least: int = 1,
    splits: str | None = None,
    labelled: bool = True,
) -> ImageFolderIndex:
    """Return the index of a split, from `cache` if no file has changed since.

    root: folder or URL; or a pattern of tar files that ends in .tar (tar_files.find()), or a folder of them.
    split: "train" or "val".
    cache: folder of the index. Of several processes one scans and the others wait.
    max_bad: maximum share of bad images, which are skipped.
    classes: those of the train split, whose numbers "val" must use.
    log: called with one line of text.
    val_share: the share that is "val" if the folder has no splits; 0: each split is the whole folder.
    least: samples of a batch. If there are fewer files, none is read.
    splits: "TRAIN,VAL", names of folders, lists or words of tar files; "none": there are no splits.
    labelled: refuse one class alone, images without a class, and classes that may be splits.
    The first process of a node calls it at each start, while the others wait. Raises BadInput if
    images are missing, if files cannot be read, or if too many images are bad.
    """
    log = one_line(log)
    files = look(root, split, cache, classes, log, val_share=val_share, splits=splits, labelled=labelled)
    if len(files.paths) < least:
        count = len(files.paths)
        raise BadInput(
            f"batch size {least} is larger than the data set ({count} samples): expected at most {count} "
            "(--batch_size), with a learning rate that is smaller by the same factor (--lr)"
        )
    index = scan_listing(files, cache, log)
    _judge(index, max_bad, log)
    return index


def load_on_nodes(root: str, function: Callable[[], list[ImageFolderIndex]]) -> list[ImageFolderIndex]:
    """Return function() on every rank. The first process of a node calls it, and the others open the indexes
    that it has returned. Call it once in a job, for all data sets. Nodes work at the same time, for up to six
    hours, and may share the folder of the indexes. root: of the images; all ranks take part in the copy of a
    URL. Raises BadInput on every rank if one fails."""
    # `launch cache` has no ranks: it would wait for the import of torch
    from bootfile.processes import ranks
    from common.distributed import barrier

    # a collective of all ranks, so before they part: the first process of a node copies
    if is_url(root):
        folder = root
        if root.endswith(".tar"):  # a pattern: the folder before its first wildcard
            folder, _ = tar_files.split_pattern(root)
        data_files.local_folder(folder)
    host = socket.gethostname()
    indexes: list[ImageFolderIndex] = []
    error = None
    # every rank learns the host names of all, and finds the same first process for its node
    first = ranks.gather_objects(host).index(host)  # rank of the node's first process
    if first == ranks.rank():
        try:
            with barrier.beating("indexed"):
                indexes = function()
        except BadInput as refusal:  # raised on every rank by wait_for_all()
            error = refusal
    # the other ranks wait here, for hours if need be: heartbeats tell that the scan lives
    barrier.wait_for_all("indexed", "to index the images", error)
    # the indexes are on the disk now: the others of the node map the same files
    places = ranks.gather_objects([(index.folder, index.fingerprint) for index in indexes])[first]
    if indexes:
        return indexes
    try:
        return [open_index(*place) for place in places]
    except BadInput:  # containers of one node have one host name, but perhaps different disks
        return function()


def look(
    root: str, split: str, cache: str, classes: Sequence[str] | None, log: Log, **division: Any
) -> Listing:
    """Return the images of a split of a folder, or of tar files. division: val_share, splits and labelled
    of load()."""
    division = {"val_share": VAL_SHARE} | division
    if is_folder(root) and tar_files.is_folder(root):
        root = os.path.join(glob.escape(root).replace("{", "[{]"), "*.tar")  # as in its name
    if root.endswith(".tar") and not is_folder(root):
        return tar_files.look(root, split, cache, classes, log, **division)
    return listing.look(root, split, classes, log, **division)


def one_line(log: Log) -> Log:
    """Return a `log` for texts with file names, which may contain line breaks and unprintable characters."""
    return lambda text: log(printable(" ".join(text.split())))


def scan_listing(listing: Listing, cache: str, log: Log) -> ImageFolderIndex:
    """Return the index of the listed files without the bad images, from `cache` as in load(). Raises BadInput
    if files cannot be read or the index cannot be written.

    load() and the loaders of pairs call it at each start; it reads images only if they are new or changed."""
    root = listing.root
    folder = own_place(_name_index(listing, cache), log)
    # without the lock: at most starts the index is there, and no file has changed
    index = open_intact(folder)
    if index is None or not _is_current(index, listing):
        with explained(f"cannot write the index of {root} to {cache}"):
            os.makedirs(cache, exist_ok=True)
            with locked(f"{folder}.lock"):
                index = open_intact(folder, log)  # perhaps another process has made it meanwhile
                if index is None or not _is_current(index, listing):
                    index = _scan(folder, listing, index, log)
    try:
        if changes := images.judge(np.asarray(index.traits)):
            log(f"{listing.split}: of {len(index)} images {changes}")
    except images.BadImage as error:
        raise BadInput(f"{listing.split} images of {index.base}: {error}") from error
    return index


def _name_index(listing: Listing, cache: str) -> str:
    """Return the path of the index of a listing in a cache folder."""
    parts = [listing.root]
    parts += [str(option) for option in (listing.val_share, listing.splits) if option]
    if listing.val_share:  # version 0.31 and earlier divided in another way
        parts.append("by class")
    return _place(cache, listing.split, parts)


def name_former(root: str, cache: str) -> str:
    """Return the path of the index that version 0.55.0 made for training with the former division."""
    return _place(cache, "train", [root, str(VAL_SHARE)])


def _place(cache: str, split: str, parts: list[str]) -> str:
    digest = hashlib.blake2b(os.fsencode("\0".join(parts)), digest_size=6).hexdigest()
    return os.path.join(os.path.abspath(cache), f"{split}-{digest}")


def _is_current(index: ImageFolderIndex, listing: Listing) -> bool:
    """Return whether an index has the names and labels of the listed files, and the sizes and times of
    _COMPARED of them. False if a read has found a file that was rewritten: all are compared then.

    scan_listing() asks at each start, and again when it holds the lock."""
    if not index.is_complete or os.path.exists(os.path.join(index.folder, CHANGED)):
        return False
    bad = {path for path, _, _, _ in index.bad}
    is_good = np.ones(len(listing.paths), bool)
    if bad:
        is_good = np.array([path not in bad for path in listing.paths])
    return _has_names(index, listing, is_good) and _has_states(index, listing, is_good)


def _has_names(index: ImageFolderIndex, listing: Listing, is_good: np.ndarray) -> bool:
    """Return whether an index has the names and labels of all listed files. They are in memory: no call of
    the file system is needed. is_good: bool [n], whether a listed file is not one of the bad ones."""
    count = len(listing.paths)
    paths = listing.paths if is_good.all() else list(itertools.compress(listing.paths, is_good))
    facts = (index.base, index.classes, index.division, len(index), len(index.bad))
    if facts != (listing.base, listing.classes, listing.division, len(paths), count - len(paths)):
        return False
    names = np.insert(index.names, index.offsets[1:-1], 0).tobytes()  # with \0 between them
    return names == os.fsencode("\0".join(paths)) and np.array_equal(index.labels, listing.labels[is_good])


def _has_states(index: ImageFolderIndex, listing: Listing, is_good: np.ndarray) -> bool:
    """Return whether _COMPARED of the files have the sizes and times of an index with these names. is_good:
    as for _has_names()."""
    count = len(listing.paths)
    states = np.empty((count, 2), np.int64)  # sizes and times when the files were read
    states[is_good] = np.stack([index.bytes, index.mtimes], axis=1)
    if index.bad:
        states[~is_good] = [(size, mtime) for _, size, mtime, _ in index.bad]
    ctimes = np.zeros(count, np.int64)
    ctimes[is_good] = index.ctimes
    rows = np.arange(count)  # those that are compared
    if count > _COMPARED and listing.states is None:
        rows = np.linspace(0, count - 1, _COMPARED).astype(np.int64)
    present = listing.get_states(rows)
    if not np.array_equal(present[:, :2], states[rows]):
        return False
    good_rows = is_good[rows]
    return not _find_replaced(present[good_rows, 2], ctimes[rows][good_rows]).any()


def _find_replaced(present: np.ndarray, stored: np.ndarray) -> np.ndarray:
    """Return bool [n], whether a file may have been replaced by one of the same size and mtime: its ctime is
    another one. If all are, the folder was copied, mounted elsewhere or given other permissions, and no file
    has to be read again.

    present, stored: int64 [n], the ctimes of the files and those in an index. A start compares them, of some
    files and then perhaps of all."""
    is_other = present != stored
    return np.zeros_like(is_other) if is_other.all() else is_other


def _judge(index: ImageFolderIndex, max_bad: float, log: Log) -> None:
    """Raise BadInput if too many files of a folder are not complete images. Otherwise log a line on those
    that are skipped.

    load() calls it at each start, also for an index of an earlier run: --max_bad_images may be another one.
    max_bad: the share that may be bad.
    """
    bad = index.excluded  # (path, reason) of each file that the index leaves out
    total = len(index) + len(bad)
    if not bad:
        return
    reasons = shown([f"{path}: {reason}" for path, reason in bad])
    if len(bad) == total:
        raise BadInput(f"all {total} images of {index.base} are bad: {reasons}")
    share = len(bad) / total
    if share > max_bad:
        percent = math.ceil(1000 * len(bad) / total) / 10  # rounded up: with this option they are skipped
        raise BadInput(
            f"{len(bad)} of {total} images of {index.base} are bad: {reasons}. "
            f"--max_bad_images {percent:g}% skips them"
        )
    log(f"skipped {len(bad)} bad of {total} images of {index.base}: {reasons}")


def _inspect(path: str, member: Sequence[int] | None) -> tuple:
    """Read an image and return what the index has of it: (bytes, mtime and ctime in nanoseconds, CRC-32,
    *images.Header); of a bad image (bytes, mtime, reason).

    _scan() calls it for each file that is new or has changed, in several threads if the files are on a slow
    disk. path: a file, or a member of a tar file as tar_files.split_path() takes it.
    member: bytes, mtime and ctime of a member. None: the open file has them, because a call of stat with its
    path would cost as much as reading it. Raises OSError or BadInput if the file cannot be read.
    """
    file_path, offset = tar_files.split_path(path) or (path, 0)
    descriptor = os.open(file_path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for a writer
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BadInput("it is not a file")
        size, mtime, ctime = member or (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        # before it is read: the whole file is taken into memory
        images.check_bytes(size)
        # one byte more, to notice a file that grows while it is read; in a tar another member follows
        most = size if member else size + 1
        content = tar_files.read_descriptor(descriptor, offset, most)
        if len(content) != size:
            now = "more" if len(content) > size else str(len(content))
            raise BadInput(f"{size} bytes when it was listed, {now} when read")
        return size, mtime, ctime, zlib.crc32(content), *images.inspect(content)
    except images.BadImage as error:
        return size, mtime, str(error)
    finally:
        os.close(descriptor)


def _scan(folder: str, listing: Listing, old: ImageFolderIndex | None, log: Log) -> ImageFolderIndex:
    """Read the files that are not in the old index, and write a new index. Raises BadInput if files cannot be
    read, after the index was written: the next scan reads only those.

    scan_listing() calls it in the process that holds the lock. It may take hours."""
    count = len(listing.paths)
    paths = listing.paths
    # in the order of the values of _inspect()
    read_columns = ("bytes", "mtimes", "ctimes", "crc32", "widths", "heights", "plain", "traits")
    columns = {name: np.zeros(count, COLUMNS[name]) for name in read_columns}
    bad: dict[int, tuple] = {}  # row -> bytes, mtime, reason
    unread: dict[int, str] = {}  # row -> reason
    failures: list[Exception] = []  # those of the unread files
    # _reuse() compares them with the old index; for a list, get_states() refuses files that do not exist
    if old is not None or listing.is_list:
        columns["bytes"], columns["mtimes"], columns["ctimes"] = listing.get_states(np.arange(count)).T.copy()
    # the rows whose files are read
    rows = np.arange(count) if old is None else _reuse(listing, old, columns, bad, log)
    prefix = os.path.join(listing.base, "")

    def read(first: int) -> int:
        """Read a part of the files, perhaps in a thread, and return their number. Each row belongs to one
        call, so the calls do not disturb each other."""
        part = rows[first : first + FILES_PER_TASK].tolist()
        good_rows = []
        for row in part:
            member = listing.states[row].tolist() if listing.states is not None else None
            path = prefix + paths[row]
            try:
                result = read_again(functools.partial(_inspect, path, member), path)
            except (OSError, BadInput) as error:
                unread[row] = getattr(error, "strerror", None) or str(error)
                failures.append(error)
                continue
            is_bad = len(result) == 3  # bytes, mtime, reason
            if is_bad:
                bad[row] = result
            else:
                good_rows.append((row, *result))
        if good_rows:
            numbers, *values_of_columns = zip(*good_rows, strict=True)
            places = np.array(numbers)  # once, and not in each column again
            for name, values in zip(read_columns, values_of_columns, strict=True):
                columns[name][places] = values
        return len(part)

    with progress(len(rows), f"scanning {listing.base}") as bar:
        for done in map_files(read, range(0, len(rows), FILES_PER_TASK)):
            bar.update(done)
    # the index has the whole images: the next start finds the unread files new, and reads them
    good = np.ones(count, dtype=bool)
    good[[*bad, *unread]] = False
    columns["labels"] = listing.labels
    meta: dict[str, Any] = {
        "root": listing.root,
        "base": listing.base,
        "split": listing.split,
        "classes": listing.classes,
        "division": listing.division,
        "stamp": "" if unread else "complete",
        "bad": [(paths[row], *bad[row]) for row in sorted(bad)],
    }
    good_paths = [paths[row] for row in np.flatnonzero(good)]
    good_columns = {name: column[good] for name, column in columns.items()}
    index = write_index(folder, good_paths, good_columns, **meta)
    if unread:
        unread_rows = sorted(unread)
        reasons = shown([f"{paths[row]}: {unread[row]}" for row in unread_rows])
        reasons += describe_dead_links(prefix + paths[row] for row in unread_rows[:SHOWN])
        line = f"{len(unread)} of {count} files in {listing.base} cannot be read: {reasons}"
        if all(map(is_temporary, failures)):  # a restart may succeed
            raise refusal(line, failures[0])
        raise BadInput(line)
    return index


def _reuse(listing: Listing, old: ImageFolderIndex, columns: dict, bad: dict, log: Log) -> np.ndarray:
    """Copy the unchanged files' values from the old index. Return the rows of the other files, which _scan()
    then reads.

    columns: of the new index, with the present sizes and times. bad: gets the bad images that are unchanged.
    """
    # a file is known by its path, its size and its time
    states = enumerate(zip(old.bytes.tolist(), old.mtimes.tolist(), strict=True))
    old_rows = {(old.name(row), *state): row for row, state in states}
    old_reasons = {(path, size, mtime): reason for path, size, mtime, reason in old.bad}
    unchanged = []
    sources = []  # their rows in the old index
    changed = []
    files = zip(listing.paths, columns["bytes"].tolist(), columns["mtimes"].tolist(), strict=True)
    for row, file in enumerate(files):
        if file in old_rows:
            unchanged.append(row)
            sources.append(old_rows[file])
        elif file in old_reasons:
            _, size, mtime = file
            bad[row] = size, mtime, old_reasons[file]
        else:
            changed.append(row)
    is_replaced = _find_replaced(columns["ctimes"][unchanged], old.ctimes[sources])
    changed += np.array(unchanged, np.int64)[is_replaced].tolist()
    unchanged = np.array(unchanged, np.int64)[~is_replaced].tolist()
    sources = np.array(sources, np.int64)[~is_replaced].tolist()
    for name, column in columns.items():
        if name != "ctimes":  # the column has the present ones
            column[unchanged] = getattr(old, name)[sources]
    log(f"{listing.base}: {len(changed)} of {len(listing.paths)} files are new or changed")
    return np.array(sorted(changed), np.int64)

"""Find the images in a tree of folders, stat them, and read many files."""

import functools
import itertools
import os
import resource
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
from tqdm import tqdm

from bootfile.ground.again import is_temporary, refusal
from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained, read_again
from datasets.dead_links import describe_dead_links, refuse_dead_link
from datasets.folders import images

Log = Callable[[str], object]  # called with one line of text
SHOWN = 10  # entries of a long list in a message
_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
_SYSTEM = {"__MACOSX", "@eaDir", "#recycle", "$RECYCLE.BIN", "lost+found"}  # folders that systems add
_THREADS = 16  # more than cores: on a network file system most threads wait
_TURN = 64  # tasks that threads do before the waiting is measured again, for the first time
FILES_PER_TASK = 64  # files per task


class Entry(NamedTuple):
    """A file or folder in a folder. is_folder: also of a link to one."""

    name: str
    path: str
    is_folder: bool
    is_link: bool


def list_folder(folder: str) -> list[Entry]:
    """Return what is directly in a folder, in any order. Raises BadInput."""

    def read() -> list[Entry]:
        with os.scandir(folder) as entries:
            return [Entry(entry.name, entry.path, _is_folder(entry), entry.is_symlink()) for entry in entries]

    with explained(f"cannot list {folder}"):
        return read_again(read, folder)


def _is_folder(entry: os.DirEntry) -> bool:
    """Return whether an entry is a folder or leads to one; False for a link that leads nowhere. Raises
    OSError if its file system does not answer."""
    try:
        return entry.is_dir()
    except OSError as error:
        if is_temporary(error):
            raise
        return False


def walk(base: str) -> tuple[list[str], str, set[str]]:
    """Return (relative paths of the images in a tree, count_endings() of its other files, the folders in it).
    Links are followed. Each start calls it, in the process of a node that indexes the images. Raises BadInput
    if a folder cannot be listed, or if a link leads nowhere and may have been a folder."""
    paths: list[str] = []
    others = Counter[str]()  # ending -> other files than images, and hidden folders
    first_folders: set[str] = set()
    # folders to list, each with its real path and those of its parents; the last one is next
    waiting: list[tuple[str, tuple[str, ...]]] = [(base, (os.path.realpath(base),))]
    with progress(None, f"listing {base}") as bar:
        while waiting:
            folder, parents = waiting.pop()
            images_here, folders = _list_images(folder, others)
            prefix = os.path.join(folder[len(base) :].lstrip("/"), "")
            paths += [prefix + name for name in sorted(images_here)]
            for name in folders:
                path = os.path.join(folder, name)
                real_path = os.path.realpath(path)
                # a link to a parent folder is an endless loop
                if real_path not in parents:
                    waiting.append((path, (*parents, real_path)))
                    if folder == base:
                        first_folders.add(name)
            bar.update(len(images_here))
    return paths, count_endings(others), first_folders


def _list_images(folder: str, others: Counter[str]) -> tuple[list[str], list[str]]:
    """Return (names of the images, names of the folders) directly in a folder, without hidden ones, and count
    its other files in `others`. Raises BadInput, also for a link that leads nowhere."""
    names = []
    folders = []
    for entry in list_folder(folder):
        is_seen = not is_hidden(entry.name)
        if entry.is_folder and is_seen:
            folders.append(entry.name)
        elif is_seen and is_image(entry.name):
            names.append(entry.name)
        else:
            others[ending(entry.name)] += 1
            if entry.is_link and is_seen:  # it may have led to a folder
                refuse_dead_link(entry.path)
    return names, folders


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is left out: it is hidden, or a system has added it."""
    return name[0] == "." or name in _SYSTEM


def is_image(name: str) -> bool:
    """Return whether a file has the ending of an image."""
    return name.lower().endswith(images.EXTENSIONS)


def ending(name: str) -> str:
    """Return the ending of a file that is left out, in small letters."""
    return "hidden" if is_hidden(name) else os.path.splitext(name)[1].lower() or "without ending"


def count_endings(endings: Counter[str]) -> str:
    """Return the endings of files with their numbers as text: ".gif 3, .heic 2"; "" without files."""
    return ", ".join(f"{ending} {count}" for ending, count in endings.most_common())


def map_files(task: Callable[[_Task], _Result], tasks: Iterable[_Task]) -> Iterator[_Result]:
    """Yield the result of `task` for each of the tasks in order, for tasks that read files.

    This thread does the tasks until one takes more than twice its CPU time and has waited for a disk or a
    network (not for a busy processor: _count_waits()). _THREADS threads do the next ones then, in turns that
    become longer. For files in the page cache they would take five times as long, because they wait for
    Python's lock at each call. The scans of images and tar files, and stat_files(), call it in the process of
    a node that indexes the data.
    """
    remaining = iter(tasks)
    turn = _TURN
    with ThreadPoolExecutor(_THREADS) as pool:
        for next_task in remaining:
            begin = time.perf_counter()
            cpu_begin = time.thread_time()
            waits_before = _count_waits()
            result = task(next_task)
            seconds = time.perf_counter() - begin
            cpu_seconds = time.thread_time() - cpu_begin
            has_waited = seconds > 2 * cpu_seconds and _count_waits() > waits_before
            yield result
            if has_waited:
                # a turn in threads; then this thread does one task, and measures again
                yield from pool.map(task, itertools.islice(remaining, turn))
            turn = 2 * turn if has_waited else _TURN


def _count_waits() -> int:
    """Return how often this thread has waited for something other than a processor."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def stat_files(base: str, paths: list[str]) -> np.ndarray:
    """Return int64 [n, 3], the sizes, mtimes and ctimes (ns) of files. Raises BadInput if some are missing.

    Listing.get_states() calls it at each start, to compare the files with their index."""
    prefix = os.path.join(base, "")

    def stat_part(first: int) -> np.ndarray:
        """Return the sizes and times of a part of the files, perhaps in a thread."""
        part = paths[first : first + FILES_PER_TASK]
        return np.array([_state(prefix + path) for path in part], np.int64)

    parts = []
    with progress(len(paths), f"looking through {base}") as bar:
        for part in map_files(stat_part, range(0, len(paths), FILES_PER_TASK)):
            parts.append(part)
            bar.update(len(part))
    states = np.concatenate(parts)
    if missing := [paths[row] for row in np.flatnonzero(states[:, 0] < 0)]:
        link = describe_dead_links(prefix + name for name in missing[:SHOWN])
        raise BadInput(f"{len(missing)} of {len(paths)} files are missing in {base}: {shown(missing)}{link}")
    return states


def _state(path: str) -> tuple[int, int, int]:
    """Return the size, mtime and ctime (ns) of a file; (-1, -1, -1) if it is missing or not a file. Raises
    Unavailable."""
    try:
        status = read_again(functools.partial(os.stat, path), path)
    except OSError as error:
        if is_temporary(error):
            raise refusal(f"cannot read {path}: {error.strerror}", error) from error
        return -1, -1, -1
    if not stat.S_ISREG(status.st_mode):
        return -1, -1, -1
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def shown(texts: Sequence[str]) -> str:
    """Return the first texts of a long list, and the number of the others."""
    parts = list(texts[:SHOWN])
    if len(texts) > SHOWN:
        parts.append(f"and {len(texts) - SHOWN} more")
    return "; ".join(parts)


def progress(total: int | None, text: str, done: int = 0, unit: str = "image") -> tqdm:
    """Return a progress bar that counts images. done: those that were ready before."""
    # not a terminal: print every 10 s, so that a long scan does not look like a hang
    seconds = 0.1 if os.isatty(2) else 10
    return tqdm(total=total, initial=done, desc=text, unit=unit, delay=2, mininterval=seconds)

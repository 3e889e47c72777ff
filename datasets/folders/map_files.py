"""Read many files: in threads while they wait for a disk or a network."""

import functools
import itertools
import os
import resource
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from bootfile.ground.again import is_temporary, refusal
from bootfile.ground.errors import BadInput
from bootfile.ground.files import read_again
from datasets import links
from datasets.folders.messages import SHOWN, progress, shown

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
_THREADS = 16  # more than cores: on a network file system most threads wait
_TURN = 64  # tasks that threads do before the waiting is measured again, for the first time
FILES_PER_TASK = 64  # files per task


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
                turn *= 2
            else:
                turn = _TURN


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
    missing = np.flatnonzero(states[:, 0] < 0)
    if len(missing):
        names = [paths[row] for row in missing]
        link = links.describe_first(prefix + name for name in names[:SHOWN])
        raise BadInput(f"{len(missing)} of {len(paths)} files are missing in {base}: {shown(names)}{link}")
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

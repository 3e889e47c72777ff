"""Read many files: in threads while they wait for a disk or a network."""

import itertools
import os
import resource
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from bootfile.ground.errors import BadInput
from datasets.folders.messages import progress, shown

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
_THREADS = 16  # more than cores: on a network file system most threads wait
_TURN = 64  # tasks that threads do before the waiting is measured again, for the first time
FILES_PER_TASK = 64  # files per task


def map_files(task: Callable[[_Task], _Result], tasks: Iterable[_Task]) -> Iterator[_Result]:
    """Yield task(each) in order, for tasks that read files.

    This thread does the tasks until one takes more than twice its CPU time and has waited for a disk or a
    network (not for a busy processor: _count_waits()). _THREADS threads do the next ones then, in turns that
    become longer. For files in the page cache they would take five times as long, because they wait for
    Python's lock at each call.
    """
    waiting, turn = iter(tasks), _TURN
    with ThreadPoolExecutor(_THREADS) as pool:
        for each in waiting:
            begin, used, gave_up = time.perf_counter(), time.thread_time(), _count_waits()
            result = task(each)
            waits = time.perf_counter() - begin > 2 * (time.thread_time() - used) and _count_waits() > gave_up
            yield result
            if waits:
                yield from pool.map(task, itertools.islice(waiting, turn))
            turn = 2 * turn if waits else _TURN


def _count_waits() -> int:
    """Return how often this thread has waited for something other than a processor."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def stat_files(base: str, paths: list[str]) -> np.ndarray:
    """Return int64 [n, 2], the sizes and mtimes (ns) of files. Raises BadInput if some are missing."""

    def states(first: int) -> np.ndarray:
        part = []
        for path in paths[first : first + FILES_PER_TASK]:
            state = -1, -1
            try:
                status = os.stat(prefix + path)
            except OSError:
                pass
            else:
                if stat.S_ISREG(status.st_mode):
                    state = status.st_size, status.st_mtime_ns
            part.append(state)
        return np.array(part, np.int64)

    parts, prefix = [], os.path.join(base, "")
    with progress(len(paths), f"looking through {base}") as bar:
        for part in map_files(states, range(0, len(paths), FILES_PER_TASK)):
            parts.append(part)
            bar.update(len(part))
    known = np.concatenate(parts)
    missing = np.flatnonzero(known[:, 0] < 0)
    if len(missing):
        which = shown([paths[row] for row in missing])
        raise BadInput(f"{len(missing)} of {len(paths)} files are missing in {base}: {which}")
    return known

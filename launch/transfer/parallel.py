"""Transfer many files at a time, with a progress bar."""

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from tqdm import tqdm

from common.distributed import preemption
from common.object_store import parallel
from common.object_store.store import ObjectStore
from launch.explain import human_size

THREADS = 16
_ABORTING = 60.0  # seconds after Ctrl-C to end the requests under way and remove unfinished uploads
Progress = Callable[[int], object]  # takes a number of bytes


def run(store: ObjectStore, text: str, size: int, tasks: Iterable[Callable[[Progress], Any]]) -> list[Any]:
    """Return [task(progress) for task in tasks]. The tasks run in threads, and the first failure stops all.

    text: the title of the bar. size: bytes of all tasks. progress takes a number of bytes.
    """
    preemption.unwind_within(_ABORTING)
    interval = 0.1 if os.isatty(2) else 10  # seconds
    with tqdm(
        desc=text, total=size, unit="B", unit_scale=True, delay=0.5, mininterval=interval, disable=not size
    ) as bar:
        return parallel.run(store, (partial(task, bar.update) for task in tasks))


def describe(sizes: list[int]) -> str:
    """Return "3 files, 1.2 MB"."""
    return f"{len(sizes)} file{'s' * (len(sizes) != 1)}, {human_size(sum(sizes))}"

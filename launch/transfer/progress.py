"""Transfer many files at a time, with a progress bar."""

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from tqdm import tqdm

from bootfile.processes import signals
from common.object_store.store import ObjectStore
from launch.explain import human_size

T = TypeVar("T")
_ABORTING = 60.0  # seconds after Ctrl-C to end the requests under way and remove unfinished uploads


def run(store: ObjectStore, text: str, size: int, tasks: Iterable[Callable[..., object]]) -> None:
    """Call task(progress=...) for each task in threads. The first failure stops all.

    text: the title of the bar. size: bytes of all tasks. progress takes a number of bytes.
    """
    signals.unwind_within(_ABORTING)
    interval = 0.1 if os.isatty(2) else 10  # seconds
    with tqdm(desc=text, total=size, unit="B", unit_scale=True, delay=0.5, mininterval=interval) as bar:
        store.run(partial(task, progress=bar.update) for task in tasks)


def split(store: ObjectStore, files: list[T], is_known: Callable[[T], bool]) -> tuple[list[T], list[T]]:
    """Return (the files that must be transferred, the known ones). is_known(file) is called in threads."""
    parts: tuple[list[T], list[T]] = [], []
    for file, known in zip(files, store.run(partial(is_known, file) for file in files), strict=True):
        parts[known].append(file)
    return parts


def describe(sizes: Iterable[int]) -> str:
    """Return "3 files, 1.23MB"."""
    sizes = list(sizes)
    return f"{len(sizes)} file{'s' * (len(sizes) != 1)}, {human_size(sum(sizes))}"

"""`launch upload` and `fetch`: move files to and from an object store.

They take a folder and an s3:// or obs:// URL, and skip files that are equal on both sides, by digests if the
store keeps any. The same command continues an interrupted transfer. `fetch` lists the files that it would
replace, and `upload --clean` what it would remove; both ask first. Outside are other protocols.
"""

import contextlib
import os
from collections.abc import Iterator, Sequence

from tqdm import tqdm

from bootfile.ground.numbers import counted
from bootfile.processes import signals
from common.object_store import sync
from common.object_store.store import Object
from launch.explain import human_size

_ABORTING = 60.0  # seconds after Ctrl-C to end the requests under way and remove unfinished uploads


class _Bar(sync.Progress):
    """Moves a bar with each part of a file that arrives. The threads of a transfer call add()."""

    def __init__(self, bar: tqdm):
        super().__init__()
        self._bar = bar

    def add(self, count: int) -> None:
        super().add(count)
        self._bar.update(count)


@contextlib.contextmanager
def show_progress(text: str, objects: Sequence[Object]) -> Iterator[sync.Progress]:
    """Show a bar on standard error during the block, which transfers these objects, in the main thread. After
    Ctrl-C the block has _ABORTING seconds to clean up."""
    signals.unwind_within(_ABORTING)
    size = sum(entry.size for entry in objects)
    interval = 0.1 if os.isatty(2) else 10.0  # seconds: each step of the bar is a line of a log file
    with tqdm(desc=text, total=size, unit="B", unit_scale=True, delay=0.5, mininterval=interval) as bar:
        yield _Bar(bar)


def describe(objects: Sequence[Object]) -> str:
    """Return "3 files, 1.23MB"."""
    return f"{counted(len(objects), 'file')}, {human_size(sum(entry.size for entry in objects))}"

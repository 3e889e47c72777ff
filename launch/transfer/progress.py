"""Show the progress of a transfer as a bar, and say how much was transferred."""

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
def show(text: str, objects: Sequence[Object]) -> Iterator[sync.Progress]:
    """Show a bar on standard error during the block, which transfers these objects. text: its title. `upload`
    and `fetch` use it in the main thread. After Ctrl-C they have _ABORTING seconds to clean up."""
    signals.unwind_within(_ABORTING)
    size = _add_sizes(objects)
    interval = 0.1 if os.isatty(2) else 10.0  # seconds: each step of the bar is a line of a log file
    with tqdm(desc=text, total=size, unit="B", unit_scale=True, delay=0.5, mininterval=interval) as bar:
        yield _Bar(bar)


def describe(objects: Sequence[Object]) -> str:
    """Return "3 files, 1.23MB"."""
    return f"{counted(len(objects), 'file')}, {human_size(_add_sizes(objects))}"


def _add_sizes(objects: Sequence[Object]) -> int:
    """Return the bytes of all objects."""
    return sum(entry.size for entry in objects)

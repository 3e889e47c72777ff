"""A pack in the memory or on the scratch disk of the node, made for a job and deleted by its last user."""

import contextlib
import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.ground.exits import BadInput, import_optional
from datasets.stores import pack, pack_lease

psutil = import_optional("psutil", "packs in memory need psutil")

PLACES = ("/dev/shm", "/cache")  # memory, and ModelArts' local disk
_OF_MEMORY = 0.6  # share of the free memory: training needs the rest
_LIMITS = (  # files of the container's memory limit and usage: control groups version 2 and 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class Local:
    """A pack of a data set on this node. `store`: the PackStore, or None if there is not enough room.

    mode: "active": the last process that uses the pack deletes it, and the next job uses or deletes the pack
        of a killed job; "offline": the pack stays.
    log: called with one line of text.
    form: as in pack.build().
    """

    def __init__(
        self,
        index: Any,
        mode: str,
        log: Callable[[str], None],
        form: str = "decoded",
    ):
        self.store, self._opened, reasons = None, contextlib.ExitStack(), []
        for place in PLACES:
            folder = os.path.join(place, f"bootfile-{os.getuid()}")
            path = pack.place(folder, index, form)
            try:
                if not os.access(place, os.W_OK):
                    raise BadInput(f"0.00 GB are free in {place}")
                _make(folder)
                self._opened.enter_context(pack_lease.leased(path))
                pack_lease.sweep(folder)
                room = functools.partial(_free, place)
                self.store = pack.build(index, path, form, room=room)
                self._opened.callback(self.store.close)
                if mode == "offline":
                    pack_lease.keep(path)
                return
            except (BadInput, OSError) as error:
                reasons.append(str(error))
                self.close()
        needed = pack.size_of(index, form)
        log(f"no pack of {needed / 1e9:.2f} GB on the node: {'; '.join(reasons)}")

    def close(self) -> None:
        self._opened.close()


def _make(folder: str) -> None:
    """Create a folder that only this user can open, because all users can write to its parent."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    status = os.lstat(folder)
    if status.st_uid != os.getuid() or os.path.islink(folder):
        raise BadInput(f"{folder} belongs to another user")


def _free(place: str) -> int:
    """Return the bytes that a pack may take now."""
    free = shutil.disk_usage(place).free
    return min(free, int(_OF_MEMORY * _memory())) if place == "/dev/shm" else free


def _memory() -> int:
    """Return the free bytes of memory: of the machine, or of the container if these are fewer."""
    free = psutil.virtual_memory().available
    for limit, used in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
    return free

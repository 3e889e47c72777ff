"""A pack in the memory or on the scratch disk of the node, made for a job and taken away by the last one that
used it."""

import contextlib
import fcntl
import os
import shutil
from pathlib import Path

import psutil

from common.exits import BadInput
from datasets.stores import forms, pack

PLACES = ("/dev/shm", "/cache")  # memory, and ModelArts' local disk
_OF_MEMORY = 0.6  # share of what is free: training needs some, too
_LIMITS = (  # of the container and what it uses, control groups version 2 and 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class Local:
    """The pack of a data set, where there is room on the node: in `store`, None where there is none.

    mode: "active", so that the last process that lets go takes it away (what a killed job leaves, the next
    one uses); "offline" leaves it. source: as in pack.build().
    """

    def __init__(
        self, index, mode: str, say, source=None, places: tuple[str, ...] | None = None, form: str = "decoded"
    ):
        self.store, self._lease, reasons = None, None, []
        needed = pack.size_of(index, form, forms.SHORT_SIDE)
        for place in places or PLACES:
            folder = os.path.join(place, f"bootfile-{os.getuid()}")
            self._path = pack.place(folder, index, form)
            begun = os.path.exists(f"{self._path}.lock")  # by another process of this node, perhaps
            free = _free(place)
            if not begun and needed > free:
                reasons.append(f"{max(0, free) / 1e9:.2f} GB are free in {place}")
                continue
            try:
                _make(folder)
                if mode == "active":
                    self._lease = open(f"{self._path}.lease", "a")  # noqa: SIM115
                    fcntl.flock(self._lease, fcntl.LOCK_SH)
                self.store = pack.build(index, self._path, form, source=source)
                return
            except (BadInput, OSError) as error:
                reasons.append(str(error))
                self._drop()
        say(f"no pack of {needed / 1e9:.2f} GB on the node: {'; '.join(reasons)}")

    def close(self) -> None:
        if self.store:
            self.store.close()
        if self._lease:
            with contextlib.suppress(OSError):  # others use it still
                fcntl.flock(self._lease, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(self._path, ignore_errors=True)
            self._drop()

    def _drop(self) -> None:
        if self._lease:
            self._lease.close()
            self._lease = None


def _make(folder: str) -> None:
    """For this user alone: the places are open to all."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    status = os.lstat(folder)
    if status.st_uid != os.getuid() or os.path.islink(folder):
        raise BadInput(f"{folder} belongs to somebody else")


def _free(place: str) -> int:
    """Bytes."""
    if not os.path.isdir(place) or not os.access(place, os.W_OK):
        return 0
    free = shutil.disk_usage(place).free
    return min(free, int(_OF_MEMORY * _memory())) if place == "/dev/shm" else free


def _memory() -> int:
    """Bytes that are free: of the machine's, and of what the container is given."""
    free = psutil.virtual_memory().available
    for limit, used in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
    return free

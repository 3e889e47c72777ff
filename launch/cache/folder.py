"""Make, read, list and remove the packs in a folder of this node."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from common.ground.exits import BadInput
from datasets.folders.image_folder import ImageFolderIndex
from datasets.stores import forms, pack, pack_lease
from launch.cache.check import DAMAGED, MISSING
from launch.cache.sets import DataSet, Read, describe_room


class Packs:
    """A folder of packs. log: called with one line to print."""

    form, forms = "decoded", forms.FORMS

    def __init__(self, folder: str, log: Callable[[str], object]):
        self.folder, self._log = os.path.abspath(folder), log

    def close(self) -> None:
        pass

    def preload(self, index: ImageFolderIndex, form: str, workers: int) -> int:
        """Make the pack if it is missing, and return the number of samples. Raises BadInput, also if there is
        not enough space."""
        pack.build(index, pack.place(self.folder, index, form), form, threads=workers).close()
        return len(index)

    @contextlib.contextmanager
    def reader(self, index: ImageFolderIndex, form: str) -> Iterator[Read]:
        """Yield read(ids) -> list of bytes (encoded), uint8 [height, width, 3], MISSING or DAMAGED."""
        path = pack.place(self.folder, index, form)
        meta, store, absent = pack.described(path), None, MISSING
        if wrong := pack.damage(path, meta):
            absent = DAMAGED
            self._log(f"{index.split}: the pack is damaged: {wrong}; `preload` rebuilds the damaged parts")
        elif meta.get("whole"):
            store = pack.PackStore(path, index)
        else:
            self._log(f"{index.split}: no finished pack at {path}")

        def read(ids: np.ndarray) -> list[bytes | np.ndarray | str]:
            found: list[bytes | np.ndarray | str] = []
            for id in ids.tolist():
                try:
                    found.append(store.sample(id).value(form) if store else absent)
                except (BadInput, LookupError, ValueError):
                    found.append(DAMAGED)
            return found

        try:
            yield read
        finally:
            if store:
                store.close()

    def sets(self, counted: bool = True) -> list[DataSet]:
        """Return the packs. counted: used by servers only."""
        found = []
        try:
            names = sorted(os.listdir(self.folder))
        except OSError as error:
            raise BadInput(f"--to {self.folder}: {error.strerror}") from error
        for name in names:
            path = os.path.join(self.folder, name)
            meta = pack.described(path)
            if meta or (name.endswith(".pack") and os.path.isdir(path)):
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    found.append(_data_set(path, meta))
        return found

    def remove(self, each: DataSet) -> None:
        """Remove a pack. Processes that have mapped it can still read it. Raises BadInput."""
        path = os.path.join(self.folder, each.name)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(path, pack.META))  # first: a partly removed folder is not a pack
            shutil.rmtree(path)
            pack_lease.forget(path)
        except OSError as error:
            raise BadInput(f"cannot remove {path}: {error.strerror}") from error

    def describe_room(self) -> str:
        disk = shutil.disk_usage(self.folder)
        return describe_room(self.folder, disk.used, disk.total, f"{disk.free / 1e9:.3f} GB free")


def _data_set(path: str, meta: dict) -> DataSet:
    """Describe a pack. Raises FileNotFoundError if it is being deleted."""
    name = os.path.basename(path)
    split = name.partition("-")[0]
    users = _users(path)
    names = os.listdir(path) if os.access(path, os.R_OK | os.X_OK) else []
    sizes = [os.lstat(os.path.join(path, name)).st_size for name in names if name.endswith(".arrow")]
    if not meta:  # its meta.json cannot be read; listed, so that `rm` can delete it
        return DataSet(name, split, "?", 0, 0, sum(sizes), "damaged", users, {})
    form = forms.label(meta["form"], meta["short_side"])
    mode = "damaged" if pack.damage(path, meta) else "offline" if meta["whole"] else "unfinished"
    there = meta["count"] if mode == "offline" else min(meta["count"], len(sizes) * pack.SAMPLES_PER_FILE)
    return DataSet(name, split, form, meta["count"], there, sum(sizes), mode, users, {})


def _users(path: str) -> list[str]:
    """Return the processes of this machine that build or read a pack, or delete it at their end. Processes of
    other users may be missing."""
    locks = {".lock": "a process that builds it", ".lease": "a job that deletes it at its end"}
    found = [who for ending, who in locks.items() if _is_locked(path + ending)]
    real = os.path.realpath(path) + os.sep
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if f" {real}" in maps.read_text(errors="surrogateescape"):
                found.append(f"process {maps.parent.name}")
    return found


def _is_locked(path: str) -> bool:
    try:
        with open(path, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False

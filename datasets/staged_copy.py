"""The files of a URL on a node's scratch disk, and the journal of what is there."""

import contextlib
import hashlib
import json
import os
import time

from common.object_store.paths import is_partial
from common.object_store.store import Object


class StagedCopy:
    """place: the folder of the URL. data: the files, where they are whole; hidden: where they are not."""

    def __init__(self, place: str):
        self.place, self.journal = place, os.path.join(place, "journal.jsonl")
        self.data, self.hidden = os.path.join(place, "data"), os.path.join(place, ".data")

    def entries(self) -> dict[str, tuple]:
        """key -> (size, etag, sha256, mtime); a last line that was cut is left out."""
        found = {}
        with contextlib.suppress(OSError), open(self.journal, encoding="utf-8", errors="replace") as file:
            for text in file:
                with contextlib.suppress(ValueError, TypeError, OverflowError, RecursionError):
                    key, size, etag, sha256, mtime = json.loads(text)
                    found[key] = int(size), str(etag), str(sha256), int(mtime)
        return found

    def has(self, folder: str, entry: Object, entries: dict[str, tuple], sha256: str | None) -> bool:
        """Whether the file in `folder` is the object. One of a staging that was killed is read for that.

        entries: those of the journal. sha256: that of the object, where it is known.
        """
        known, whole = sha256, folder == self.data
        size, etag, sha256, mtime = entries.get(entry.key, (-1, "", "", 0))
        if (size, etag) != (entry.size, entry.etag) or known not in (None, sha256):
            return False
        path = os.path.join(folder, entry.key)
        try:
            status = os.lstat(path)
            if status.st_size != size or os.path.islink(path):
                return False
            if whole and status.st_mtime_ns == mtime:
                return True
            with open(path, "rb") as file:
                digest = hashlib.sha256()
                while chunk := file.read(2**20):
                    digest.update(chunk)
            if digest.hexdigest() != sha256:
                return False
            os.utime(path, ns=(mtime, mtime))
            return True
        except (OSError, OverflowError):
            return False

    def others(self, folder: str, objects: list[Object]) -> tuple[list[str], int]:
        """(paths that files have in the hidden folder that are not the store's, bytes of fetches that were
        begun: they stay, and are gone on with)."""
        keys, found, begun = {entry.key for entry in objects}, [], 0
        for base, _, names in os.walk(folder):
            below = os.path.relpath(base, folder)
            for name in names:
                key = name if below == "." else f"{below}/{name}"
                if is_partial(name):
                    begun += os.path.getsize(os.path.join(base, name))
                elif key not in keys:
                    found.append(os.path.join(self.hidden, key))
        return found, begun

    def listed_at(self) -> float | None:
        """When the store was last listed for this copy, seconds of clock(); None if not since this machine
        was started."""
        try:
            with open(os.path.join(self.place, "state.json"), encoding="utf-8") as file:
                state = json.load(file)
            return float(state["listed"]) if boot() and state["boot"] == boot() else None
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    def write(self, name: str, text: str) -> None:
        """Make a file of ours appear, whole."""
        path = os.path.join(self.place, name)
        with open(f"{path}.partial", "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.partial", path)


def clock() -> float:
    """Seconds since this machine was started, the same in all processes. The wall clock may be set back."""
    return time.monotonic()


def boot() -> str:
    """Names this start of the machine; "" if the system does not."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:  # not Linux
        return ""


def line(key: str, *entry) -> str:
    """Of the journal."""
    return f"{json.dumps([key, *entry])}\n"


def time_of(entry: Object) -> int:
    """When the file of an object was changed, nanoseconds: the second in which the object was, and within it
    another part for every content."""
    part = int(hashlib.sha256(entry.etag.encode()).hexdigest()[:8], 16) % 10**9
    return int(entry.modified) * 10**9 + part


def sync(folder: str) -> None:
    """Put the names in a folder on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""The local copy of a URL on a node's scratch disk, and the journal of its files."""

import contextlib
import hashlib
import json
import os
import time

from common.files import sha256_file
from common.object_store.paths import is_partial
from common.object_store.store import Object


class StagedCopy:
    """A local copy of a URL in the folder `place`. `data`: folder of the complete copy; `hidden`: before."""

    def __init__(self, place: str):
        self.place, self.journal = place, os.path.join(place, "journal.jsonl")
        self.data, self.hidden = os.path.join(place, "data"), os.path.join(place, ".data")

    def entries(self) -> dict[str, tuple]:
        """Return key -> (size, etag, sha256, mtime). A truncated last line is skipped."""
        found = {}
        with contextlib.suppress(OSError), open(self.journal, encoding="utf-8", errors="replace") as file:
            for text in file:
                with contextlib.suppress(ValueError, TypeError, OverflowError, RecursionError):
                    key, size, etag, sha256, mtime = json.loads(text)
                    found[key] = int(size), str(etag), str(sha256), int(mtime)
        return found

    def has(self, folder: str, entry: Object, entries: dict[str, tuple], sha256: str | None) -> bool:
        """Return whether the file in `folder` is the object.

        The file is read, unless the copy is complete and the modification time is that of the journal.
        entries: of the journal. sha256: of the object, if it is known.
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
            if sha256_file(path) != sha256:
                return False
            os.utime(path, ns=(mtime, mtime))
            return True
        except (OSError, OverflowError):
            return False

    def others(self, folder: str, objects: list[Object]) -> tuple[list[str], int]:
        """Return (the paths, in the hidden folder, of files that are not in the store; the bytes of
        unfinished downloads, which are continued)."""
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
        """Return when the store was last listed for this copy, in seconds of read_clock(); None if that is
        not known or was before the last start of this machine."""
        try:
            with open(os.path.join(self.place, "state.json"), encoding="utf-8") as file:
                state = json.load(file)
            return float(state["listed"]) if read_boot_id() and state["boot"] == read_boot_id() else None
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None


def read_clock() -> float:
    """Return a time in seconds that all processes of this machine share. The wall clock may be set back."""
    return time.monotonic()


def read_boot_id() -> str:
    """Return the id of this start of the machine; "" if the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:  # not Linux
        return ""


def format_line(key: str, *entry) -> str:
    """Return a line of the journal."""
    return f"{json.dumps([key, *entry])}\n"


def time_of(entry: Object) -> int:
    """Return the modification time of an object's file in nanoseconds: the object's second, with a fraction
    that depends on the content."""
    part = int(hashlib.sha256(entry.etag.encode()).hexdigest()[:8], 16) % 10**9
    return int(entry.modified) * 10**9 + part

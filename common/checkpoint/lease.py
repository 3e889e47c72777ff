"""A lease that lets only one job at a time write to a URL: a small object there, which its job renews.

A job that finds the lease of another job watches for 25 s whether it changes. If it does not change, its job
was killed, and the lease is taken over. A job that was paused cannot take it back: a job replaces only the
version that it has read (If-Match).
"""

import contextlib
import json
import os
import socket
import threading
import time
import uuid

from common.ground.exits import BadInput, print_line, printable
from common.object_store.store import ObjectStore

KEY = ".bootfile-lease.json"
RENEW, WATCH = 10.0, 25.0  # seconds
_LATE = 3  # reads, one a second, of a lease that is not found: some stores show a new object late


class Lease:
    """The right to write below a URL.

    Raises BadInput if another job holds the lease, and StoreError.
    """

    def __init__(self, store: ObjectStore):
        self.store, self.url = store, store.location.url()
        self.id, self.lost = uuid.uuid4().hex, ""
        self._ended = threading.Event()
        other, self._etag = self._read()  # the ETag of the version that the next write replaces
        if other:
            self._watch(other)
        self._write()
        self.check()
        self._check_store()
        threading.Thread(target=self._renew, name="lease", daemon=True).start()

    def check(self) -> None:
        """Raise BadInput if another job has taken the lease, because this job was paused for too long."""
        if not self.lost:
            for _ in range(_LATE):
                holder, etag = self._read()
                if holder:
                    break
                time.sleep(1)
            if holder.get("id") == self.id:
                self._etag = etag
            else:
                self.lost = _in_use(self.url, holder)
        if self.lost:
            raise BadInput(self.lost)

    def release(self) -> None:
        self._ended.set()
        self.check()
        self.store.delete([KEY])

    def _watch(self, other: dict) -> None:
        print_line(
            f"{self.url} was last written to by another job, on {other.get('host')}: checking for "
            f"{WATCH:.0f} s whether it still runs"
        )
        deadline = time.monotonic() + WATCH
        while time.monotonic() < deadline:
            time.sleep(1)
            holder, self._etag = self._read()
            if not holder:
                return
            if holder != other:
                raise BadInput(_in_use(self.url, holder))

    def _renew(self) -> None:
        while not self._ended.wait(RENEW) and not self.lost:
            with contextlib.suppress(BadInput):  # the next upload reports it
                self.check()
                if not self._ended.is_set():
                    self._write()

    def _read(self) -> tuple[dict, str | None]:
        """Return the content of the lease, {} if it is missing, and its ETag."""
        content, etag = self.store.read_version(KEY)
        if etag is None:
            return {}, None
        holder = None
        with contextlib.suppress(ValueError, RecursionError):
            holder = json.loads(content)
        return holder if isinstance(holder, dict) and holder else {"id": None}, etag

    def _write(self) -> None:
        """Replace the version that was read. check() notices if another job has replaced it."""
        etag = self.store.replace(KEY, self._content(), self._etag)
        self._etag = self._etag if etag is None else etag

    def _content(self) -> bytes:
        own = {"id": self.id, "host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
        return json.dumps(own).encode()

    def _check_store(self) -> None:
        """Print a warning if the store cannot refuse the write of a second job: If-None-Match must fail."""
        reason = "" if self._etag else "returns no ETag"
        if not reason and (etag := self.store.replace(KEY, self._content(), None)) is not None:
            self._etag, reason = etag, "ignores conditional writes"
        if reason:
            print_line(
                f"warning: the store of {self.url} {reason}: two jobs that start there at the same moment "
                "cannot be kept apart; start only one"
            )


def _in_use(url: str, other: dict) -> str:
    if not other:
        return f"the lease of {url} was deleted, perhaps by another job: nothing more is uploaded"
    return (
        f"{url} belongs to another job that is running (process {printable(str(other.get('pid')))} on "
        f"{printable(str(other.get('host')))}): the results would be mixed; give every job its own train_url"
    )

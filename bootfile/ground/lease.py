"""A lease that lets only one job at a time write to a place: a small record there, which its job renews.

A job that finds the lease of another job watches for 25 s whether it changes, without comparing clocks. If it
does not change, its job was killed, and the lease is taken over. A job that was paused for too long finds the
lease of its successor, and has lost the place.

FolderLease is for a mount whose locks end at this node, such as a bucket mounted with s3fs:

    RUN/.lease/<version>-<id>-<process>-<host>    the highest name is the holder's

Each renewal writes a new name, because mounts may cache the content of a known one. Mounts may also cache the
list of a folder (sshfs: for 20 s) until a file is made in it.
"""

import contextlib
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterable
from typing import Any

from bootfile.ground import errors
from bootfile.ground.errors import BadInput, print_line, printable
from bootfile.ground.files import opener
from bootfile.ground.mounts import LEASE

RENEW = 10.0  # seconds between two writes of the record
WATCH = 25.0  # seconds for which a job watches the record of another one
_NAME = re.compile(r"(?P<version>\d{8})-(?P<id>[0-9a-f]{32})-(?P<pid>\d+)-(?P<host>.*)")
_LATE = 3  # reads, one a second, of a lease that is not found: some stores show a new object late


class Lease:
    """The right to write to `place`, a URL or a folder. Subclasses read and write the record.

    The process that writes makes one before its first write; it may watch another job for 25 s. A thread then
    renews the record until release().

    Raises BadInput if another job holds the lease, StoreError and OSError.
    """

    def __init__(self, place: str):
        self.place = place
        self.lost = ""  # why another job has the place now
        # the record of this job
        self.own: dict[str, Any] = {"id": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid()}
        self._ended = threading.Event()  # set by release()
        self._busy = threading.Lock()  # held while the thread renews: release() waits for it
        other, self.version = self.read()  # the version that the next write replaces
        # the job of this record may run, or was killed: only time tells
        if other:
            self._watch(other)
        self._write()
        # two jobs may have written at the same moment: the one whose record is there has the place
        self.check()
        threading.Thread(target=self._renew, name="lease", daemon=True).start()

    def read(self) -> tuple[dict[str, Any], Any]:
        """Return (record of the holder, its version); ({}, None) if there is none."""
        raise NotImplementedError

    def replace(self, version: Any) -> Any:
        """Write the own record in place of this version, and return its version; None if another job was
        faster. It never has the value of an earlier record."""
        raise NotImplementedError

    def delete(self) -> None:
        """Delete the record, which is the own one."""
        raise NotImplementedError

    def check(self) -> None:
        """Raise BadInput if another job has taken the lease, because this job was paused for too long.

        The thread calls it before each renewal, and a writer before it changes something at the place.
        """
        if not self.lost:
            for _ in range(_LATE):
                holder, version = self.read()
                if holder:
                    break
                time.sleep(1)
            # another id: a job took the place over while this one did not renew its record
            if holder.get("id") == self.own["id"]:
                self.version = version
            else:
                self.lost = self._in_use(holder)
        if self.lost:
            raise BadInput(self.lost)

    def release(self) -> None:
        """Delete the record, so that the next job need not watch it. The holder calls it when it has written
        everything. Raises BadInput if the lease is lost."""
        self._ended.set()
        # the thread must not write the record again after it was deleted
        with self._busy:
            self.check()
            self.delete()

    def _watch(self, other: dict[str, Any]) -> None:
        """Wait until the record of another job is known to be abandoned. The constructor calls it. Raises
        BadInput if the record changes: that job still runs."""
        print_line(
            f"{self.place} was last written to by another job, on {other.get('host')}: checking for "
            f"{WATCH:.0f} s whether it still runs"
        )
        deadline = time.monotonic() + WATCH
        while time.monotonic() < deadline:
            time.sleep(min(1.0, RENEW))
            holder, self.version = self.read()
            if not holder:
                return
            # a renewal: the job is alive
            if holder != other:
                raise BadInput(self._in_use(holder))

    def _renew(self) -> None:
        """Renew the record every 10 s, in a thread, until release() or until the lease is lost."""
        while not self._ended.wait(RENEW) and not self.lost:
            with contextlib.suppress(BadInput, OSError), self._busy:  # the next attempt may succeed
                if not self._ended.is_set():
                    self.check()
                    self._write()
        if self.lost:
            self._stop()

    def _stop(self) -> None:
        """Act when the lease is lost, in the thread. By default the next check() reports it."""

    def _write(self) -> None:
        """Write the record of this job, at the begin and with each renewal."""
        version = self.replace(self.version)
        if version is not None:  # else another job has replaced it, which check() notices
            self.version = version

    def _in_use(self, other: dict[str, Any]) -> str:
        """Return the error for a place that another job holds. other: its record; {} if there is none."""
        if not other:
            return f"the lease of {self.place} was deleted, perhaps by another job: nothing more is written"
        process = printable(str(other.get("pid")))
        host = printable(str(other.get("host")))
        return (
            f"{self.place} belongs to another job that is running (process {process} on {host}): the results "
            "would be mixed; give every job an --output_dir of its own"
        )


class FolderLease(Lease):
    """The right to write to a folder. A job that has lost it ends with code 6 and writes nothing more.

    `names`: the folder of the records.
    """

    def __init__(self, folder: str):
        self.names = os.path.join(folder, LEASE)
        os.makedirs(self.names, exist_ok=True)
        super().__init__(folder)

    def _list(self) -> list[str]:
        """Return the names of the records, that of the holder last."""
        return sorted(filter(_NAME.fullmatch, os.listdir(self.names)))

    def read(self) -> tuple[dict[str, Any], int | None]:
        """Return the parts of the holder's name, and its version."""
        probe = os.path.join(self.names, f".{self.own['id']}")
        open(probe, "w", opener=opener).close()  # so that the mount reads the list of the folder again
        self._unlink([probe])
        match = _NAME.fullmatch(max(self._list(), default=""))
        return (match.groupdict(), int(match["version"])) if match else ({}, None)

    def replace(self, version: int | None) -> int | None:
        """Write a record with the next version. Delete it again, and return None, if another job has
        written that version or a later one."""
        number = (version or 0) + 1
        host = re.sub(r"[^\w.-]", "_", self.own["host"])[:100]
        name = f"{number:08d}-{self.own['id']}-{self.own['pid']}-{host}"
        open(os.path.join(self.names, name), "w", opener=opener).close()
        # after the write: of two jobs that write at the same moment, at least one sees the other
        names = self._list()
        rivals = [other for other in names if other >= f"{number:08d}" and other != name]
        if rivals:  # another job has written this version or a later one
            self._unlink([name])
            return None
        self._unlink(other for other in names if other < name)
        return number

    def delete(self) -> None:
        self._unlink(os.listdir(self.names))
        os.rmdir(self.names)

    def _unlink(self, names: Iterable[str]) -> None:
        """Delete records. Another job may have deleted them already."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.names, name))

    def _stop(self) -> None:
        """End the process at once. The thread that renews the lease calls it: the training may be in a step,
        and would write to the folder of the job that has it now."""
        errors.say_error(self.lost)
        errors.leave(errors.NOT_SAVED)

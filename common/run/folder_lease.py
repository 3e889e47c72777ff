"""A lease for an output folder on a mount whose locks end at this node, such as a bucket mounted with s3fs.

    RUN/.lease/<term>-<holder>-<number>    a new name every 10 s: mounts may cache the content of a known one

A job that finds names of another holder watches for 25 s whether they change, without comparing clocks. If
not, that job was killed: its names are deleted, and the next term begins. A holder whose name is missing, or
that sees a later term, has lost the folder: it ends with code 6 and writes nothing more.
"""

import contextlib
import json
import os
import re
import socket
import threading
import time
import uuid

from common.ground import exits
from common.ground.exits import BadInput, print_line, printable
from common.ground.files import opener

FOLDER = ".lease"
_RENEW, _WATCH = 10.0, 25.0  # seconds
_NAME = re.compile(r"(\d{8})-([0-9a-f]{32})-(\d{8})")
_MOUNTS = "/proc/self/mountinfo"
_SHARES_LOCKS = re.compile(r"fuse\.(juicefs|ceph.*|gluster.*|beegfs|moosefs|mfs.*|.*overlayfs)")
_LOCAL_OPTIONS = {  # type of a mount -> options with which its locks are local; none: they always are
    "nfs": "nolock|local_lock=(all|posix)", "nfs4": "nolock|local_lock=(all|posix)", "lustre": "localflock",
    "cifs": "nobrl", "smb3": "nobrl", "9p": "", "virtiofs": "", "fuse": "",
}  # fmt: skip


def find_local_locks(path: str) -> str:
    """Return the type of the mount that holds a path if its locks may end at this node, else ""."""
    kind, options, longest = "", "", 0
    with contextlib.suppress(OSError), open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            mount, _, device = line.partition(" - ")
            point = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), mount.split()[4])
            if os.path.commonpath([point, path]) == point and len(point) >= longest:
                longest = len(point)
                kind, _, options = (*device.split(), "", "")[:3]
                options = f"{mount.split()[5]},{options}"
    expected = _LOCAL_OPTIONS.get(kind.partition(".")[0])
    is_local = expected is not None and re.search(rf"(^|,)({expected})(,|$)" if expected else "", options)
    return kind if is_local and not _SHARES_LOCKS.fullmatch(kind) else ""


class FolderLease:
    """The right to write to a folder. Raises BadInput if another job holds it, and OSError."""

    def __init__(self, folder: str):
        self.folder, self.names = folder, os.path.join(folder, FOLDER)
        self._id, self._term, self._number, self._own = uuid.uuid4().hex, 1, 0, ""
        self._ended, self._busy = threading.Event(), threading.Lock()
        os.makedirs(self.names, exist_ok=True)
        if others := self._list():
            self._watch(others)
        self._renew()
        if others := self._list() - {self._own}:  # both jobs have just begun
            self.release()
            raise BadInput(self._in_use(others))
        threading.Thread(target=self._work, name="folder lease", daemon=True).start()

    def release(self) -> None:
        self._ended.set()
        with self._busy, contextlib.suppress(OSError):
            os.unlink(os.path.join(self.names, self._own))
            os.rmdir(self.names)

    def _watch(self, others: set[str]) -> None:
        """Wait until the other holder has ended, and delete its names."""
        deadline = 0.0
        while not all(map(self._is_dead, others)) and (not deadline or time.monotonic() < deadline):
            if not deadline:
                deadline = time.monotonic() + _WATCH
                host = self._read(max(others)).get("host")
                print_line(
                    f"{self.folder} was last written to by another job, on {host}: checking for "
                    f"{_WATCH:.0f} s whether it still runs"
                )
            time.sleep(min(1.0, _RENEW))
            if new := self._list() - others:
                raise BadInput(self._in_use(new))
        for name in others:
            self._term = max(self._term, int(name[:8]) + 1)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.names, name))

    def _is_dead(self, name: str) -> bool:
        """Return whether the job has released the lease, or was a process of this node that has ended."""
        holder = self._read(name)
        if not isinstance(holder.get("pid"), int):
            return not os.path.exists(os.path.join(self.names, name))
        own = _describe(holder.get("pid"))
        return {**holder, "start": None} == {**own, "start": None} and holder["start"] != own["start"]

    def _work(self) -> None:
        while not self._ended.wait(_RENEW):
            with contextlib.suppress(OSError), self._busy:  # the next attempt may succeed
                if not self._ended.is_set():
                    self._check()
                    self._renew()

    def _check(self) -> None:
        """End the process if another job has taken the lease, because this job was paused for too long."""
        names = self._list()
        others = {name for name in names if self._id not in name}
        later = {name for name in others if name[:8] > self._own[:8]}
        later |= {name for name in others if name > self._own and int(name[-8:])}  # 0: it is being refused
        if self._own not in names or later:
            exits.say_error(self._in_use(later or others))
            exits.leave(exits.NOT_SAVED)

    def _renew(self) -> None:
        """Write a new name, then delete the one before."""
        name = f"{self._term:08d}-{self._id}-{self._number:08d}"
        with open(os.path.join(self.names, name), "w", opener=opener) as file:
            json.dump(_describe(os.getpid()), file)
        before, self._own, self._number = self._own, name, self._number + 1
        if before:
            os.unlink(os.path.join(self.names, before))

    def _list(self) -> set[str]:
        return set(filter(_NAME.fullmatch, os.listdir(self.names)))

    def _read(self, name: str) -> dict:
        with contextlib.suppress(OSError, ValueError), open(os.path.join(self.names, name)) as file:
            holder = json.load(file)
            return holder if isinstance(holder, dict) else {}
        return {}

    def _in_use(self, others: set[str]) -> str:
        holder = self._read(max(others)) if others else {}
        process, host = (printable(str(holder.get(name, "?"))) for name in ("pid", "host"))
        return (
            f"{self.folder} belongs to another job that is running (process {process} on {host}): give every "
            "job an --output_dir of its own"
        )


def _describe(pid: object) -> dict:
    """Return what identifies a process on this node. start: None if there is no such process."""
    start = boot = None
    with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/stat") as file:
        start = file.read().rpartition(")")[2].split()[19]
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot = [file.read().strip(), os.readlink("/proc/self/ns/pid")]
    return {"host": socket.gethostname(), "pid": pid, "start": start, "boot": boot}

"""The lease of an output folder on a mount whose locks end at this node, such as a bucket mounted with s3fs.

    RUN/.lease/<version>-<id>-<process>-<host>    the highest name is the holder's

Each renewal writes a new name, because mounts may cache the content of a known one. Mounts may also cache the
list of a folder (sshfs: for 20 s) until a file is made in it.
"""

import contextlib
import os
import re
from collections.abc import Iterable

from bootfile.ground import errors
from bootfile.ground.files import opener
from common.ground import endings
from common.run.lease import Lease

FOLDER = ".lease"
_NAME = re.compile(r"(?P<version>\d{8})-(?P<id>[0-9a-f]{32})-(?P<pid>\d+)-(?P<host>.*)")
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


class FolderLease(Lease):
    """The right to write to a folder. A job that has lost it ends with code 6 and writes nothing more."""

    def __init__(self, folder: str):
        self.names = os.path.join(folder, FOLDER)
        os.makedirs(self.names, exist_ok=True)
        super().__init__(folder)

    def _list(self) -> list[str]:
        return sorted(filter(_NAME.fullmatch, os.listdir(self.names)))

    def read(self) -> tuple[dict, int | None]:
        probe = os.path.join(self.names, f".{self.own['id']}")
        open(probe, "w", opener=opener).close()
        self._unlink([probe])
        match = _NAME.fullmatch(max(self._list(), default=""))
        return (match.groupdict(), int(match["version"])) if match else ({}, None)

    def replace(self, version: int | None) -> int | None:
        number = (version or 0) + 1
        host = re.sub(r"[^\w.-]", "_", self.own["host"])[:100]
        name = f"{number:08d}-{self.own['id']}-{self.own['pid']}-{host}"
        open(os.path.join(self.names, name), "w", opener=opener).close()
        names = self._list()
        if any(each >= f"{number:08d}" and each != name for each in names):
            self._unlink([name])
            return None
        self._unlink(each for each in names if each < name)
        return number

    def delete(self) -> None:
        self._unlink(os.listdir(self.names))
        os.rmdir(self.names)

    def _unlink(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.names, name))

    def _stop(self) -> None:
        endings.say_error(self.lost)
        errors.leave(errors.NOT_SAVED)

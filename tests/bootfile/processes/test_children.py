"""Processes that this one has started end with it, by themselves or by SIGKILL at the limit."""

import os
import signal
import subprocess
import sys

from bootfile.processes import children
from tests.conftest import run, wait_until

# starts a process as a launcher does, prints its id, and ends at once
PARENT = """
from bootfile.processes import children
print(children.start(["sleep", "1000"]).pid)
"""


def test_a_process_that_ends_by_itself_is_not_killed():
    quick = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    stubborn = subprocess.Popen(["sleep", "1000"])
    quick.stdin.close()
    quick.wait()
    children.wait_or_kill([stubborn, quick], 0)
    assert (quick.returncode, stubborn.returncode) == (0, -signal.SIGKILL)


def test_a_process_has_time_to_end():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as asked:
        asked.stdin.write(b"\n")
        asked.stdin.close()
        children.wait_or_kill([asked], 300)
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

"""Why a process has ended: its status, and the count of the kernel's OOM killer."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from bootfile.processes.board import Board
from bootfile.processes.ends import MemoryKills, Process, RankEnds, describe, is_stopped
from bootfile.processes.stacks import IN, WAITS, Frame, Place, find_place, parse
from tests.conftest import run
from tests.support.control_groups import make_tree, real_group

GROUPS = {
    "version 2": ("0::/job\n", "job/memory.events", "oom 1\noom_kill {}\n", "job/memory.max", "2147483648\n"),
    "version 2 without a limit": ("0::/\n", "memory.events", "oom_kill {}\n", "memory.max", "max\n"),
    "version 1": (
        "4:cpu,memory:/a/b\n0::/\n", "cpu,memory/a/b/memory.oom_control", "under_oom 0\noom_kill {}\n",
        "cpu,memory/a/memory.limit_in_bytes", "2147483648\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", GROUPS)
def test_the_oom_killer_of_a_memory_group(tmp_path, kind):
    group, count, text, limit, most = GROUPS[kind]
    root = make_tree(tmp_path, group, {count: text.format(3), limit: most})
    kills = MemoryKills(root)
    assert describe(signal.SIGKILL, kills) == "was killed by SIGKILL"
    make_tree(tmp_path, group, {count: text.format(4)})
    shown = "" if most == "max\n" else " (memory limit 2.0 GB)"
    line = f": the kernel's OOM killer ended a process of this container{shown}"
    assert describe(signal.SIGKILL, kills) == f"was killed by SIGKILL{line}"
    assert describe(signal.SIGSEGV, kills) == "was killed by SIGSEGV"
    assert describe(None, kills) == f"was killed{line}"


def test_the_oom_killer_of_the_machine(tmp_path):
    make_tree(tmp_path, "", {})
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/vmstat").write_text("nr_free 1\noom_kill 0\n")
    kills = MemoryKills(str(tmp_path))
    (tmp_path / "proc/vmstat").write_text("nr_free 1\noom_kill 1\n")
    assert kills.explain() == ": the kernel's OOM killer ended a process of this machine"
    assert MemoryKills(str(tmp_path / "none")).explain() == ""


@pytest.mark.skipif(sys.platform != "linux", reason="pidfd and /proc")
@pytest.mark.parametrize(
    "code, text",
    [
        ("os._exit(3)", "ended with exit code 3"),
        ("os.abort()", "was killed by SIGABRT"),
        ("os.kill(os.getpid(), 35)", "was killed by signal 35"),
    ],
)
def test_the_end_of_a_process_that_is_no_child(code, text):
    program = f"import os, sys; sys.stdin.read(); {code}"
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    process = Process(child.pid)
    assert not process.has_ended() and not is_stopped(process.pid) and process.read_status() is None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert process.has_ended()
    assert describe(process.read_status(), MemoryKills()) == text
    child.wait()
    assert process.has_ended()
    process.close()


def make_ends(store, rank, local):
    return RankEnds(rank, local, (rank,), Board(store, "test"), lambda rank: f"rank {rank}")


def test_one_rank_tells_why_another_has_ended(capfd):
    """Rank 1 sees the end of rank 2, which is on its node, and rank 0 prints it."""
    child = subprocess.Popen([sys.executable, "-c", "input(); import os; os._exit(1)"], stdin=subprocess.PIPE)
    store = torch.distributed.HashStore()
    first, other = make_ends(store, 0, {}), make_ends(store, 1, {2: Process(child.pid)})
    now = time.monotonic()
    assert not other.look(now) and not first.look(now)
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert other.look(now) and first.look(now) and first.look(now)
    assert capfd.readouterr().out == "rank 2 ended with exit code 1\n"
    assert other.look(now + 60) and capfd.readouterr().out == "", "rank 0 has told it"
    child.wait()


def test_a_rank_that_ends_by_itself_is_told_only_if_another_one_loses_contact(capfd):
    store = torch.distributed.HashStore()
    first, other = make_ends(store, 0, {}), make_ends(store, 1, {})
    other.announce("by itself, before the others", is_early=True)
    assert not first.look(0.0)
    assert first.look(0.0, gives_up=True)
    assert capfd.readouterr().out == "rank 1 ended by itself, before the others\n"


def test_the_first_error_is_the_reason(capfd):
    store = torch.distributed.HashStore()
    ranks = [make_ends(store, rank, {}) for rank in range(3)]
    ranks[2].announce("with KeyError: 3")
    ranks[1].announce("with a later error")
    assert all(each.look(0.0) for each in ranks)
    assert capfd.readouterr().out == "rank 2 ended with KeyError: 3\n"


def test_a_rank_that_lost_contact_itself_is_alive():
    store = torch.distributed.HashStore()
    first, other = make_ends(store, 0, {}), make_ends(store, 1, {})
    first.announce_loss()
    assert not other.has_lost_first()


def test_places():
    torch = "/venv/lib/python3/site-packages/torch/distributed/"
    stack = [
        Frame(torch + "distributed_c10d.py", 1, "all_reduce"),
        Frame(torch + "c10d_logger.py", 2, "wrapper"),
        Frame("/job/loop.py", 210, "accepts"),
    ]
    assert find_place(stack) == Place(WAITS, "all_reduce (loop.py:210)")
    saves = [
        Frame(os.__file__, 3, "fsync"),
        Frame(torch + "checkpoint/filesystem.py", 7, "_write_item"),
        Frame("/job/own.py", 50, "<module>"),
    ]
    assert find_place(saves).verb == IN  # held by the disk, not by another rank
    assert find_place([stack[0], *saves[1:]]).verb == WAITS
    backward = [
        Frame("/venv/lib/python3/site-packages/torch/autograd/graph.py", 5, "_engine_run_backward"),
        Frame("/venv/lib/python3/site-packages/torch/_tensor.py", 6, "backward"),
        Frame("/repository/common/run/evaluation.py", 37, "__torch_function__"),
        Frame("/job/own.py", 35, "<module>"),
    ]
    assert find_place(backward) == Place(WAITS, "backward (own.py:35)")
    assert find_place([Frame(os.__file__, 3, "read"), Frame("/job/own.py", 41, "__getitem__")]) == Place(
        IN, "__getitem__ (own.py:41)"
    )
    dump = (
        "Timeout (0:00:02)!\nThread 0x00 (most recent call first):\n"
        '  File "/venv/lib/threading.py", line 9 in wait\n\nThread 0x01 (most recent call first):\n'
        '  File "/job/own.py", line 12 in __getitem__\n  File "/job/own.py", line 30 in <module>\n\n'
        "Extension modules: numpy\n"
    )
    assert parse(dump) == [Frame("/job/own.py", 12, "__getitem__"), Frame("/job/own.py", 30, "<module>")]


PARENT = """
import os, subprocess, sys
sys.path.insert(0, "")
with open(sys.argv[1], "w") as file:
    file.write(str(os.getpid()))
from bootfile.processes.ends import MemoryKills, Process, describe
kills = MemoryKills()
code = "input(); x = bytearray(2**28); input()"
child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
process = Process(child.pid)
child.stdin.write(b"\\n")
child.stdin.flush()
os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
print(describe(process.read_status(), kills))
"""


def test_a_real_oom_kill():
    """In a memory group of version 1 or 2, if this user may make one."""
    limits = dict.fromkeys(("memory.max", "memory.limit_in_bytes"), str(2**26))
    with real_group("memory", limits, depth=1) as group:
        shown = run("-c", PARENT, group / "cgroup.procs", fresh=True)
    reason = "the kernel's OOM killer ended a process of this container (memory limit 0.1 GB)"
    assert shown.stdout.strip() == f"was killed by SIGKILL: {reason}", shown.stderr

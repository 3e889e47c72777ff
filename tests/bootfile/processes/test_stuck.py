"""A run that does not move says where each rank is, and a rank that has died is named with its reason."""

import bdb
import json
import os
import pdb
import re
import signal
import sys
import threading
import time
import types

import psutil
import pytest
import torch

from bootfile.processes import memory_files, peers, speaker, stacks
from bootfile.processes.stacks import IN, WAITS, Place
from bootfile.processes.stuck import Watch, compose
from tests.conftest import ROOT, finish, is_stopped, read_until, start, start_ranks, wait_until

LOOP = """
import ctypes, os, sys, time, torch
sys.path.insert(0, ROOT)
from bootfile import BatchSampler, Exact, map_style_loader, usual
from bootfile.processes.stuck import Watch

kind, after, hang = sys.argv[1], float(sys.argv[2]), sys.argv[3]
rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if size > 1:
    torch.distributed.init_process_group("gloo")
# no end before the file is there: a busy machine may pause for longer than the limit
ends = lambda watch: watch.is_asked and os.path.exists(hang)
Watch._exits = property(ends, lambda watch, value: setattr(watch, "is_asked", value))

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        while os.path.exists(hang) and rank == size - 1 and kind[:4] not in ("quit", "left"):
            if kind == "gil":
                ctypes.PyDLL(None).sleep(1)
            elif kind == "error":
                raise KeyError("broken sample")
            elif kind == "exit":
                os._exit(3)
            else:
                time.sleep(0.1)
        return torch.ones(4), torch.ones(1)

model = torch.nn.Linear(4, 1)
forward = torch.nn.parallel.DistributedDataParallel(model) if size > 1 else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
sampler = BatchSampler(64, 8, 0, epochs=10000)
loader = map_style_loader(Data(), sampler, torch.device("cpu"), workers=int(kind == "worker"))
run = Exact(
    "OUT", loader, model=model, forward=forward, optimizer=optimizer, save_every=50000,
    plugins=usual(stuck_after=after, stuck_exit=kind == "end"),
)
for epoch in loader.epochs_from(run.resume()):
    for inputs, targets in loader:
        if os.path.exists(hang) and rank == size - 1:
            if kind.startswith("quit"):
                sys.exit(int(kind[-1]))
            if kind == "left":  # as a loop that stops early on one rank
                run.end(None)
                time.sleep(1000)
        optimizer.zero_grad()
        loss = (forward(inputs) - targets).square().mean()
        loss.backward()
        if run.accepts(loss):
            optimizer.step()
        run.end_step()
        if loader.step % 10 == 0 and rank == 0:
            print("step", loader.step, flush=True)
            time.sleep(0.01)
"""
# ctypes.PyDLL.sleep() ends each second, and the loop begins again: the lock is released for an instant only
HELD = LOOP.replace("sleep(1)", "sleep(100000)")


def begin(tmp_path, kind, ranks, after=2.0, text=LOOP, fresh=False):
    """Start the loop, and return its processes after some steps, and the file that hangs the last rank.

    fresh: an error ends the loop as in a new Python, with sys.excepthook.
    """
    job, hang = tmp_path / "own.py", tmp_path / "hang"
    job.write_text(text.replace("ROOT", repr(str(ROOT))))
    command = (job, kind, after, hang)
    if ranks == 1:
        jobs = [start(*command, cwd=tmp_path)]
    else:
        jobs = start_ranks(*command, ranks=ranks, cwd=tmp_path, fresh=fresh)
    read_until(jobs[0], "^step 40")
    return jobs, hang


def end(jobs):
    for job in jobs:
        job.send_signal(signal.SIGKILL)
    return [finish(job, None) for job in jobs]


def read_line(job, *texts):
    """Read the output of a job until a line about a run that does not move has all these texts. Another such
    line may come before: on a busy machine the run may really pause for so long."""
    conditions = "".join(f"(?=.*{text})" for text in texts)
    return read_until(job, f"^stuck for{conditions}")[-1]


def line_of(number):
    """Return the number of a line of the loop that has a text."""
    return next(place for place, line in enumerate(LOOP.splitlines(), 1) if number in line)


def test_the_groups_of_a_line():
    def names(members):
        return f"ranks {members}"

    places = {0: Place(WAITS, "all_reduce (a.py:1)"), 1: Place(IN, "f (b.py:2)"), 2: Place("silent", "")}
    places[3] = places[0]
    assert compose(60.4, 412, places, names) == (
        "stuck for 60 s at step 412: ranks [0, 3] wait in all_reduce (a.py:1); ranks [1] is in f (b.py:2); "
        "ranks [2] is silent"
    )


def test_a_model_that_is_evaluated_has_a_longer_limit(tmp_path):
    """A loop may evaluate with a DataLoader of its own: none of its batches is counted."""
    watch = Watch(str(tmp_path), 0, 10.0, False, None)
    watch.model = torch.nn.Linear(1, 1)
    watch.note(1)
    assert watch.limit() == 10
    watch.model.eval()
    assert watch.limit() == 40
    watch.stop(False)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["data", "worker"])
def test_one_process_says_where_it_hangs_and_that_it_moves_again(tmp_path, kind):
    jobs, hang = begin(tmp_path, kind, 1)
    hang.touch()
    line = read_line(jobs[0], re.escape(f"__getitem__ (own.py:{line_of('time.sleep(0.1)')})"))
    assert ("in a worker of the loader" in line) == (kind == "worker")
    hang.unlink()
    read_until(jobs[0], "^the run moves again")
    stacks = tmp_path / "OUT" / "stuck" / "rank_0.txt"
    wait_until(stacks.exists, jobs[0])  # a thread writes it
    end(jobs)
    text = stacks.read_text()
    assert "MainThread" in text and "own.py" in text and ("\nworker " in text) == (kind == "worker")


@pytest.mark.thorough
def test_one_process_that_holds_the_lock_of_python(tmp_path):
    jobs, hang = begin(tmp_path, "gil", 1, text=HELD)
    hang.touch()
    place = f"__getitem__ (own.py:{line_of('PyDLL')}), in C code that holds Python's lock"
    read_line(jobs[0], re.escape(place))
    end(jobs)
    assert "own.py" in (tmp_path / "OUT" / "stuck" / "rank_0.txt").read_text()


@pytest.mark.thorough
def test_the_lock_of_python_is_held_from_the_first_step_on(tmp_path):
    """No thread of the process has looked at the run yet."""
    job = tmp_path / "own.py"
    held = "        ctypes.PyDLL(None).sleep(100000)\n"
    text = LOOP.replace("        optimizer.zero_grad()\n", held).replace("ROOT", repr(str(ROOT)))
    job.write_text(text)
    process = start(job, "data", 2.0, tmp_path / "hang", cwd=tmp_path)
    number = text.splitlines().index(held.rstrip()) + 1
    read_line(process, re.escape(f"(own.py:{number}), in C code that holds Python's lock"))
    end([process])


@pytest.mark.parametrize(
    "kind", ["data", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("gil", "stop"))]
)
def test_two_ranks_of_which_the_last_one_hangs(tmp_path, kind):
    jobs, hang = begin(tmp_path, kind, 2, text=HELD)
    if kind == "stop":
        jobs[1].send_signal(signal.SIGSTOP)
    else:
        hang.touch()
    expected = {
        "data": f"rank 1 is in __getitem__ (own.py:{line_of('time.sleep(0.1)')})",
        "gil": f"rank 1 is in __getitem__ (own.py:{line_of('PyDLL')}), in C code that holds Python's lock",
        "stop": "rank 1 is stopped by a signal (SIGSTOP)",
    }
    read_line(jobs[0], r"rank 0 (waits|is) in \w+ \(", re.escape(expected[kind]))
    if kind != "gil":
        hang.unlink(missing_ok=True)
        jobs[1].send_signal(signal.SIGCONT)
        read_until(jobs[0], "^the run moves again")
    wait_until((tmp_path / "OUT" / "stuck" / "rank_0.txt").exists, jobs[0])
    end(jobs)


@pytest.mark.parametrize("moves", [True, False])
def test_a_run_that_has_moved_since_the_question_is_not_stuck(tmp_path, monkeypatch, capfd, moves):
    """The answers of the ranks are some seconds old when the line is due."""
    store = torch.distributed.HashStore()
    monkeypatch.setattr(peers.ranks, "store", lambda: store)
    facts = [{"host": "h", "node": rank, "machine": rank, "pid": 0, "name": "test"} for rank in range(2)]
    facts[0] |= {"dump": memory_files.make("stacks"), "mail": memory_files.make("place")}
    watch = Watch(str(tmp_path), 4, 2.0, False, peers.Peers(facts, tells_ends=False))
    now = time.monotonic()
    watch.at = now - 90
    watch._look(now)  # it asks
    state = {"verb": IN, "name": "f (a.py:1)", "moves": False, "idle": 90.0, "step": 4, "cycle": 1}
    watch._peers._board.write("state/1", json.dumps(state))
    if moves:
        watch.note(5)
    watch._look(now + 5)
    assert ("stuck for" in capfd.readouterr().out) == (not moves)
    watch._peers.leave(False)


@pytest.mark.parametrize("age, is_told", [(1, True), (6, False), (20, True)])
def test_a_pause_is_told_unless_the_lock_was_held_in_it(tmp_path, age, is_told):
    """age: seconds since the timer has written stacks. Those from before the pause say nothing about it."""
    watch = Watch(str(tmp_path), 4, 2.0, False, None)
    os.write(watch.dump, b"stacks")
    os.utime(watch.dump, (0, time.time() - age))
    watch._note_pause(8.0)
    assert bool(watch._pause) == is_told
    os.close(watch.dump)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_run_whose_ranks_were_all_stopped_says_so(tmp_path, ranks):
    jobs, _ = begin(tmp_path, "data", ranks)
    for job in jobs:
        job.send_signal(signal.SIGSTOP)
    wait_until(lambda: all(is_stopped(job.pid) for job in jobs))
    time.sleep(8)  # that much was lost
    for job in jobs:
        job.send_signal(signal.SIGCONT)
    line = read_until(jobs[0], "^nothing moved for")[-1]
    assert int(re.search(r"for (\d+) s", line)[1]) >= 7
    end(jobs)


@pytest.mark.thorough
def test_a_worker_of_a_loader_is_stopped(tmp_path):
    jobs, hang = begin(tmp_path, "worker", 2)
    hang.touch()
    read_line(jobs[0], "in a worker of the loader")
    workers = psutil.Process(jobs[1].pid).children()
    for worker in workers:
        worker.suspend()
    pids = "|".join(str(worker.pid) for worker in workers)
    read_line(jobs[0], rf"rank 1 is in its loader, whose worker ({pids}) is stopped by a signal")
    for worker in workers:
        worker.kill()
    end(jobs)


@pytest.mark.thorough
def test_a_rank_has_left_its_loop(tmp_path):
    jobs, hang = begin(tmp_path, "left", 2)
    hang.touch()
    read_line(jobs[0], "rank 0 waits in", "rank 1 has ended its loop")
    end(jobs)


@pytest.mark.thorough
def test_the_rank_that_holds_the_store_is_stopped(tmp_path):
    jobs, _ = begin(tmp_path, "data", 2)
    jobs[0].send_signal(signal.SIGSTOP)
    read_line(jobs[1], r"rank 0 is stopped by a signal \(SIGSTOP\)", "rank 1 (waits|is) in")
    end(jobs)


@pytest.mark.thorough
@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_was_killed_is_named(tmp_path, killed):
    jobs, _ = begin(tmp_path, "data", 2, fresh=True)
    jobs[killed].send_signal(signal.SIGKILL)
    survivor = jobs[1 - killed]
    read_until(survivor, rf"^rank {killed} \(pid {jobs[killed].pid}\) was killed by SIGKILL$")
    end(jobs)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind, reason",
    [
        ("exit", "ended with exit code 3"),
        ("error", "ended with RuntimeError: .*broken sample"),
        ("quit 0", "ended (with exit code 0|by itself)"),  # gloo may abort the end of the interpreter
        ("quit 1", "ended (with exit code 1|by itself)"),
    ],
)
def test_a_rank_that_ended_by_itself_is_named(tmp_path, kind, reason):
    jobs, hang = begin(tmp_path, kind, 2, fresh=True)
    hang.touch()
    read_until(jobs[0], rf"^rank 1 \(pid {jobs[1].pid}\) {reason}")
    end(jobs)


@pytest.mark.thorough
def test_a_run_that_is_stuck_ends_if_asked_to(tmp_path):
    jobs, hang = begin(tmp_path, "end", 2)
    hang.touch()
    for job in jobs:
        result = finish(job, 5)
        if job is jobs[0]:
            assert "because of --stuck_exit true" in result.stderr


def _frames(*lines):
    """Return a dump of faulthandler whose main thread has these lines, the newest first."""
    shown = "".join(f'  File "{file}", line 1 in {name}\n' for file, name in lines)
    return f"Timeout (0:00:05)!\nThread 0x0001 (most recent call first):\n{shown}\n"


WAIT, SUSPEND = (threading.__file__, "wait"), ("/home/me/debugpy/pydevd.py", "_do_wait_suspend")
STEP, DEBUGGER = ("/home/me/own.py", "main"), (bdb.__file__, "run")


@pytest.mark.parametrize(
    ("lines", "rests"),
    [
        ((WAIT, SUSPEND, STEP), True),  # debugpy holds all threads at a breakpoint
        (((pdb.__file__, "interaction"), DEBUGGER, STEP, DEBUGGER), True),
        ((STEP, DEBUGGER, (pdb.__file__, "main")), False),  # `python -m pdb`, and the script hangs
        (((torch.__file__, "forward"), STEP, DEBUGGER), False),
        ((STEP, (pdb.__file__, "interaction"), STEP), True),  # the user calls a function at the prompt
        ((("/home/me/parsing/pdb.py", "parse"), STEP), False),  # a file of the user with this name
        ((), True),
    ],
)
def test_a_debugger_that_waits_for_its_user(lines, rests):
    assert stacks.is_at_rest(stacks.parse(_frames(*lines))) == rests


def test_a_pause_in_debugpy_is_not_called_stuck(tmp_path, capfd, monkeypatch):
    """It stops all threads of the process: only the timer of faulthandler writes where the main thread is."""
    dump = memory_files.make("stacks")
    memory_files.replace(dump, _frames(WAIT, SUSPEND, STEP))
    settings = {"parent": os.getpid(), "ranks": [[0, os.getpid(), dump]], "names": ["the process"]}
    settings |= {"folder": str(tmp_path / "stuck"), "after": 5, "exits": False}
    pauses = []
    clock = types.SimpleNamespace(sleep=pauses.append, monotonic=lambda: sum(pauses))
    with monkeypatch.context() as patch:  # a pause that is called stuck is so after 2.5 s
        patch.setattr(speaker, "time", clock)
        patch.setattr(os, "getppid", lambda: os.getpid() * (sum(pauses) < 60))
        patch.setattr(sys, "argv", ["", "", json.dumps(settings)])
        speaker.main()
    memory_files.replace(dump, _frames(STEP))
    process = speaker.start(settings)
    try:
        wait_until((tmp_path / "stuck" / "rank_0.txt").exists)
    finally:
        process.kill()
        process.wait()
        os.close(dump)
    place = "main (own.py:1), in C code that holds Python's lock"
    line, = capfd.readouterr().out.splitlines()  # fmt: skip
    assert line.startswith("stuck for 5 s ") and f" the process is in {place}" in line

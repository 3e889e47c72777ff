"""A run that does not move says where each rank is, and a rank that has died is named with its reason."""

import bdb
import os
import pdb
import re
import signal
import threading
import time

import psutil
import pytest
import torch

from bootfile.ground.log_lines import END
from bootfile.processes import board, node, stacks, stuck
from bootfile.processes.report import Clock, Pulse, Report, compose
from bootfile.processes.roll_call import DONE, RollCall
from bootfile.processes.stacks import IN, WAITS, Place
from tests.conftest import ROOT, finish, is_stopped, read_until, start, start_ranks, wait_until

LOOP = """
import ctypes, os, sys, time, torch
sys.path.insert(0, ROOT)
from bootfile import BatchSampler, Exact, map_style_loader, usual
from bootfile.processes.report import Report

kind, after, hang = sys.argv[1], float(sys.argv[2]), sys.argv[3]
rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if size > 1:
    torch.distributed.init_process_group("gloo")
# no end before the file is there: a busy machine may pause for longer than the limit
ends = lambda report: report.is_asked and os.path.exists(hang)
Report.exits = property(ends, lambda report, value: setattr(report, "is_asked", value))

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        while os.path.exists(hang) and rank == size - 1 and kind[:4] not in ("quit", "left"):
            if kind == "gil":
                ctypes.PyDLL(None).sleep(100000)
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


@pytest.fixture
def begin(tmp_path):
    """Return a function that starts the loop. It returns the processes after some steps, and the file that
    hangs the last rank. They end with the test. fresh: an error ends the loop as in a new Python."""
    jobs = []

    def start_loop(kind, ranks, fresh=False):
        job, hang = tmp_path / "own.py", tmp_path / "hang"
        job.write_text(LOOP.replace("ROOT", repr(str(ROOT))))
        command = (job, kind, 2.0, hang)
        if ranks == 1:
            jobs.append(start(*command, cwd=tmp_path))
        else:
            jobs.extend(start_ranks(*command, ranks=ranks, cwd=tmp_path, fresh=fresh))
        read_until(jobs[0], "^step 40")
        return jobs, hang

    yield start_loop
    for job in jobs:
        job.send_signal(signal.SIGKILL)
        finish(job, None)


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
    line = compose(60.4, 412, places, names, "OUT")
    end = END.match(line)
    assert end and (end["hang"], end["seconds"], end["stuck"]) == (line, "60", "412")
    assert line == (
        "stuck for 60 s at step 412: ranks [0, 3] wait in all_reduce (a.py:1); ranks [1] is in f (b.py:2); "
        "ranks [2] is silent (stacks: OUT)"
    )


def test_a_model_that_is_evaluated_has_a_longer_limit():
    """A loop may evaluate with a DataLoader of its own: none of its batches is counted."""
    clock = Clock(0, 10.0)
    clock.model = torch.nn.Linear(1, 1)
    clock.note(1)
    assert clock.limit() == 10
    clock.model.eval()
    assert clock.limit() == 40
    assert Clock(0, 10.0, 50.0).limit() == 35, "a collective that waits too long would end the run before"


ITEM = rf"__getitem__ \(own.py:{line_of('time.sleep(0.1)')}\)"
HELD = rf"__getitem__ \(own.py:{line_of('PyDLL')}\), in C code that holds Python's lock"
FIRST = r"rank 0 (waits|is) in \w+ \("
HUNG = [  # how the last rank hangs, number of ranks, texts of the line, whether it moves again
    ("data", 1, [ITEM], True),
    ("worker", 1, [ITEM, "in a worker of the loader"], True),
    ("gil", 1, [HELD], False),
    ("gil", 2, [FIRST, f"rank 1 is in {HELD}"], False),
    ("stop", 2, [FIRST, r"rank 1 is stopped by a signal \(SIGSTOP\)"], True),
    ("left", 2, ["rank 0 waits in", "rank 1 has ended its loop"], False),
]


@pytest.mark.parametrize(
    ("kind", "ranks", "texts", "moves"),
    [
        ("data", 2, [FIRST, f"rank 1 is in {ITEM}"], True),
        *(pytest.param(*row, marks=pytest.mark.thorough) for row in HUNG),
    ],
)
def test_a_run_that_hangs_says_where_its_ranks_are(begin, tmp_path, kind, ranks, texts, moves):
    jobs, hang = begin(kind, ranks)
    if kind == "stop":
        jobs[1].send_signal(signal.SIGSTOP)
    else:
        hang.touch()
    read_line(jobs[0], *texts)
    if moves:
        hang.unlink(missing_ok=True)
        jobs[-1].send_signal(signal.SIGCONT)
        read_until(jobs[0], "^the run moves again")
    stacks = tmp_path / "OUT" / "stuck" / "rank_0.txt"
    part = "\nworker " if kind == "worker" else "own.py"
    wait_until(lambda: stacks.exists() and part in stacks.read_text(), jobs[0])  # a thread writes it


@pytest.mark.thorough
def test_the_lock_of_python_is_held_from_the_first_step_on(tmp_path):
    """No thread of the process has looked at the run yet."""
    job = tmp_path / "own.py"
    held = "        ctypes.PyDLL(None).sleep(100000)\n"
    text = LOOP.replace("        optimizer.zero_grad()\n", held).replace("ROOT", repr(str(ROOT)))
    job.write_text(text)
    process = start(job, "data", 2.0, tmp_path / "hang", cwd=tmp_path)
    number = text.splitlines().index(held.rstrip()) + 1
    read_line(process, rf"\(own.py:{number}\), in C code that holds Python's lock")
    process.kill()
    finish(process, None)


class Ranks:
    """The roll calls of ranks of one process, in a store without a server."""

    def __init__(self, folder, count):
        store, here = torch.distributed.HashStore(), Place(IN, "f (a.py:1)")
        self.clocks = [Clock(4, 2.0) for _ in range(count)]
        self.boards = [board.Board(store, "test") for _ in range(count)]
        self.calls = []
        self.now = time.monotonic()
        for rank, clock in enumerate(self.clocks):
            clock.at = self.now - 90
            report = Report(str(folder), False, lambda members: f"ranks {members}", str)
            where = lambda now, clock=clock: (here, clock.idle(now) < 2)  # noqa: E731
            self.calls.append(RollCall(rank, count, {}, self.boards[rank], clock, report, where))

    def look(self, rank, seconds):
        self.calls[rank].look(self.now + seconds)


@pytest.mark.parametrize("moves", [True, False])
def test_a_run_that_has_moved_since_the_question_is_not_stuck(tmp_path, capfd, moves):
    """The answers of the ranks are some seconds old when the line is due."""
    ranks = Ranks(tmp_path, 2)
    ranks.look(0, 0)  # it asks
    ranks.look(1, 1)
    if moves:
        ranks.clocks[0].note(5)
    ranks.look(0, 5)
    assert ("at step 5: ranks [0, 1] are in f (a.py:1)" in capfd.readouterr().out) == (not moves)


def test_each_rank_ends_a_call_and_the_next_one_asks_if_rank_0_does_not(tmp_path, capfd):
    ranks = Ranks(tmp_path, 3)
    ranks.look(1, 0)
    ranks.look(2, 1)
    ranks.look(1, 2)
    assert "stuck" not in capfd.readouterr().out, "rank 0 may still answer"
    ranks.look(1, 20)
    assert "ranks [0] is silent; ranks [1, 2] are in f (a.py:1)" in capfd.readouterr().out
    ranks.look(2, 20)
    for rank in (1, 2):
        ranks.look(rank, 60)
    assert capfd.readouterr().out == "", "the next line comes when twice the time has passed"


def test_a_loop_that_has_ended_since_its_answer_is_named_so(tmp_path, capfd):
    ranks = Ranks(tmp_path, 2)
    ranks.look(0, 0)
    ranks.look(1, 1)
    ranks.boards[1].write("left/1", DONE)
    ranks.look(0, 5)
    assert "ranks [0] is in f (a.py:1); ranks [1] has ended its loop" in capfd.readouterr().out


def test_a_rank_that_moves_postpones_the_line(tmp_path, capfd):
    ranks = Ranks(tmp_path, 2)
    ranks.clocks[1].at = ranks.now
    ranks.look(0, 0)
    ranks.look(1, 1)
    ranks.look(0, 2)
    assert "stuck" not in capfd.readouterr().out
    ranks.clocks[1].at = ranks.clocks[0].at
    ranks.look(0, 4)
    ranks.look(1, 4)
    ranks.look(0, 5)
    assert "stuck for" in capfd.readouterr().out


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_run_whose_ranks_were_all_stopped_says_so(begin, ranks):
    jobs, _ = begin("data", ranks)
    for job in jobs:
        job.send_signal(signal.SIGSTOP)
    wait_until(lambda: all(is_stopped(job.pid) for job in jobs))
    time.sleep(8)  # that much was lost
    for job in jobs:
        job.send_signal(signal.SIGCONT)
    line = read_until(jobs[0], "^nothing moved for")[-1]
    assert int(re.search(r"for (\d+) s", line)[1]) >= 7


@pytest.mark.thorough
def test_a_worker_of_a_loader_is_stopped(begin):
    jobs, hang = begin("worker", 2)
    hang.touch()
    read_line(jobs[0], "in a worker of the loader")
    workers = psutil.Process(jobs[1].pid).children()
    for worker in workers:
        worker.suspend()
    pids = "|".join(str(worker.pid) for worker in workers)
    read_line(jobs[0], rf"rank 1 is in its loader, whose worker ({pids}) is stopped by a signal")
    for worker in workers:
        worker.kill()


@pytest.mark.thorough
def test_the_rank_that_holds_the_store_is_stopped(begin):
    jobs, _ = begin("data", 2)
    jobs[0].send_signal(signal.SIGSTOP)
    read_line(jobs[1], r"rank 0 is stopped by a signal \(SIGSTOP\)", "rank 1 (waits|is) in")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind, lost, reason",
    [
        ("data", 0, "was killed by SIGKILL$"),
        ("data", 1, "was killed by SIGKILL$"),
        ("exit", 1, "ended with exit code 3"),
        ("error", 1, "ended with RuntimeError: .*broken sample"),
        ("quit 0", 1, "ended (with exit code 0|by itself)"),  # gloo may abort the end of the interpreter
        ("quit 1", 1, "ended (with exit code 1|by itself)"),
    ],
)
def test_a_rank_that_has_ended_is_named(begin, kind, lost, reason):
    jobs, hang = begin(kind, 2, fresh=True)
    if kind == "data":
        jobs[lost].send_signal(signal.SIGKILL)
    else:
        hang.touch()
    read_until(jobs[1 - lost], rf"^rank {lost} \(pid {jobs[lost].pid}\) {reason}")


@pytest.mark.thorough
def test_a_run_that_is_stuck_ends_if_asked_to(begin):
    jobs, hang = begin("end", 2)
    hang.touch()
    results = [finish(job, 5) for job in jobs]
    assert "because of stuck_exit" in results[0].stderr


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


def test_a_beat_is_never_half_written():
    """C code may take the lock of Python, and keep it, in the middle of one."""
    pulse, clock, has_ended = Pulse(), Clock(4, 2.0), threading.Event()
    pulse.beat(clock)

    def beat():
        while not has_ended.is_set():
            pulse.beat(clock)

    writer = threading.Thread(target=beat)
    writer.start()
    steps = {node.Seen(pulse.files).read_beat()[3] for _ in range(2000)}
    has_ended.set()
    writer.join()
    assert steps == {4}


def test_a_process_whose_run_has_ended_is_not_read_any_more(tmp_path):
    """It may open a pipe: another process that reads it would hang, and take what is for this one."""
    watch = stuck.start(str(tmp_path), 0, 60.0)
    seen = node.Seen(watch._pulse.files)
    stuck.stop()
    reader, writer = os.pipe()
    os.write(writer, b"for this process")
    os.close(writer)  # else the other process would wait for more
    try:
        assert seen.runs(1.0) and seen.look(1.0) is None
        assert os.read(reader, 100) == b"for this process"
        stuck.start(str(tmp_path), 0, 60.0)
        assert seen.read_beat()[1] == 4 * 60, "the next run of the process is seen as well"
    finally:
        stuck.stop()
        os.close(reader)


PROGRAM = """
import sys, threading, time, types
sys.path.insert(0, ROOT)
from bootfile.processes.report import Clock, Pulse

def main():
    pulse = Pulse()
    clock = Clock(4, LIMIT)
    clock.note(5)
    pulse.beat(clock)
    print(pulse.files["pid"], pulse.files["beats"], pulse.files["dump"], flush=True)
    time.sleep(1000)

code = compile("def _do_wait_suspend(call): call()", NAME, "exec")
exec(code)
_do_wait_suspend(main)
"""


@pytest.mark.parametrize("name", ["/home/me/debugpy/pydevd.py", "/home/me/own.py"])
def test_a_pause_in_debugpy_is_not_called_stuck(tmp_path, name):
    """It stops all threads of the process, which has no beats then: its stacks tell why."""
    text = PROGRAM.replace("ROOT", repr(str(ROOT))).replace("NAME", repr(name)).replace("LIMIT", "0.001")
    script = tmp_path / "paused.py"
    script.write_text(text)
    process = start(script)
    try:
        line = read_until(process, r"^\d+ \d+ \d+$")[-1]
        seen = node.Seen(dict(zip(("pid", "beats", "dump"), map(int, line.split()), strict=True)))
        wait_until(lambda: not seen.runs())
        place = seen.look()
        if "pydevd" in name:
            assert place == node.PAUSED
        else:
            assert place.verb == stacks.HELD and place.name.startswith("main (paused.py:")
        assert "paused.py" in seen.dump
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: is_stopped(process.pid))
        assert seen.look().verb == "stopped"
    finally:
        process.kill()
    finish(process, None)
    assert seen.look().verb == "ended"

"""Processes of a job die, are refused or leave, and the others continue; who the members are."""

import argparse
import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import time
import types
from pathlib import Path

import psutil
import pytest
import torch

from bootfile.exact.due import Due
from bootfile.ground.errors import BadInput
from bootfile.processes import ends
from common.distributed import launcher
from common.elastic import agent, crash, members, memory, roll
from common.elastic.members import Plan
from common.platform.topology import Topology
from tests.conftest import CAN_FORK, LONGEST, free_port, names, run, wait_until
from tests.support import checkpointers
from tests.support.elastic import JOB, ElasticRun, slow_job, wait_for_file
from tests.support.exact import changed, facts

EXACT = ("jobs/train_exact.py", *JOB)
new_torch = pytest.mark.skipif(not CAN_FORK, reason="--elastic needs torch 2.6")


@pytest.fixture
def elastic(tmp_path):
    """Return a function that starts a job with --elastic true and some options. It ends with the test."""
    runs = []

    def begin(job: Path, *options, **more) -> ElasticRun:
        words = (*JOB, "--elastic=true", f"--output_dir={tmp_path / 'run'}", *options)
        runs.append(ElasticRun(job, *words, **more))
        return runs[-1]

    yield begin
    for each in runs:
        each.kill()


@pytest.mark.thorough
@new_torch
def test_processes_that_die_are_replaced_and_the_bits_are_those_of_one(elastic, tmp_path):
    job = elastic(slow_job(tmp_path / "job.py", 0.05), "--epochs=6", "--processes_per_node=3")
    for rank, step in ((2, 2), (0, 9)):
        job.wait_until(lambda each, step=step: each.step >= step)
        generation = job.generation
        job.signal(signal.SIGKILL, rank)
        job.wait_until(lambda each, before=generation: each.generation > before)
    assert job.finish() == 0, job.lines
    said = "\n".join(job.lines)
    for rank in (2, 0):
        assert f"rank {rank} on node 0 is gone: SIGKILL" in said
    assert ", lost processes 2, " in said and "useful share" in said
    run(*EXACT, "--epochs=6", f"--output_dir={tmp_path / 'one'}")
    assert facts(tmp_path / "run") == facts(tmp_path / "one")
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-2])
    assert line["generations"] >= 3 and line["lost_processes"] == 2 and 0 < line["useful_share"] < 1
    assert len((tmp_path / "run" / "starts.jsonl").read_text().splitlines()) == 1


def _begin_member(folder: Path):
    """Return the Memory of a process that has begun a training, and the parts of its run."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    args = argparse.Namespace(output_dir=str(folder), batch_size=1, seed=0, dataset="digits", data_url=None)
    parts = checkpointers.make(args, 4, total_steps=4, model=model, optimizer=optimizer).parts
    job = memory.Memory(types.SimpleNamespace(begin=lambda keep: None))
    job.begin(parts, 0)
    return job, parts


def test_a_step_in_which_a_process_was_lost_does_not_count_in_the_metrics(tmp_path):
    job, parts = _begin_member(tmp_path)
    parts.position.running = torch.ones(3, dtype=torch.float64)
    job.ended(1, Due(False, False))
    parts.position.running += 5  # the loop adds the sums of a step before all have finished it
    job._continue(parts, job._keep())
    assert parts.position.running.tolist() == [1, 1, 1]


def test_the_time_between_two_changes_without_a_step_is_lost_once(tmp_path):
    job, parts = _begin_member(tmp_path)
    job.ended(0, Due(False, False))
    job._finished = job._finished._replace(at=time.time() - 100)
    for _ in range(3):
        job._continue(parts, job._keep())
    assert 100 <= job.pauses < 200


@new_torch
@pytest.mark.thorough
def test_a_process_that_trains_something_else_is_refused_and_the_others_go_on(elastic, tmp_path):
    options = (f"--init_method=tcp://127.0.0.1:{free_port()}", "--world_size=2", "--epochs=2")
    refused = tmp_path / "refused"
    job = slow_job(tmp_path / "job.py", 0.0, wait_for_file(3, refused))
    first = elastic(job, *options, "--rank=0", "--timeout=5")
    second = elastic(job, *options, "--rank=1", f"--timeout={LONGEST}", "--lr=0.1")
    assert second.finish() == 2
    refused.touch()
    assert re.search(r"its --lr is 0\.1, .*members .*0\.05\b", "\n".join(first.lines + second.lines))
    assert first.finish() == 0, first.lines


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--sample_losses=true"], "--elastic: expected a training without --sample_losses"),
        (["--output_dir=s3://bucket/run"], "--output_dir s3://bucket/run: expected a folder, not a URL"),
    ],
)
def test_bad_input(tmp_path, options, line):
    shown = run(*EXACT, f"--output_dir={tmp_path}", *options, "--elastic=true", code=2)
    assert line in shown.stderr


def test_a_launcher_of_processes_is_refused(monkeypatch):
    args = argparse.Namespace(output_dir=None, timeout=1, grace=1)
    topology = Topology(0, 1, 2, 0, "127.0.0.1", 1, "process", "torchrun")
    monkeypatch.setattr(agent, "why_no_fork", lambda: "")
    with pytest.raises(BadInput, match=r"torchrun .*each rank: .*one process"):
        agent.start(topology, args, lambda: None)


def test_a_stop_that_another_node_was_asked_for_is_not_an_error_here():
    """The members save and end by themselves, with the code of that signal: none gets SIGTERM."""
    calls = []
    child = types.SimpleNamespace(kill=lambda: calls.append("kill"), terminate=lambda: calls.append("term"))
    job = agent._Agent(Topology(1, 2, 1, None, "127.0.0.1", 1, "node", "plain"), timeout=1, grace=7)
    job._store = torch.distributed.HashStore()
    for key in ("stop", "member/1.1"):
        job._store.set(key, str(signal.SIGINT.value))
    job._children = {"1.1": child}
    begun = time.monotonic()
    job._end(130)
    assert not calls and job._ends_at - begun >= launcher.GRACE + 7


def test_without_support_it_says_so_and_starts_nothing(monkeypatch, capsys):
    args = argparse.Namespace(output_dir=None, timeout=1, grace=1)
    monkeypatch.setattr(torch, "__version__", "2.4.1")
    agent.start(Topology(0, 1, 2, None, None, None, "node", "plain"), args, lambda: None)
    assert names(capsys.readouterr().out, "--elastic", "torch 2.6", "2.4.1")


def test_a_node_that_cannot_reach_the_first_one(tmp_path):
    address = (f"--init_method=tcp://127.0.0.1:{free_port()}", "--world_size=2", "--rank=1", "--timeout=1")
    shown = run(*EXACT, f"--output_dir={tmp_path}", *address, "--elastic=true", code=4)
    assert "cannot reach rank 0" in shown.stderr


class _Processes:
    """The processes of a job, as the Roll sees them in its store, at a time that the test sets."""

    def __init__(self, monkeypatch, nodes: int, per_node: int):
        self.store, self.now = torch.distributed.HashStore(), 100.0
        monkeypatch.setattr(roll, "time", types.SimpleNamespace(monotonic=lambda: self.now))
        self.roll = roll.Roll(self.store, nodes, per_node, timeout=1000)
        self.living: set[str] = set()
        self.silent: set[int] = set()  # agents without heartbeats; the agent of a node has its number
        for node in range(nodes):
            for _ in range(per_node):
                self.come(node)

    def come(self, node: int, **facts) -> str:
        name = f"{node}.{self.store.add('names', 1)}"
        self.store.set(f"ticket/{self.store.add('tickets', 1)}", json.dumps([name, 1, node]))
        self.store.set(f"ready/{name}", json.dumps(facts))
        self.living.add(name)
        return name

    def die(self, name: str, reason: str = "SIGKILL") -> None:
        self.living.remove(name)
        self.store.set(f"gone/{name}", reason)

    def look(self, seconds: float = 0.3, asked: bool = False) -> Plan:
        """Let time pass, and return the newest plan."""
        self.now += seconds
        for node in {*map(members.node_of, self.living)} - self.silent:
            self.store.add(f"beat/{node}", 1)
        self.roll.look(asked)
        self.roll.look(asked)
        generation = -1
        while self.store.check([Plan.key(generation + 1)]):
            generation += 1
        return Plan(*json.loads(self.store.get(Plan.key(generation)))) if generation >= 0 else None


@pytest.fixture
def processes(monkeypatch):
    """Return a function that makes _Processes of several nodes, with several processes each."""
    if not CAN_FORK:
        pytest.skip("--elastic needs torch 2.6")
    return functools.partial(_Processes, monkeypatch)


def _begin(job: _Processes, step: int) -> None:
    job.store.set(f"begun/{job.look(1.0).generation}", str(step))
    job.look()


def _reasons(plan: Plan) -> list[str]:
    return [reason for _, reason in plan.said]


def test_the_first_plan_waits_for_all_nodes_or_for_the_time(processes):
    job = processes(2, 1)
    job.die("1.2", "exit code 2")
    assert job.look() is None
    job.now += 1000
    assert job.look().ids == ["0.1"]


def test_a_spare_takes_the_place_of_a_lost_process(processes):
    job = processes(1, 2)
    assert job.look().ids == ["0.1", "0.2"]
    _begin(job, 0)
    job.come(0)
    assert job.look().generation == 0  # it is a spare
    job.die("0.1")
    plan = job.look()
    assert plan.ids == ["0.2", "0.3"] and plan.lost == 1
    assert _reasons(plan) == ["rank 0 on node 0 is gone: SIGKILL", "1 process joined on node 0"]


def test_an_agent_that_is_killed_while_it_announces_a_process(processes):
    job = processes(2, 1)
    lost = job.store.add("tickets", 1)
    assert job.look().ids == ["0.1", "1.2"]
    job.store.set(f"ticket/{lost}", json.dumps(["1.3", 1, 1]))  # it was only slow
    job.store.set("ready/1.3", "{}")
    job.living.add("1.3")
    job.die("1.2")
    assert job.look().ids == ["0.1", "1.3"]


def test_a_reason_is_said_again_until_a_generation_has_begun(processes):
    job = processes(1, 3)
    _begin(job, 0)
    job.die("0.2")
    job.look()
    job.die("0.3")
    plan = job.look()
    assert _reasons(plan) == ["rank 1 on node 0 is gone: SIGKILL", "rank 2 on node 0 is gone: SIGKILL"]
    job.store.set(f"begun/{plan.generation}", "0")
    job.come(0)
    assert _reasons(job.look()) == ["1 process joined on node 0"]


def test_the_processes_of_a_node_without_a_heartbeat_are_gone(processes):
    job = processes(2, 2)
    _begin(job, 0)
    job.silent.add(1)
    for _ in range(5):
        assert job.look().generation == 0
    job.look(1.0)
    plan = job.look()
    assert plan.ids == ["0.1", "0.2"]
    for rank, reason in zip((2, 3), _reasons(plan), strict=True):
        assert names(reason, f"rank {rank} on node 1", "no heartbeat", "2 s")
    assert job.store.get("gone/1.3") == b"no heartbeat for 2 s"  # its agent kills it


def test_a_stopped_process_is_not_a_slow_one():
    with subprocess.Popen(["sleep", "100"]) as process:
        try:
            assert not ends.is_stopped(process.pid)
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            assert ends.is_stopped(process.pid)
        finally:
            process.kill()
    assert not ends.is_stopped(process.pid)


def test_no_process_is_late_after_a_pause_of_node_0(processes):
    job = processes(2, 1)
    job.look()
    job.look(1.0)  # heartbeats of all processes have been read
    job.now += 20
    job.roll.look(False)  # before the others could send a heartbeat
    assert job.look().ids == ["0.1", "1.2"]
    assert not any(job.store.check([f"gone/{name}"]) for name in ("0.1", "1.2"))


def test_rank_0_is_on_node_0_and_the_others_wait_for_it(processes):
    job = processes(2, 1)
    job.look()
    job.die("0.1")
    assert job.look().generation == 0
    job.come(0)
    plan = job.look()
    assert plan.ids == ["0.3", "1.2"] and [*map(members.node_of, plan.ids)] == [0, 1]


def test_a_signal_to_one_node_takes_it_away_and_one_to_all_stops_the_job(processes):
    job = processes(3, 1)
    job.look()
    job.store.set("asked/2.3", str(int(signal.SIGTERM)))
    assert job.look().generation == 0
    job.look(roll.SILENCE / 2)
    plan = job.look()
    assert plan.ids == ["0.1", "1.2"] and plan.lost == 0
    assert _reasons(plan) == ["process 2.3 leaves, as asked"]
    assert not job.store.check(["stop"])
    job.store.set("asked/1.2", str(int(signal.SIGTERM)))
    job.look(asked=True)
    assert job.store.get("stop") == b"15" and job.look().ids == ["0.1", "1.2"]


def test_a_broken_group_of_the_same_processes_begins_again(processes):
    job = processes(1, 2)
    job.look()
    job.store.set("broken/0", "connection reset")
    assert job.look().generation == 0  # one of them may be dead
    assert job.look(0.5).generation == 1


def _lose(job: _Processes, name: str, reason: str, after: float = 2.7) -> str:
    """Let a process die some seconds after its generation has begun, and return the one that comes."""
    job.look(after)
    job.die(name, reason)
    new = job.come(0)
    job.look(1.0)
    return new


@pytest.mark.parametrize("count", [1, 2])
def test_a_job_whose_processes_die_faster_than_it_makes_steps_ends(processes, count):
    job = processes(1, count)
    name = f"0.{count}"
    _begin(job, 0)
    name = _lose(job, name, "SIGKILL", after=60)
    _begin(job, 12)
    for _ in range(19):
        assert not job.store.check(["failed"])
        name = _lose(job, name, "SIGKILL")
        _begin(job, 12)
    assert members.read(job.store, "failed") == "137"
    line = members.read(job.store, "failure")
    place = "in step 13" if count > 1 else "after step 12"  # if all are lost, the step is not known
    assert re.search(rf"\b20 times .*{place}, .*\b5\.0 s .*: the job ends", line)


def test_generations_that_are_lost_before_they_begin_end_the_job(processes):
    job = processes(1, 1)
    name = "0.1"
    job.look()
    for _ in range(20):
        assert not job.store.check(["failed"])
        name = _lose(job, name, "SIGKILL", after=1.0)
    assert names(members.read(job.store, "failure"), "20 times", "before its first step", "2.0 s")


def test_a_crash_in_the_same_step_three_times_in_a_row_ends_the_job(processes):
    job = processes(1, 2)
    name = "0.2"
    _begin(job, 0)
    for step in (12, 12, 13, 13, 13):
        assert not job.store.check(["failed"])
        name = _lose(job, name, "SIGFPE at job.py:7 (model(inputs))")
        _begin(job, step)
    assert members.read(job.store, "failed") == "136"
    line = members.read(job.store, "failure")
    assert re.match(r"rank 1 on node 0 .*SIGFPE in step 14, 3 times\b.* job\.py:7 \(model\(", line)


class _Interrupted:
    """A store that calls `happens` once, right after the answer whether it has `key`: other processes write
    between two requests of the roll."""

    def __init__(self, store, key, happens):
        self._store, self._key, self._happens = store, key, happens

    def __getattr__(self, name):
        return getattr(self._store, name)

    def check(self, keys):
        answer = self._store.check(keys)
        if keys == [self._key] and self._happens:
            happens, self._happens = self._happens, None
            happens()
        return answer


def test_a_member_that_begins_and_crashes_between_two_requests_is_a_rank_in_its_step(processes):
    job = processes(1, 2)
    name = "0.2"
    for _ in range(2):
        _begin(job, 6)
        name = _lose(job, name, "SIGSEGV")
    begun = f"begun/{job.look().generation}"

    def begin_and_crash():
        job.store.set(begun, "6")
        job.die(name, "SIGSEGV")
        job.come(0)

    job.roll._store = _Interrupted(job.store, begun, begin_and_crash)
    job.look(2.7)
    _begin(job, 6)
    line = members.read(job.store, "failure")
    assert re.match(r"rank 1 on node 0 .*SIGSEGV in step 7, 3 times[^,]*: ", line)


def test_a_crash_of_all_processes_ends_the_job_although_each_restart_makes_steps(processes):
    job = processes(1, 1)
    name = "0.1"
    _begin(job, 0)
    for _ in range(4):
        assert not job.store.check(["failed"])
        name = _lose(job, name, "SIGSEGV")
        _begin(job, 10)
        job.store.set(f"broken/{job.look().generation}", "connection reset")
        job.look(0.5)
        _begin(job, 11)
    assert re.search("SIGSEGV after step 11, 3 times[^,]*: ", members.read(job.store, "failure"))


def test_a_library_that_aborts_after_another_loss_is_no_crash(processes):
    job = processes(1, 3)
    _begin(job, 0)
    names = ["0.2", "0.3"]
    for _ in range(5):
        job.die(names[0], "SIGKILL")
        job.die(names[1], "SIGABRT")
        names = [job.come(0), job.come(0)]
        _begin(job, 12)
    assert not job.store.check(["failed"])


DUMP = """Fatal Python error: Segmentation fault

Thread 0x00007f9a821ff6c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 982 in run

{current}Thread 0x00007f9b3e69fb80 (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/autograd/graph.py", line 1072 in _engine_run_backward
  File "{job}", line 2 in main
  File "{job}", line 3 in <module>

Extension modules: torch._C (total: 1)
"""


@pytest.mark.parametrize("current", ["Current ", ""])
def test_the_line_that_has_crashed(tmp_path, current):
    job = tmp_path / "job.py"
    job.write_text("def main():\n    loss.backward()\nmain()\n")
    text = DUMP.format(current=current, job=job).replace("Current Thread", "Current thread")
    assert crash.find_place(text) == f"{job}:2 (loss.backward())"
    assert crash.find_place("") == ""


def _job_that(path: Path, code: str) -> Path:
    """Write train_exact.py with a line of code before each backward(), and return its path."""
    line = "            loss.backward()\n"
    return changed("train_exact.py", path, (line, f"            {code}\n{line}"))


@pytest.mark.thorough
@new_torch
def test_a_crash_in_a_step_ends_the_job_with_its_signal_step_and_line(tmp_path):
    job = _job_that(tmp_path / "job.py", "step == 6 and rank == world_size - 1 and os.kill(os.getpid(), 11)")
    options = ("--epochs=3", "--save_every=2step", "--processes_per_node=3", "--elastic=true")
    shown = run(job, *JOB, *options, f"--output_dir={tmp_path / 'run'}", code=139)
    line = shown.stderr.splitlines()[-1]
    assert re.match(r"error: rank \d on node 0 .*SIGSEGV (in step 7|after step \d), 3 times\b", line)
    assert f"at {job}:" in line and "os.kill(os.getpid(), 11)" in line
    assert "Traceback" not in shown.stderr


@new_torch
def test_a_process_that_crashes_once_is_replaced(tmp_path):
    once = tmp_path / "once"
    code = f"step == 6 and rank == 1 and not os.path.exists({str(once)!r})"
    crashes = f"(os.mkdir({str(once)!r}), os.kill(os.getpid(), 11))"
    job = _job_that(tmp_path / "job.py", f"{code} and {crashes}")
    options = ("--epochs=2", "--processes_per_node=2", "--elastic=true", f"--output_dir={tmp_path / 'run'}")
    shown = run(job, *JOB, *options)
    assert re.search(f"rank 1 on node 0 .*SIGSEGV at {job}:", shown.stdout)
    run(*EXACT, "--epochs=2", f"--output_dir={tmp_path / 'one'}")
    assert facts(tmp_path / "run") == facts(tmp_path / "one")


@new_torch
def test_a_crash_while_a_process_loads_ends_the_job(tmp_path):
    line = "    torch.manual_seed(args.seed)\n"
    job = changed("train_exact.py", tmp_path / "job.py", (line, f"{line}    os.kill(os.getpid(), 7)\n"))
    shown = run(job, *JOB, "--elastic=true", f"--output_dir={tmp_path / 'run'}", code=135)
    line = f"error: .*new process on node 0 .*SIGBUS before .*member .*3 times.* at {job}:"
    assert re.match(line, shown.stderr) and shown.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the facts of an undisturbed run of one process that saves often."""
    output = tmp_path_factory.mktemp("saved")
    run(*EXACT, "--epochs=4", "--save_every=4step", f"--output_dir={output}")
    return facts(output)


SAVED = ("--epochs=4", "--save_every=4step", "--processes_per_node=3")  # of the run of `saved`


@pytest.mark.thorough
@new_torch
# step: without and with a checkpoint. ranks: members that are killed too
@pytest.mark.parametrize(("step", "ranks"), [(1, []), (6, []), (6, [0, 1])])
def test_the_fork_server_is_killed_and_another_one_is_started(elastic, saved, tmp_path, step, ranks):
    job = elastic(slow_job(tmp_path / "job.py", 0.05), *SAVED)
    job.wait_until(lambda run: run.step >= step)
    old, generation = [*job.pids], job.generation
    os.kill(psutil.Process(old[0]).ppid(), signal.SIGKILL)
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):  # it has ended with the fork server
            job.signal(signal.SIGKILL, rank)
    job.wait_until(lambda run: run.generation > generation)
    assert not {*old} & {*filter(psutil.pid_exists, job.pids)}
    assert job.finish() == 0, job.lines
    said = "\n".join(job.lines)
    assert re.search(r"on node 0 is gone: .*fork server\b.* ended", said)
    assert "Traceback" not in said and "error: " not in said
    assert facts(tmp_path / "run") == saved


@new_torch
def test_the_fork_server_has_torch_loaded_in_any_working_directory(elastic, tmp_path):
    job = elastic(slow_job(tmp_path / "job.py", 0.05).name, "--epochs=1", cwd=tmp_path)
    job.wait_until(lambda each: each.pids)
    server = psutil.Process(job.pids[0]).parent()
    assert any("libtorch_cpu" in file.path for file in server.memory_maps())
    assert job.finish() == 0, job.lines


@pytest.mark.thorough
@new_torch
def test_a_fork_server_that_cannot_start_ends_the_job(tmp_path):
    line = "import torch\n"
    kill = "__name__ == '__mp_main__' and os.kill(os.getpid(), 9)\n"
    job = changed("train_exact.py", tmp_path / "job.py", (f"\n{line}", f"\n{kill}{line}"))
    shown = run(job, *JOB, "--elastic=true", f"--output_dir={tmp_path / 'run'}", code=137, fresh=True)
    assert shown.stderr.startswith("error: 5 times in a row ") and shown.stderr.count("\n") == 1


def _finds_fork_server(pid: int) -> bool:
    process = psutil.Process(pid)
    for child in process.children():
        with contextlib.suppress(psutil.NoSuchProcess):  # other children end meanwhile
            words = child.cmdline()
            # the job may be a fork of the fork server of the tests: a child of it has the same words until it
            # calls exec, and the agent may not handle signals yet
            if words != process.cmdline() and "multiprocessing.forkserver" in " ".join(words):
                return True
    return False


@pytest.mark.thorough
@new_torch
@pytest.mark.parametrize("step", [0, 6])  # 0: while the processes are loaded
def test_a_signal_to_all_processes_of_the_session_saves(elastic, saved, tmp_path, step):
    job = elastic(slow_job(tmp_path / "job.py", 0.05), *SAVED)
    wait_until(lambda: _finds_fork_server(job.process.pid))
    job.wait_until(lambda run: run.step >= step and run.lines)
    os.killpg(job.process.pid, signal.SIGTERM)
    assert job.finish() == 143, job.lines
    said = "\n".join(job.lines)
    assert "lost contact" not in said
    if step:
        assert re.search(rf"newest checkpoint .*step {job.step}\b", said)
    assert elastic(tmp_path / "job.py", *SAVED).finish() == 0
    state = facts(tmp_path / "run")["state"]
    assert {number: state[number] for number in saved["state"]} == saved["state"]


def test_node_0_decides_what_is_trained(processes):
    job = processes(2, 1)
    job.store.set("ready/1.2", json.dumps({"--lr": 1}))
    job.store.set("ready/0.1", json.dumps({"--lr": 2}))
    job.look()
    assert job.store.get("refused/1.2") == b"its --lr is 1, that of the members is 2"
    assert not job.store.check(["refused/0.1"])


def test_who_trains_something_else_is_refused(processes, capsys):
    job = processes(1, 1)
    job.look()
    job.die("0.1")
    name = job.come(0, torch="2.6")
    assert job.look().generation == 0
    job.look(1.0)  # it ends a while later
    assert job.store.get(f"refused/{name}") == b"its torch is 2.6, that of the members is None"
    assert capsys.readouterr().out.count("is refused") == 1


class _Deaf(members.Members):
    """A process whose thread has seen each plan before join() knew the one before it."""

    def _listen(self) -> None:
        pass


@new_torch
def test_a_plan_that_comes_while_the_members_of_the_last_one_meet_is_noticed(monkeypatch):
    server, host, port = launcher.hold_store()
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setattr(members.signals, "defer", lambda function: None)
    monkeypatch.setattr(members.signals, "identify", lambda *given: None)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    store = torch.distributed.PrefixStore("members", server)
    own = _Deaf("0.1")

    def announce(number: int, *ids: str) -> None:
        plan = Plan(number, [*ids], [1] * len(ids), [], 0)
        members.announce(store, Plan.key(number), json.dumps(plan))

    def meet(plan: Plan) -> bool:
        announce(1, "0.1")
        return True

    announce(0, "0.1", "0.2")
    monkeypatch.setattr(own, "_meet", meet)
    own.join()
    assert own.due and own.plan.generation == 0
    with pytest.raises(members.Changed):
        own.check()


@pytest.mark.parametrize(("nodes", "own"), [([0, 0, 1, 1], ("3", "1", "2")), ([0, 0, 1], ("2", "0", "1"))])
def test_variables_of_a_launcher(nodes, own):
    plan = Plan(0, [f"{node}.{place}" for place, node in enumerate(nodes)], nodes, [], 0)
    place = plan.place(plan.ids[-1])
    assert (place["RANK"], place["LOCAL_RANK"], place["LOCAL_WORLD_SIZE"]) == own
    assert place["WORLD_SIZE"] == str(len(nodes))

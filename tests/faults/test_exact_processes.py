"""train_exact.py on simulated nodes and under an elastic torchrun: the bits do not change."""

import contextlib
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from bootfile.ground.errors import BadInput
from bootfile.processes import sessions
from bootfile.receipt import reading, receipt
from bootfile.records import read_starts
from tests.conftest import LONGEST, QUICK, ROOT, environment, free_port, run, wait_until
from tests.support.exact import changed, facts
from tests.support.simulated import rows

pytestmark = pytest.mark.thorough

JOB = (*QUICK, "--batch_size=32", "--save_every=5", "--report_every=1", "--lr=0.01", "--timeout=60")
EACH = 9  # steps with each number of processes


def _worlds(output: Path) -> list[int]:
    """Return the number of processes of each start that has begun to train."""
    path = output / "starts.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["environment"]["world size"] for line in lines]


def test_two_nodes_with_two_processes_have_the_bits_of_one(tmp_path):
    options = (*JOB, "--max_steps=10")
    run("jobs/train_exact.py", *options, f"--output_dir={tmp_path / 'one'}")
    keep = f"--keep={tmp_path / 'nodes'}"
    job = ("--nodes=2", "--processes=2", "--platform=modelarts", keep, "jobs/train_exact.py", "--", *options)
    shown = run("-m", "launch", "simulate", *job).stdout
    assert {row.code for row in rows(shown).values()} == {0}
    assert facts(tmp_path / "nodes" / "node-0" / "outputs" / "train_url_0") == facts(tmp_path / "one")


def test_processes_leave_and_come_back_three_times(tmp_path):
    """1, 2, 4, 2, 1 and 2 processes. The first agent of torchrun holds the store, so it stays.

    The job trains 9 steps with the number of processes that the test wants, then it waits for another.
    With fewer it waits at once. With more it continues: it has to notice that some are lost. If it is asked
    to stop, it continues to the end of the step.
    """
    output, wanted = tmp_path / "elastic", tmp_path / "wanted"
    resume = "    step = checkpoint.resume()  # 0, or the step of the newest checkpoint\n"
    zero_grad = "            optimizer.zero_grad()\n"
    number = f"int(open({str(wanted)!r}).read())"
    is_done = f"(world_size == {number} and step >= begun + {EACH})"
    waits = f"(world_size < {number} or {is_done}) and not checkpoint.must_stop()"
    hold = f"            while {waits}: __import__('time').sleep(0.05)\n"
    changes = ((resume, f"{resume}    begun = step\n"), (zero_grad, hold + zero_grad))
    job = changed("train_exact.py", tmp_path / "job.py", *changes)
    options = (*JOB, "--max_steps=80")  # more than those of all changes
    wanted.write_text("0")
    run(job, *options, f"--output_dir={tmp_path / 'whole'}")
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:4", "--max-restarts=50"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=exact"]
    command += ["--rdzv-conf=last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=10"]
    command += [str(job), *options, f"--output_dir={output}"]
    # torch 2.14.1: with a shared store an agent that joins waits for ever for the master's address
    variables = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agents: list[subprocess.Popen] = []

    def progress() -> int:
        """Return the last step in the receipt; 0 without one, or while the job is writing to it."""
        if (output / receipt.FILE).exists():
            with contextlib.suppress(BadInput):
                return int(reading.read_records(str(output))["step"][-1])
        return 0

    def change(count: int) -> None:
        """Let agents come or die, and wait until the job trains on."""
        while len(agents) > count:
            lost = agents.pop()
            sessions.kill([lost], f"{tmp_path}/{len(agents)}")  # its process too, as if the node were lost
        want(count)
        while len(agents) < count:
            with open(tmp_path / f"agent{len(agents)}.log", "ab") as log:
                mark = f"{tmp_path}/{len(agents)}"
                agents.append(sessions.start(command, mark, log, environment(**variables), str(ROOT)))
        wait_until(lambda: _worlds(output)[-1:] == [count], agents[0])
        last = read_starts(str(output))[-1]["step"] + EACH - 1
        wait_until(lambda: progress() >= last, agents[0])

    def want(count: int) -> None:
        (tmp_path / "next").write_text(f"{count}")
        (tmp_path / "next").rename(wanted)

    try:
        for count in (1, 2, 4, 2, 1, 2):
            change(count)
        want(0)
        assert [agent.wait(LONGEST) for agent in agents] == [0, 0]
    finally:
        for number, agent in enumerate(agents):
            sessions.kill([agent], f"{tmp_path}/{number}")
    assert [count for count, _ in itertools.groupby(_worlds(output))] == [1, 2, 4, 2, 1, 2]
    elastic, whole = facts(output), facts(tmp_path / "whole")
    elastic["state"] = {step: elastic["state"].get(step) for step in whole["state"]}  # SIGTERM saves, too
    assert elastic == whole

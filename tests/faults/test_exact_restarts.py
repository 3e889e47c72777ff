"""A job that is killed and stopped at random moments has the weights and the data of an uninterrupted run.

The moments follow from seeds; tests/support/repeats.py says how many there are.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from bootfile.exact import checked_files
from bootfile.exact import files as checkpoint
from bootfile.histories import read_states
from bootfile.receipt import receipt
from tests.conftest import finish, processes_of, run, start
from tests.support.repeats import repeats

pytestmark = pytest.mark.thorough

BATCH, EPOCHS, SAVE_EVERY = 96, 3, 5  # 14 steps an epoch, 42 in all
DATA = (
    "--dataset=digits", "--width=32", f"--batch_size={BATCH}", f"--epochs={EPOCHS}", "--report_every=1",
    "--timeout=60",
)  # fmt: skip


def _command(processes: int, output, *more) -> tuple:
    options = [f"--save_every={SAVE_EVERY}", f"--output_dir={output}", *more]
    if processes == 1:
        return ("jobs/train.py", *DATA[:-1], *options)
    return ("jobs/train_ddp.py", f"--processes_per_node={processes}", *DATA, *options)


@pytest.fixture(scope="module", params=[1, 2, 4])
def whole(request, tmp_path_factory):
    """Yield (processes, output, seconds of training) of an uninterrupted run."""
    output = tmp_path_factory.mktemp(f"whole{request.param}")
    printed = run(*_command(request.param, output), timeout=600).stdout
    yield request.param, output, float(re.search(r"training_seconds=(\S+)", printed)[1])
    shutil.rmtree(output)


def _same(output: Path, whole: Path) -> None:
    """Assert that the weights are equal, bit for bit, and that the data are equal."""
    for epoch in range(1, EPOCHS + 1):
        own, other = (
            torch.load(folder / f"epoch_{epoch}.pth", weights_only=True) for folder in (output, whole)
        )
        assert all(torch.equal(own[name], other[name]) for name in other), f"epoch {epoch} has other weights"
    assert (output / receipt.FILE).read_bytes() == (whole / receipt.FILE).read_bytes()
    states = [{step: line["digest"] for step, line in read_states(each).items()} for each in (output, whole)]
    both = states[0].keys() & states[1].keys()  # a stopped run has more of them
    assert len(both) > EPOCHS and all(states[0][step] == states[1][step] for step in both)


def _read_until(job, pattern: str) -> list[str]:
    """Return the lines of a job up to the first that matches, or all."""
    lines = []
    for line in job.stdout:
        lines.append(line)
        if re.search(pattern, line):
            break
    return lines


def _reported_steps(lines: list[str]) -> list[int]:
    return [int(found[1]) for line in lines if (found := re.match(r"epoch=\d+ step=(\d+)/.* loss", line))]


def _during_a_save(folder: Path, bound: float) -> None:
    deadline = time.monotonic() + bound
    while time.monotonic() < deadline:
        if folder.exists() and any(name.startswith(".partial-") for name in os.listdir(folder)):
            return
        time.sleep(0.001)


def _send(pid: int, number: int) -> None:
    """Send a signal to a process of a job, which may just have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def test_random_sigkills(whole, tmp_path, capsys):
    """100 SIGKILLs, of one rank, of all ranks or during a save, lose at most one interval of saves each."""
    processes, unbroken, seconds = whole
    kills = repeats({1: 40, 2: 40, 4: 20}[processes], 3)
    draw = random.Random(processes)
    done, round_number, most_lost = 0, 0, 0
    while done < kills:
        round_number += 1
        output = tmp_path / str(round_number)
        folder = output / "checkpoints"
        while True:
            job = start(*_command(processes, output), stderr=subprocess.STDOUT)
            lines = _read_until(job, r" step=|resumed from")
            kind = draw.choice(["one rank", "all ranks", "during a save"])
            if kind == "during a save":
                _during_a_save(folder, seconds)
            else:
                time.sleep(draw.uniform(0, min(seconds, 4)))
            ranks = processes_of(job) if processes > 1 else [job.pid]
            if done < kills and ranks and job.poll() is None:
                for pid in [draw.choice(ranks)] if kind == "one rank" else ranks:
                    _send(pid, signal.SIGKILL)
            result = finish(job, None, timeout=300)
            lines += result.stdout.splitlines(keepends=True)
            if result.returncode == 0:
                break
            done += 1
            assert not [line for line in lines if "refused" in line], "".join(lines)
            paths = checkpoint.list_newest_first(str(folder))
            for path in paths:
                checked_files.read(path)  # an unreadable checkpoint would raise Refused
            if steps := _reported_steps(lines):
                newest = checked_files.read(paths[0])["step"] if paths else 0
                begun = steps[-1] // SAVE_EVERY * SAVE_EVERY  # step of the last save that was due
                assert newest >= begun - SAVE_EVERY, f"{kind}: step {steps[-1]}, the newest is {newest}"
                most_lost = max(most_lost, steps[-1] - newest)
        _same(output, unbroken)
        shutil.rmtree(output)
    with capsys.disabled():
        print(f"\n{processes} processes: {done} kills, {round_number} runs, at most {most_lost} steps lost")


MOMENTS = ["first step", "last step", "epoch boundary", "evaluation", "random", "random", "random"]


def test_random_sigterms(whole, tmp_path, capsys):
    """After 50 SIGTERMs, over three world sizes, no step is lost."""
    processes, unbroken, seconds = whole
    stops = repeats({1: 20, 2: 20, 4: 10}[processes], len({*MOMENTS}))
    draw = random.Random(10 + processes)
    done, round_number, slowest = 0, 0, 0.0
    while done < stops:
        round_number += 1
        output = tmp_path / str(round_number)
        while True:
            job = start(*_command(processes, output), stderr=subprocess.STDOUT)
            moment = MOMENTS[done % len(MOMENTS)]
            patterns = {
                "first step": r"^data train=", "last step": r" step=41/", "epoch boundary": r" step=(14|28)/",
                "evaluation": r" step=(14|28|42)/", "random": r" step=|resumed",
            }  # fmt: skip
            lines = _read_until(job, patterns[moment])
            if moment == "random":
                time.sleep(draw.uniform(0, min(seconds, 3)))
            elif moment == "evaluation":
                time.sleep(draw.uniform(0, 0.05))
            ranks = processes_of(job) if processes > 1 else []
            target = draw.choice([job.pid, *ranks])
            begin = time.monotonic()
            if done < stops and job.poll() is None:
                _send(target, draw.choice([signal.SIGTERM, signal.SIGUSR2]))
            result = finish(job, None, timeout=300)
            lines += result.stdout.splitlines(keepends=True)
            if result.returncode == 0:
                break
            done += 1
            text = "".join(lines)
            said = re.search(r"stopped .*step (\d+); .*checkpoint .*step (\d+)", text)
            if said:
                slowest = max(slowest, time.monotonic() - begin)
                assert result.returncode == 143 and said[1] == said[2], text
                steps = _reported_steps(lines)
                assert not steps or int(said[1]) == steps[-1], text
            else:  # no checkpoint is saved before training begins, nor after its end
                assert " step=" not in text or "test_accuracy=" in text, text
        _same(output, unbroken)
        shutil.rmtree(output)
    with capsys.disabled():
        print(f"\n{processes} processes: {done} stops, {round_number} runs, the slowest took {slowest:.1f} s")


def test_another_world_size_after_each_restart(whole, tmp_path):
    """2 -> 4 -> 1 processes have the same data, and the same weights up to rounding. Double precision is used
    because float32's rounding errors grow with every step."""
    if whole[0] != 1:
        pytest.skip("compared with one process only")
    reference = tmp_path / "reference"
    common = ("--max_steps=35",)
    run("-m", "tests.support.float64", *_command(1, reference, *common), timeout=300)
    output = tmp_path / "changing"
    for processes, stop in ((2, "step=13/"), (4, "step=27/"), (1, None)):
        job = start("-m", "tests.support.float64", *_command(processes, output, *common))
        if stop:
            for line in job.stdout:
                if f" {stop}" in line:
                    job.send_signal(signal.SIGTERM)
                    break
        finish(job, 143 if stop else 0, timeout=300)
    assert (output / receipt.FILE).read_bytes() == (reference / receipt.FILE).read_bytes()
    own, other = (torch.load(folder / "epoch_3.pth", weights_only=True) for folder in (output, reference))
    furthest = max(float((own[name] - other[name]).abs().max()) for name in other)
    assert 0 <= furthest < 1e-4, furthest

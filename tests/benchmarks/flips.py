"""Runs with one flipped bit, and whether `launch audit` finds them: the proof of guides/history.md.

    python -m tests.benchmarks.flips                     200 runs with a flip, 200 without
    python -m tests.benchmarks.flips --runs 20 --clean 5 --to flips.json
    python -m tests.benchmarks.flips --exact             train_exact.py on two processes, audited on one

A copy of train.py with a small network trains 20 steps on digits, in one process with one thread, and keeps
a state after every second step. In each run a random bit of the weights, the gradients, the optimizer's state
or a batch is flipped at a random step (tests/support/flipping.py). Then all 10 intervals
are computed again by the functions of `launch audit`. Counted are

    ended       runs that ended with an error of their own: what became infinite is not saved. They are not
                audited
    changed     runs whose states differ from those of a run without a flip
    found       of these, runs with an interval that differs
    first step  of these, runs where the first step that is named is the first state that differs
    share 0.1   of these, runs where the one interval that --share 0.1 --seed RUN draws differs
    alarms      runs that did not change, and runs without a flip of which every third one is killed at a
                random moment and continued, with an interval that differs

With --exact the bit is flipped on one of two processes. A killed run continues on one. If the flip is in the
weights or the optimizer's state, the processes have other weights, which the run finds itself: it ends. A
flip in the gradients or a batch is one in the first shard of the process: counted is how often this shard and
this step are named, of the runs with such a flip whose states or gradients differ.

The programs are forked from this one, which has imported torch: a start takes a tenth of a second.
"""

import argparse
import contextlib
import importlib
import io
import json
import math
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from bootfile import histories
from bootfile.ground.heartbeat import Heartbeat
from bootfile.history import audit
from bootfile.processes import sessions
from tests.benchmarks.rounds import conditions
from tests.conftest import free_port
from tests.support.exact import changed
from tests.support.flipping import LINES

STEPS = 20
EVERY = 2  # steps between two states that are kept
KINDS = ("weights", "gradients", "optimizer", "batch")
_MODEL = "    model = models.resnet18(train_set.channels, train_set.classes, args.width)\n"
_SMALL = """    size = train_set.images[0].numel()
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(size, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(),
        torch.nn.Linear(16, train_set.classes)
    )
"""
ENTRY = "from common.distributed.entry import entry  # before torch, so that Ctrl-C ends its import cleanly\n"
_WORDS = [
    "--dataset=digits", "--batch_size=64", f"--epoch_steps={STEPS}", "--epochs=1", "--save_every=1",
    "--keep=1", f"--keep_every={EVERY}", "--threads=1", "--report_every=1000", "--epoch_weights=false",
]  # fmt: skip
_IMPORTED = [
    "torch._dynamo",  # an optimizer imports it, which took most of the time of each start
    "torch.utils.tensorboard", "sklearn.datasets", "common.checkpoint.checkpointer",
    "common.checkpoint.fork", "common.compute.models", "common.run.evaluation",
    "datasets.loaders.engines.memory", "datasets.memory.digits", "bootfile.exact.forked",
    "bootfile.exact.ladder",
]  # fmt: skip


_EXACT = ["--exact_shards=4", "--recheck=1000"]  # so that the gradients of the shards are recorded


class Program:
    """A program in a fork of this process, with the members of subprocess.Popen that the audit uses."""

    def __init__(self, command: list[str], output: Any, environment: dict[str, str]):
        sys.stdout.flush()
        self.args = command
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            self._run(command, output, environment)

    def _run(self, command: list[str], output: Any, environment: dict[str, str]) -> None:
        code = 1
        try:
            os.setsid()
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            os.environ.clear()
            os.environ.update(environment)
            sys.argv = command[1:]
            runpy.run_path(command[1], run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = 600) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.002)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def start(
    command: list[str], mark: str, output: Any, environment: dict[str, str], cwd: Any = None
) -> Program:
    """Start a program in place of sessions.start()."""
    return Program(command, output, environment)


def start_ranks(command: list[str], log: Any, environment: dict[str, str], size: int) -> list[Program]:
    """Start a job on `size` processes, with the variables that launchers set."""
    if size == 1:
        return [Program(command, log, environment)]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(size))
    ranks = []
    for rank in range(size):
        of_rank = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(Program(command, log, environment | of_rank))
    return ranks


def end(tasks: list[Program], number: Any) -> None:
    """End programs in place of sessions.end() and sessions.kill()."""
    for task in tasks:
        if task.poll() is None:
            task.kill()
            task.wait()


@contextlib.contextmanager
def forked_programs() -> Iterator[None]:
    """Let the audit fork its programs here."""
    for name in _IMPORTED:
        importlib.import_module(name)
    with (
        mock.patch.object(sessions, "start", start),
        mock.patch.object(sessions, "end", end),
        mock.patch.object(sessions, "kill", end),
    ):
        yield


class Proof:
    """Runs and audits. folder: for all of them, which are deleted one after the other. is_exact: of
    train_exact.py on two processes."""

    def __init__(self, folder: Path, is_exact: bool = False):
        self._folder = folder
        self.ended = False  # the last run ended with an error
        self.processes = 2 if is_exact else 1
        self._words = [*_WORDS, *_EXACT] if is_exact else _WORDS
        name = "train_exact.py" if is_exact else "train.py"
        self.job = changed(name, folder / "job.py", (_MODEL, _SMALL), (ENTRY, ENTRY + LINES))

    def train(self, name: str, seed: int, flip: str = "", kill_after: float = 0.0) -> Path:
        """Train a run, and return its folder. kill_after: seconds, after which it is killed and continued."""
        output = self._folder / name
        environment = {key: value for key, value in os.environ.items() if not key.startswith("BOOTFILE_")}
        if flip:
            place = self._folder / f"{name}-flip"
            place.mkdir()
            environment["BOOTFILE_FLIP"] = f"{place}:{flip}"
        command = [sys.executable, str(self.job), *self._words, f"--seed={seed}", f"--output_dir={output}"]
        with open(f"{output}.log", "ab") as log:
            size = self.processes
            if kill_after:
                killed = start_ranks(command, log, environment, size)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    killed[0].wait(kill_after)
                end(killed, signal.SIGKILL)
                size = 1
            codes = [program.wait() for program in start_ranks(command, log, environment, size)]
            code = max(codes, key=abs)
        text = Path(f"{output}.log").read_text(errors="replace")
        if code and not flip:
            raise RuntimeError(f"{command}: exit code {code}\n{text}")
        self.ended = code != 0
        if flip and "flip: rank " not in text:
            raise RuntimeError(f"{flip}: no bit was flipped\n{text}")
        return output

    def audit(self, run: Path) -> list[audit.Interval]:
        """Compute all intervals of a run again."""
        records = audit.read_records(str(run))
        assert not records.altered, records.altered
        every = records.intervals
        with contextlib.redirect_stdout(io.StringIO()):
            # train.py has one process in any case
            audit.audit(str(run), every, None, None, 1, [])
        return every


def read_states(run: Path) -> dict[int, str]:
    """Return step -> the digest of the state."""
    return {step: line["digest"] for step, line in histories.read_states(str(run)).items()}


def find_first(run: dict[int, str], clean: dict[int, str]) -> int:
    """Return the first step whose state differs, 0 without one."""
    return min((step for step in run if run[step] != clean[step]), default=0)


def find_step(intervals: list[audit.Interval]) -> int:
    """Return the first step that an audit names, 0 without one."""
    for interval in intervals:
        if interval.difference:
            match = re.search(r"the state after step (\d+) is another one", interval.difference)
            return int(match[1]) if match else -1
    return 0


def find_shard(intervals: list[audit.Interval]) -> tuple[int, int]:
    """Return the first step and shard that an audit names, (0, 0) without a single shard."""
    for interval in intervals:
        if interval.difference:
            match = re.search(r"differ: shard (\d+) \(.*\) of step (\d+) had other grad", interval.difference)
            return (int(match[2]), int(match[1])) if match else (0, 0)
    return 0, 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=200, help="runs with a flip (default: 200)")
    parser.add_argument("--clean", type=int, default=200, help="runs without one (default: 200)")
    parser.add_argument("--exact", action="store_true", help="an exact job on two processes")
    parser.add_argument("--seed", type=int, default=0, help="draws the flips (default: 0)")
    parser.add_argument("--seconds", type=float, help="begin no run after this time (default: no limit)")
    parser.add_argument("--to", help="also write the results as JSON")
    args = parser.parse_args()
    with conditions():
        prove(args)


def prove(args: argparse.Namespace) -> None:
    """Make the runs, audit them, and print the table."""
    began = time.monotonic()
    draw = random.Random(args.seed)
    flips: list[dict[str, Any]] = []
    alarms: list[bool] = []  # each run without a flip has one
    heartbeat = Heartbeat()
    with tempfile.TemporaryDirectory(prefix="bootfile-flips-") as folder, forked_programs():
        proof = Proof(Path(folder), args.exact)
        clean = read_states(proof.train("clean", seed=0))
        for number in range(max(args.runs, args.clean)):
            if args.seconds and time.monotonic() - began > args.seconds:
                break
            heartbeat.beat(f"flips: {number} of {max(args.runs, args.clean)}")
            if number < args.runs:
                flips.append(flip_a_bit(proof, draw, number, clean))
            if number < args.clean:
                kill_after = draw.uniform(0.2, 1.0) if number % 3 == 0 else 0.0
                run = proof.train(f"clean-{number}", number + 1, kill_after=kill_after)
                alarms.append(any(each.difference for each in proof.audit(run)))
                shutil.rmtree(run)
    show(flips, alarms, time.monotonic() - began)
    if args.to:
        Path(args.to).write_text(json.dumps({"flips": flips, "alarms": alarms}, indent=1))


def flip_a_bit(proof: Proof, draw: random.Random, number: int, clean: dict[int, str]) -> dict[str, Any]:
    """Make a run with a flip, audit it, and return what was found. clean: the states without a flip."""
    kind = KINDS[number % len(KINDS)]
    step = draw.randrange(1, STEPS + 1)
    rank = draw.randrange(proof.processes)
    run = proof.train(f"flip-{number}", 0, f"{rank},{step},{kind},{draw.randrange(2**40)}")
    [line] = re.findall(r"^flip: .*$", Path(f"{run}.log").read_text(), re.M)
    ended = proof.ended
    intervals = [] if ended else proof.audit(run)
    drawn = audit.draw(intervals, 0.1, number) if intervals else []
    first = 0 if ended else find_first(read_states(run), clean)
    shutil.rmtree(run)
    return {
        "kind": kind,
        "step": step,
        "flip": line,
        "ended": ended,
        "first step that differs": first,
        "first step of the audit": find_step(intervals),
        "shard is right": find_shard(intervals) == (step, 2 * rank),
        "intervals that differ": sum(1 for each in intervals if each.difference),
        "found with share 0.1": any(each.difference for each in drawn),
    }


def show(flips: list[dict[str, Any]], alarms: list[bool], seconds: float) -> None:
    """Print a table of the kinds of flips, and the lines about the rest."""
    print(
        f"{'flip of':<12}{'runs':>6}{'ended':>7}{'changed':>9}{'found':>7}{'first step':>12}{'share 0.1':>11}"
    )
    for kind in (*KINDS, "all"):
        of_kind = [flip for flip in flips if kind in ("all", flip["kind"])]
        different = [flip for flip in of_kind if flip["first step that differs"]]
        found = [flip for flip in different if flip["first step of the audit"]]
        right = [flip for flip in found if flip["first step of the audit"] == flip["first step that differs"]]
        shared = [flip for flip in different if flip["found with share 0.1"]]
        ended = sum(1 for flip in of_kind if flip["ended"])
        counts = (len(of_kind), ended, len(different), len(found), len(right), len(shared))
        print("{:<12}{:>6}{:>7}{:>9}{:>7}{:>12}{:>11}".format(kind, *counts))
    count = len(different)
    expected = sum(flip["intervals that differ"] for flip in different) / 10
    spread = 1.96 * math.sqrt(count * 0.1 * 0.9)
    print(f"share 0.1: expected {expected:.1f}, 95% of such experiments: {expected - spread:.1f} to "
          f"{expected + spread:.1f}")  # fmt: skip
    unchanged = [flip for flip in flips if not flip["first step that differs"] and not flip["ended"]]
    false = [flip for flip in unchanged if flip["first step of the audit"]]
    print(
        f"alarms: {len(false)} of {len(unchanged)} runs that a flip did not change, {sum(alarms)} of "
        f"{len(alarms)} without"
    )
    for flip in unchanged:
        print(f"changed nothing: {flip['flip']}")
    in_shards = [
        flip
        for flip in flips
        if flip["kind"] in ("gradients", "batch") and flip["intervals that differ"] and not flip["ended"]
    ]
    right = [flip for flip in in_shards if flip["shard is right"]]
    print(f"step and shard named: {len(right)} of {len(in_shards)} (only with --exact)")
    print(f"{seconds:.0f} s")


if __name__ == "__main__":
    main()

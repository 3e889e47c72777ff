"""Kill processes of train_exact.py --elastic for minutes, and compare the work and the bits with a whole run.

    python -m tests.benchmarks.elastic                        4 processes, a SIGKILL every 10 s for 10 minutes
    python -m tests.benchmarks.elastic --seconds 120 --pause 0.1

Every third time two processes die at once, every fourth time it is rank 0, and every fifth time the same rank
dies again as soon as the others continue. The figures:

    useful share     steps x the time of an undisturbed step / wall time. The time is that of the steps of the
                     same run which began 5 s or more after a kill; it has its part of evaluations and saves
    of other runs    the same with the time of a step of two undisturbed runs, one before and one after: the
                     speed of a shared machine changes within minutes
    longest stall    the longest time between two steps, less that of a step
    generations      how often the members changed, and once more
    bits             whether states, samples, figures and weights are those of one process without a kill

--pause SECONDS: a pause in each shard, for a step that mostly waits, as for a GPU.
--kills N --every_steps M: N times, each after M more steps, instead of by --seconds and --every.
--steps 0: no undisturbed runs. --at_once: the run without a kill takes place at the same time. Then the times
    mean nothing, and the bits are known sooner. --gpu: on the GPU, which all processes share.
"""

import argparse
import contextlib
import itertools
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.rounds import conditions, make_parser
from tests.support import on_gpu
from tests.support.elastic import JOB, ElasticRun, slow_job
from tests.support.exact import facts

_CALM = 5.0  # seconds from a kill until the steps are undisturbed: a spare has started by then


def measure(args: argparse.Namespace, folder: Path, ended_by_us: contextlib.ExitStack) -> None:
    """Run the job without and with kills, and print the figures. ended_by_us: ends the runs in any case."""

    def start(*command: str | Path) -> ElasticRun:
        begun = ElasticRun(*command)
        ended_by_us.callback(begun.kill)
        return begun

    job = slow_job(folder / "job.py", args.pause)
    options = [*JOB, f"--batch_size={args.batch_size}", f"--epochs={args.epochs}", f"--width={args.width}"]
    several = [*options, f"--processes_per_node={args.processes}", "--elastic=true"]
    # the bits of two processes are those of one
    alone = "jobs/train_exact.py", *options, "--processes_per_node=2", f"--output_dir={folder / 'whole'}"
    before = _time_step(start, [job, *several, f"--output_dir={folder / 'before'}"], args.steps)
    killed = start(job, *several, f"--output_dir={folder / 'killed'}")
    whole = start(*alone) if args.at_once else None
    killed.wait_until(lambda each: each.step >= 1)
    begun = killed.steps[0][0]
    kills = _kill_again(killed, args, begun)
    ended = time.monotonic()
    end = next(number for at, number in reversed(killed.steps) if at <= ended)
    os.kill(killed.process.pid, signal.SIGTERM)  # it saves, and ends
    code = killed.finish()
    after = _time_step(start, [job, *several, f"--output_dir={folder / 'after'}"], args.steps)
    pairs = [*itertools.pairwise(at for at, _ in killed.steps if at <= ended)]
    calm = [later - earlier for earlier, later in pairs if not any(0 < later - at < _CALM for at in kills)]
    step = statistics.mean(calm) if calm else before  # on a slow machine a step may take 5 s
    stalls = sorted(later - earlier - step for earlier, later in pairs)

    figures = {
        "useful share": (end - killed.steps[0][1]) * step / (ended - begun),
        "of other runs": (end - killed.steps[0][1]) * (before + after) / 2 / (ended - begun),
        "longest stall": stalls[-1],
        "median of the stalls": statistics.median([each for each in stalls if each > 2 * step] or [0.0]),
        "generations": killed.generation,
        "lost processes": len(kills),
        "seconds": ended - begun,
        "steps": end,
        "an undisturbed step": step,
        "undisturbed steps": len(calm),
        "a step before": before,
        "a step after": after,
        "last step": killed.step,
    }
    for name, figure in figures.items():
        print(f"{name:<22}{figure:>10.3f}", flush=True)
    last = killed.step
    whole = whole or start(*alone)
    whole.wait_until(lambda each: each.step >= last, timeout=3600)
    os.kill(whole.process.pid, signal.SIGTERM)
    whole.finish()
    assert code == 143, killed.lines
    print("bits                  ", _compare(folder / "killed", folder / "whole", last))


def _time_step(start: Callable[..., ElasticRun], command: list, steps: int) -> float:
    """Return the seconds of a step of an undisturbed run; NaN for a run of no step."""
    if not steps:
        return math.nan
    job = start(*command)
    job.wait_until(lambda each: each.step >= steps, timeout=3600)
    job.kill()
    (first_at, first), (last_at, last) = job.steps[0], job.steps[-1]
    return (last_at - first_at) / (last - first)


def _kill_again(job: ElasticRun, args: argparse.Namespace, begun: float) -> list[float]:
    """Kill processes until the time has passed, or N times. Return time.monotonic() of each kill."""
    chance, kills = random.Random(args.seed), list[float]()

    def kill(*ranks: int) -> None:
        kills.extend([time.monotonic()] * len(ranks))
        job.signal(signal.SIGKILL, *ranks)

    def wait(number: int) -> None:
        if args.kills:
            last = job.step + args.every_steps
            job.wait_until(lambda each: each.step >= last, timeout=3600)
        else:
            time.sleep(max(0.0, begun + number * args.every - time.monotonic()))

    count = args.kills or int(args.seconds / args.every) - 1
    for number in range(1, count + 1):
        wait(number)
        rank = 0 if number % 4 == 0 else chance.randrange(len(job.pids))
        ranks = {rank, (rank + 1) % len(job.pids)} if number % 3 == 0 else {rank}
        generation = job.generation
        kill(*ranks)
        if number % 5 == 0:
            job.wait_until(lambda each, before=generation: each.generation > before)
            kill(rank % len(job.pids))
        if job.process.poll() is not None:
            raise AssertionError("\n".join(job.lines))
    wait(count + 1)
    return kills


def _compare(killed: Path, whole: Path, last: int) -> str:
    """Return "equal", or what differs. The runs were stopped: only what both have done is compared."""
    here, there = facts(killed), facts(whole)
    differences = [
        name
        for name in ("state", "weights")
        for key in (here[name].keys() & there[name].keys()) - {last, "best.pth"}
        if here[name][key] != there[name][key]
    ]
    figures = [[line for line in each["figures"] if line["step"] < last] for each in (here, there)]
    differences += ["figures"] * (figures[0] != figures[1])
    common = min(len(here["samples"]), len(there["samples"]))
    differences += ["samples"] * (here["samples"][:common] != there["samples"][:common])
    return f"DIFFERENT: {', '.join(differences)}" if differences else f"equal in {last} steps"


def main() -> None:
    parser = make_parser(__doc__)
    numbers = {"processes": 4, "batch_size": 256, "width": 16, "epochs": 4000, "seed": 0}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=60, help="steps of an undisturbed run (default: 60)")
    for name, count in (("kills", 0), ("every_steps", 25)):
        parser.add_argument(f"--{name}", type=int, default=count, help="default: %(default)s")
    for name, value in (("seconds", 600.0), ("every", 10.0), ("pause", 0.0)):
        parser.add_argument(f"--{name}", type=float, default=value, help="default: %(default)s")
    for name in ("at_once", "gpu"):
        parser.add_argument(f"--{name}", action="store_true", help="see above")
    args = parser.parse_args()
    if args.gpu:
        on_gpu.show_gpu()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # processes may still write
    with conditions(), folder, contextlib.ExitStack() as ended_by_us:
        measure(args, Path(folder.name), ended_by_us)


if __name__ == "__main__":
    main()

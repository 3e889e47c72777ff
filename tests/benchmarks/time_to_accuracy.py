"""Measure the time to an accuracy: the jobs and the loop of the published sample, learning curves of n seeds.

    python -m tests.benchmarks.time_to_accuracy --dataset digits --target 0.98 --seeds 5 --limit 150
    python -m tests.benchmarks.time_to_accuracy --jobs train.py,train_amp.py --json curves.json
    python -m tests.benchmarks.time_to_accuracy --from curves.json --plot curves.png

For each seed the contestants run one after the other. The time is that of training: from the beginning of the
first step to the end of the evaluation that reached the accuracy, including evaluating and saving. Set-up and
compiling come before. Every run compiles without a cache, unless --keep_compiled true is given. If a job
compiles, the time to the target is also given with compiling. A job with a schedule of its learning rate runs
to its end, or to --limit seconds of training. The sample's loop has a constant learning rate, so it ends when
it reaches the target.

A run that did not reach the target is censored: "> 150 s". For the median, a censored time is longer than its
limit: the median is a number if more than half of the runs reached the target, else a lower bound. The same
holds for ratios.

--json writes every curve; --from makes the table and the picture from that file:

    {"dataset": "digits", "target": 0.98, "limit": 150.0, "date": "2026-11-21", "machine": "...",
     "load_average": 1.9, "runs": [{"job": "train.py", "seed": 0, "options": "--dataset digits ...",
     "laps": {"set-up": 2.1, "compilation": 0.0}, "seconds": 31.2, "ended": "schedule",
     "curve": [[2.4, 0.31], [4.7, 0.78]]}]}

laps: seconds before training; seconds: of the whole process; ended: by its "schedule", the "limit", the
"target", or because it "diverged"; curve: [seconds of training, test accuracy] of each evaluation before the
limit.
"""

import datetime
import json
import os
import shlex
import signal
import sys
from typing import NamedTuple

from common import arguments
from common.entry import entry
from common.exits import BadInput
from common.files import ROOT
from tests.benchmarks import curves, curves_picture

_JOBS = os.path.join(ROOT, "jobs")
_ENDLESS = "--epochs 10000"  # learning rate and batch size are the loop's defaults


class Recipe(NamedTuple):
    target: float  # test accuracy
    limit: float  # seconds of training
    options: dict[str, str]  # of each contestant's command


RECIPES = {
    "digits": Recipe(0.98, 150, {
        curves.BASELINE: _ENDLESS,
        "train.py": "--epochs 12 --batch_size 128 --lr 0.1",
        "train_amp.py": "--epochs 12 --batch_size 128 --lr 0.1",
        "train_fast.py": "--epochs 8 --batch_size 128 --lr 0.03 --save_every 8epochs",
    }),
    "fashion_mnist": Recipe(0.93, 3600, {
        curves.BASELINE: _ENDLESS,
        "train.py": "--epochs 5 --batch_size 128 --lr 0.1",
        "train_amp.py": "--epochs 5 --batch_size 128 --lr 0.1",
        "train_fast.py": "--epochs 5 --batch_size 512 --lr 0.4",
    }),
    "cifar10": Recipe(0.94, 3600, {
        curves.BASELINE: _ENDLESS,
        "train.py": "--epochs 30 --batch_size 128 --lr 0.1",
        "train_amp.py": "--epochs 30 --batch_size 128 --lr 0.1",
        "train_fast.py": "--epochs 16 --short_recipe true --save_every 16epochs --epoch_weights false",
    }),
}  # fmt: skip


@entry
def main():
    args = _parsed()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        found = curves.read(args.source) if args.source else _measured(args)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    if args.target:
        found["target"] = args.target
    if args.json == "-":
        print(json.dumps(found, indent=1))
    else:
        print(curves.table(found))
    if args.plot:
        curves_picture.draw(found, args.plot)


def _parsed():
    parser = arguments.Parser(__doc__)
    parser.prog = "python -m tests.benchmarks.time_to_accuracy"
    parser.add_argument("--dataset", choices=RECIPES, default="digits", help="default: digits")
    parser.add_argument("--data_url", help="folder with the data set (not for digits)")
    parser.add_argument(
        "--target", type=arguments.positive_float, help="test accuracy (default: of the recipe)"
    )
    parser.add_argument(
        "--seeds", type=arguments.positive_int, default=5, help="runs of each job (default: 5)"
    )
    parser.add_argument(
        "--limit", type=arguments.positive_float, help="seconds of training (default: of the recipe)"
    )
    parser.add_argument(
        "--jobs", help=f'for example "{curves.BASELINE},train.py" (default: all of the recipe)'
    )
    parser.add_argument(
        "--keep_compiled", type=arguments.boolean, default=False,
        help="true: only the first run of a job compiles (default: all runs compile)",
    )  # fmt: skip
    parser.add_argument("--plot", metavar="FILE.png", help="draw the learning curves")
    parser.add_argument(
        "--json",
        metavar="FILE",
        nargs="?",
        const="-",
        help="write all curves after each run (default: print)",
    )
    parser.add_argument(
        "--from", dest="source", metavar="FILE",
        help="read a file of --json instead of running; only --target, --plot and --json have an effect",
    )  # fmt: skip
    args = parser.parse_args()
    if args.target and args.target > 1:
        raise BadInput(f"--target {args.target:g} is not an accuracy: 0.98 is 98 %")
    for path in filter(None, (args.plot, args.json if args.json != "-" else None)):
        _writable(path)
    if args.plot:
        curves_picture.check(args.plot)
    return args


def _writable(path: str) -> None:
    """Check that a file can be written, before the runs of some hours. Raises BadInput."""
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK) or os.path.isdir(path):
        raise BadInput(f"{path} cannot be written")


def _measured(args) -> dict:
    """Return all runs, in the form of --json."""
    from launch.bench import log  # these import torch, which takes seconds and which --from does not need
    from tests.benchmarks import timed_run
    from tests.benchmarks.machine import describe

    recipe = RECIPES[args.dataset]
    target, limit = args.target or recipe.target, args.limit or recipe.limit
    jobs = _chosen(args.jobs, recipe)
    found = {"dataset": args.dataset, "target": target, "limit": limit, "runs": []}
    found |= {"date": str(datetime.date.today()), "machine": describe(), "load_average": os.getloadavg()[0]}
    minutes = args.seeds * len(jobs) * limit / 60
    log(f"{', '.join(jobs)}, seeds 0 to {args.seeds - 1}: at most {minutes:.1f} minutes of training")
    for seed in range(args.seeds):
        for job in jobs:
            options = f"--dataset {args.dataset} {recipe.options[job]}"
            if args.data_url:
                options += f" --data_url {shlex.quote(os.path.abspath(args.data_url))}"
            # with a constant learning rate, the accuracy does not depend on the end of the run
            enough = target if job == curves.BASELINE else None
            run = {"job": job, "seed": seed, "options": options}
            run |= timed_run.run(
                [*_program(job), *shlex.split(options), f"--seed={seed}"], limit, enough, args.keep_compiled
            )
            found["runs"].append(run)
            found["load_average"] = os.getloadavg()[0]
            if args.json and args.json != "-":
                _write(found, args.json)
            log(f"seed {seed}, {job}: {curves.summary(run, target, limit)}")
    return found


def _chosen(names: str | None, recipe: Recipe) -> list[str]:
    """Return the contestants. Raises BadInput."""
    there = [job for job in recipe.options if job in (curves.BASELINE, *os.listdir(_JOBS))]
    jobs = list(dict.fromkeys(name.strip() for name in names.split(","))) if names else there
    for job in jobs:
        if job not in there:
            raise BadInput(f"--jobs {names}: unknown job {job!r}, expected some of {', '.join(there)}")
    return jobs


def _program(job: str) -> list[str]:
    return ["-m", "tests.benchmarks.seed_loop"] if job == curves.BASELINE else [f"jobs/{job}"]


def _write(found: dict, path: str) -> None:
    with open(f"{path}.partial", "w", encoding="utf-8") as file:
        json.dump(found, file)
    os.replace(f"{path}.partial", path)


if __name__ == "__main__":
    main()

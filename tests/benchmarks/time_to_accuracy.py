"""Measure the time to an accuracy: the jobs and the loop of the published sample, with n seeds.

    python -m tests.benchmarks.time_to_accuracy --dataset digits --target 0.98 --seeds 5 --limit 150
    python -m tests.benchmarks.time_to_accuracy --jobs train.py,train_amp.py --json runs.json

For each seed the contestants run one after the other. The time is that of training: from the beginning of the
first step to the end of the evaluation that reached the accuracy, including evaluating and saving. Set-up and
compiling come before. Every run compiles without a cache, unless --keep_compiled true is given. A job with a
schedule of its learning rate runs to its end, or to --limit seconds of training. The sample's loop has a
constant learning rate, so it ends when it reaches the target.

A run that did not reach the target counts as longer than all others: a median is "> 150" (the limit) if half
of the runs did not reach it. --json also writes the runs: job, seed, options, seconds of compiling, seconds
to the target (null: not reached), curve ([seconds of training, test accuracy] of each evaluation).
"""

import json
import math
import os
import shlex
import signal
import statistics
import sys
import tempfile
import time

from bootfile.ground.errors import BadInput
from bootfile.ground.files import write_atomic
from bootfile.records import read_starts
from common.console import arguments
from common.distributed.entry import entry
from launch.loader_rates import log
from tests.benchmarks import jobs, rounds
from tests.benchmarks.train import BASELINE

_SETUP = 600.0  # seconds that a job may take until its first step
_SMALL = "--epochs 12 --batch_size 128 --lr 0.1"
_FASHION = "--epochs 5 --batch_size 128 --lr 0.1"
_CIFAR = "--epochs 30 --batch_size 128 --lr 0.1"
_ENDLESS = "--epochs 10000"  # learning rate and batch size are the loop's defaults
RECIPES: dict[str, tuple[float, float, dict[str, str]]] = {  # test accuracy, seconds of training, options
    "digits": (0.98, 150, {
        BASELINE: _ENDLESS, "train.py": _SMALL, "train_amp.py": _SMALL,
        "train_fast.py": "--epochs 8 --batch_size 128 --lr 0.03 --save_every 8epochs",
    }),
    "fashion_mnist": (0.93, 3600, {
        BASELINE: _ENDLESS, "train.py": _FASHION, "train_amp.py": _FASHION,
        "train_fast.py": "--epochs 5 --batch_size 512 --lr 0.4",
    }),
    "cifar10": (0.94, 3600, {
        BASELINE: _ENDLESS, "train.py": _CIFAR, "train_amp.py": _CIFAR,
        "train_fast.py": "--epochs 16 --short_recipe true --save_every 16epochs --epoch_weights false",
    }),
}  # fmt: skip


@entry
def main() -> None:
    """Run all contestants and print the table. Raises BadInput, also if a job fails."""
    parser = rounds.make_parser(__doc__)
    add = parser.add_argument
    add("--dataset", choices=RECIPES, default="digits", help="default: digits")
    add("--data_url", help="folder with the data set (not for digits)")
    add("--target", type=arguments.positive_float, help="test accuracy (default: of the recipe)")
    add("--seeds", type=arguments.positive_int, default=5, help="runs of each job (default: 5)")
    add("--epochs", type=arguments.positive_int, help="of each job (default: of the recipe)")
    add("--limit", type=arguments.positive_float, help="seconds of training (default: of the recipe)")
    add("--jobs", help=f'for example "{BASELINE},train.py" (default: all of the recipe)')
    add("--keep_compiled", type=arguments.boolean, default=False, help="use the caches of the compiler")
    add("--json", metavar="FILE", help="also write all runs")
    args = parser.parse_args()
    target, limit, recipe = RECIPES[args.dataset]
    target, limit = args.target or target, args.limit or limit
    names = args.jobs.split(",") if args.jobs else list(recipe)
    if target > 1:
        raise BadInput(f"--target {target:g} is not an accuracy: 0.98 is 98 %")
    if unknown := [job for job in names if job not in recipe]:
        raise BadInput(f"--jobs: unknown job {unknown[0]!r}, expected some of {', '.join(recipe)}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    runs: list[dict] = []
    with rounds.conditions():
        for seed in range(args.seeds):
            for job in names:
                options = f"--dataset {args.dataset} {recipe[job]} --seed={seed}"
                if args.epochs:
                    options += f" --epochs {args.epochs}"
                if args.data_url:
                    options += f" --data_url {shlex.quote(os.path.abspath(args.data_url))}"
                begun = run(job, shlex.split(options), target, limit, args.keep_compiled)
                runs.append({"job": job, "seed": seed, "options": options} | begun)
                reached = begun["seconds_to_target"]
                log(f"seed {seed}, {job}: {target:g} in {reached or f'> {limit:g}'} s")
                if args.json:
                    write_atomic(args.json, json.dumps({"target": target, "limit": limit, "runs": runs}))
        print_table(runs, names, target, limit)


def run(job: str, options: list[str], target: float, limit: float, keep_compiled: bool) -> dict:
    """Run a job once and return the curve, and the seconds of compiling and to the target.

    Raises BadInput if the job fails.
    """
    program = ["-m", "tests.benchmarks.seed_loop"] if job == BASELINE else [f"jobs/{job}"]
    with tempfile.TemporaryDirectory(prefix="time_to_accuracy_") as folder:
        output, env = os.path.join(folder, "output"), dict(os.environ)
        if not keep_compiled:
            env |= {f"{name}_CACHE_DIR": f"{folder}/{name}" for name in ("TORCHINDUCTOR", "TRITON")}

        def read() -> dict:
            begun = read_starts(output)
            begin = begun[-1]["time"] if begun else math.nan
            points = [line for line in jobs.read_metrics(output) if "val_acc" in line]
            curve = [(round(line["time"] - begin, 3), line["val_acc"]) for line in points]
            return {
                "begin": begin, "compilation": begun[-1]["laps"].get("compilation", 0.0) if begun else 0.0,
                "seconds_to_target": next((after for after, accuracy in curve if accuracy >= target), None),
                "curve": [point for point in curve if point[0] <= limit],
            }  # fmt: skip

        def is_done() -> bool:
            now = read()
            reached = job == BASELINE and now["seconds_to_target"]
            return bool(reached) or time.time() > now["begin"] + limit

        command = [sys.executable, *program, *options, f"--output_dir={output}"]
        jobs.run(command, is_done, _SETUP + limit, env)
        return read()


def print_table(runs: list[dict], names: list[str], target: float, limit: float) -> None:
    """Print a row for each job: medians over the seeds, and the ratio to the first job's median."""
    print(f"| contestant | reached | s to {target:g} | s of compiling | final accuracy | times the first |")
    print("|---|---|---|---|---|---|")
    first = math.nan
    for job in names:
        own = [each for each in runs if each["job"] == job]
        times = [each["seconds_to_target"] or math.inf for each in own]
        final = [each["curve"][-1][1] for each in own if each["curve"]]
        median = statistics.median(times)
        first = median if math.isnan(first) else first
        shown = rounds.spread(times, ".1f").replace("inf", f"> {limit:g}")
        reached = f"{sum(map(math.isfinite, times))} of {len(times)}"
        compiling = statistics.median(each["compilation"] for each in own)
        cells = [job, reached, shown, f"{compiling:.1f}", rounds.spread(final, ".4f") if final else "-"]
        ratio = f"{first / median:.2f}x" if math.isfinite(first) and math.isfinite(median) else "-"
        print(f"| {' | '.join([*cells, ratio])} |")


if __name__ == "__main__":
    main()

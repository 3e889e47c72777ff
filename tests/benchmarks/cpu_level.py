"""The price of one instruction set for all CPUs: steps of jobs with --cpu_level avx2 and any, and without.

    python -m tests.benchmarks.cpu_level                 train.py, imagenet.py with ResNet-18, train_text.py
    python -m tests.benchmarks.cpu_level --jobs train --rounds 5

The runs of a job take turns. The figure of a run is the median time of its steps, without the first three.
"""

import functools
import json
import statistics
import tempfile
from pathlib import Path

from bootfile.ground.errors import BadInput
from bootfile.machine.levels import LEVELS
from tests.benchmarks.rounds import conditions, make_parser, print_ratios, take_turns
from tests.conftest import environment, finish, read_until, start

STEPS, FIRST = 12, 3  # of a run; those that warm up
JOBS = {
    "train": ("jobs/train.py", "--custom_data=true", "--batch_size=32"),
    "imagenet": (
        "jobs/imagenet.py", "--custom_data=true", "--arch=resnet18", "--image_size=64", "--batch_size=16",
        "--lr=0.01", "--warmup=0", "--training_only",
    ),
    "train_text": ("jobs/train_text.py", "--batch_size=8"),
}  # fmt: skip


def measure(job: str, level: str) -> float:
    """Return the median seconds of a step of a job. level: one of LEVELS."""
    with tempfile.TemporaryDirectory() as folder:
        options = (
            f"--max_steps={STEPS}",
            "--report_every=1",
            f"--cpu_level={level}",
            "--epoch_weights=false",
        )
        env = environment()
        env.pop("OMP_NUM_THREADS", None)
        running = start(*JOBS[job], *options, f"--output_dir={folder}", env=env, fresh=True)
        read_until(running, f" step={STEPS}/")
        running.kill()  # an evaluation would follow
        finish(running, None)
        lines = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
        seconds = [line["compute_time"] for line in lines if "compute_time" in line]
    return statistics.median(seconds[FIRST:])


def main() -> None:
    parser = make_parser(__doc__, 5)
    parser.add_argument("--jobs", default=",".join(JOBS), help="default: %(default)s")
    args = parser.parse_args()
    jobs = args.jobs.split(",")
    if unknown := [job for job in jobs if job not in JOBS]:
        raise BadInput(f"--jobs: {unknown[0]} is not one of {', '.join(JOBS)}")
    with conditions():
        for job in jobs:
            contestants = {level: functools.partial(measure, job, level) for level in LEVELS}
            print_ratios(f"a step of {job}", take_turns(contestants, args.rounds), ".3f", "s")


if __name__ == "__main__":
    main()

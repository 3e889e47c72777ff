"""Measure the images/s of the ImageNet job with every backend, and compare with "Diving into DALI".

    python -m tests.benchmarks.throughput --data_url DIR [--arch ARCH] [--batch_size 512]

Runs `jobs/imagenet.py --prof N` with each backend in turn, several rounds, and prints medians. The article is
"Diving into DALI: how to boost PyTorch data loading": shufflenet_v2_x0_5, 512 images a batch, fp16, 10
workers, on a V100.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys

import torch

from common.compute import models
from common.console import arguments
from common.distributed.entry import entry
from common.ground.exits import BadInput
from common.ground.files import ROOT
from datasets.loaders import backends
from launch.bench import log
from tests.benchmarks import generated
from tests.benchmarks.rounds import describe, make_parser, tail

_JOB = os.path.join(ROOT, "jobs", "imagenet.py")
_TIMEOUT = 1800  # seconds a run
ARTICLE = {"pytorch": 1058, "dali": 1816, "dali-gpu": 3910}  # images/s


@entry
def main() -> None:
    """Measure and print a table. Raises BadInput, also if a job fails."""
    args = _parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = parse_list(args.backends, device)
    args.data_url = args.data_url or generated.image_folder(args.cache_dir)
    rates: dict[str, list[float]] = {name: [] for name in names}
    for number in range(args.rounds):
        for name in names:
            rates[name].append(_rate(args, name))
            log(f"round {number + 1} of {args.rounds}: {name} {rates[name][-1]:.1f} images/s")
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"\n{args.arch}, {args.batch_size} images a batch, {describe()}")
    print(f"{'':<12}{'images/s':>10}{'ratio':>8}{'V100, article':>16}{'ratio':>8}")
    for name in sorted(medians, key=medians.get, reverse=True):
        ratio = f"{medians[name] / medians['pytorch']:.2f}x" if "pytorch" in medians else ""
        theirs = ARTICLE.get(name)
        article = f"{theirs:>16}{theirs / ARTICLE['pytorch']:>7.2f}x" if theirs else ""
        print(f"{name:<12}{medians[name]:>10.1f}{ratio:>8}{article}")


def parse_list(names: str | None, device: torch.device) -> list[str]:
    """Return the backends of a list separated by commas; without a list all that are available."""
    if names:
        return [backends.resolve(name, device) for name in names.split(",")]
    return [name for name, reason in backends.reasons(device).items() if not reason]


def _parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, 5)
    add, count = parser.add_argument, arguments.positive_int
    add("--cache_dir", default="output_dir/index", help="for indexes (default: %(default)s)")
    add("--data_url", metavar="DIR", help="folder with train/<class>/* (default: generated images)")
    add("--arch", type=models.arch, default="shufflenet_v2_x0_5", help="default: shufflenet_v2_x0_5")
    add("--batch_size", type=count, default=512, help="default: 512")
    add("--backends", help="names, separated by commas (default: all that are available)")
    add("--prof", type=count, default=30, metavar="N", help="batches of a run (default: 30)")
    add("job", nargs="*", help="after --: arguments of the job, for example --workers 10 --image_size 128")
    return parser.parse_args()


def _rate(args: argparse.Namespace, backend: str) -> float:
    command = [
        sys.executable, _JOB, "--data_url", args.data_url, "--data_backend", backend, "--arch", args.arch,
        "--batch_size", str(args.batch_size), "--prof", str(args.prof), "--cache_dir", args.cache_dir,
        "--compile", "false", *args.job,
    ]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    match = re.search(r"prof: ([\d.]+) images/s", result.stdout)
    if result.returncode or not match:
        raise BadInput(f"{backend} failed: {tail(result.stderr)}")
    return float(match[1])


if __name__ == "__main__":
    main()

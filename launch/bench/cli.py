"""What is fast on this machine, with these data, before GPUs are rented for it.

python -m launch bench loaders --data_url DIR       images/s of every loader, and what a job would wait
python -m launch bench throughput --data_url DIR    images/s of the ImageNet job, beside the DALI article's
python -m launch bench batch-size --arch resnet18   the largest batch that fits on this GPU, beside those
python -m launch bench train                        images/s of the jobs, beside the published loop
python -m launch bench ray --ray_address start      whether workers on other machines would pay
"""

import importlib
import sys

from common.exits import BAD_INPUT

BENCHMARKS = {
    "loaders": "loaders",
    "throughput": "throughput",
    "batch-size": "batch_size",
    "train": "train.cli",
    "ray": "ray",
}


def main(arguments: list[str]) -> int:
    """Run the benchmark that is named and return its exit code."""
    name, *rest = arguments or [None]
    if name in ("-h", "--help"):
        print(__doc__)
        return 0
    if name is None:
        print(f"error: which benchmark? expected one of {', '.join(BENCHMARKS)}", file=sys.stderr)
        return BAD_INPUT
    if name not in BENCHMARKS:
        print(f"error: {name!r} is no benchmark: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return BAD_INPUT
    return importlib.import_module(f"launch.bench.{BENCHMARKS[name]}").main(rest)

"""Measure loaders, jobs and batch sizes on this machine, before you rent GPUs.

python -m launch bench loaders --data_url DIR       images/s of every loader, and the predicted wait of a job
python -m launch bench throughput --data_url DIR    images/s of imagenet.py, next to "Diving into DALI"
python -m launch bench batch-size --arch resnet18   the largest batch that fits on this GPU
python -m launch bench train                        images/s of the jobs and of the ModelArts sample's loop
python -m launch bench ray --ray_address start      whether workers on other machines would help
"""

import importlib

from common.exits import BadInput

BENCHMARKS = {
    "loaders": "loaders",
    "throughput": "throughput",
    "batch-size": "batch_size",
    "train": "train.cli",
    "ray": "ray",
}


def main(arguments: list[str]) -> int:
    """Run the named benchmark and return its exit code."""
    name, *rest = arguments or [""]
    if name in ("-h", "--help"):
        print(__doc__)
        return 0
    if name not in BENCHMARKS:
        wrong = f"unknown benchmark {name!r}" if name else "no benchmark is named"
        raise BadInput(f"{wrong}: expected one of {', '.join(BENCHMARKS)}")
    return importlib.import_module(f"launch.bench.{BENCHMARKS[name]}").main(rest)

"""What is fast on this machine, with these data, before GPUs are rented for it.

python -m launch bench loaders --data_url DIR    images/s of every loader, and what a job would wait
"""

import importlib
import sys

from common.exits import BAD_INPUT

BENCHMARKS = {"loaders": "bench_loaders"}


def main(arguments: list[str]) -> int:
    """Run the benchmark that is named and return its exit code."""
    name, *rest = arguments or [None]
    if name in ("-h", "--help"):
        print(__doc__)
        return 0
    if name not in BENCHMARKS:
        print(f"error: {name!r} is no benchmark: {', '.join(BENCHMARKS)}", file=sys.stderr)
        return BAD_INPUT
    return importlib.import_module(f"launch.{BENCHMARKS[name]}").main(rest)

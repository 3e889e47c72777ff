"""Measure the cost of the ids of a step: computed (datasets/sampling/sampler.py), and stored (numpy).

    python -m tests.benchmarks.order

The table has the medians of 7 interleaved rounds. "random access" is one batch at an unrelated step;
"iterating" is the same batch within an epoch that is read in order; "stored" is the time and memory to make
the permutation before the first batch of an epoch.
"""

import statistics
import time

import numpy as np

from datasets.sampling.sampler import BatchSampler
from tests.benchmarks.rounds import conditions

BATCH = 128
ROUNDS = 7


def milliseconds(function, *arguments) -> float:
    start = time.perf_counter()
    function(*arguments)
    return 1000 * (time.perf_counter() - start)


def main():
    with conditions():
        measure()


def measure():
    print(f"batch {BATCH}, milliseconds, median of {ROUNDS} rounds\n")
    print(f"{'samples':>14}{'random access':>16}{'iterating':>12}{'stored, time':>16}{'stored, memory':>18}")
    for size in (10**3, 10**5, 10**7, 10**9):
        order = BatchSampler(size, BATCH, seed=0)
        random, iterating, stored = [], [], []
        count = min(320, len(order))
        for number, step in enumerate(np.random.default_rng(0).integers(0, len(order), ROUNDS)):
            order.seek(number * len(order))
            random.append(milliseconds(order.batch, int(step)))
            order.seek(number * len(order) + len(order) - count)
            iterating.append(milliseconds(list, order) / count)
            if size <= 10**7:
                stored.append(milliseconds(np.random.default_rng(number).permutation, size))
        time_text = f"{statistics.median(stored):.3f}" if stored else "not run"
        row = f"{size:>14,}{statistics.median(random):>16.3f}{statistics.median(iterating):>12.3f}"
        print(f"{row}{time_text:>16}{8 * size / 2**20:>14,.1f} MB")


if __name__ == "__main__":
    main()

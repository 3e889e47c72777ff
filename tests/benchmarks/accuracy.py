"""How well and how fast the jobs learn: n seeds, median and spread, as a row of the README's table.

python -m tests.benchmarks.accuracy                               digits on the CPU, 5 seeds
python -m tests.benchmarks.accuracy --gpu --data_url FOLDER       Fashion-MNIST and CIFAR-10 on a GPU, 3 seeds
python -m tests.benchmarks.accuracy --only cifar10 --seeds 1 --epochs 5 --data_url FOLDER    one row by itself
"""

import argparse
import datetime
import os
import re
import statistics
import subprocess
import sys
import tempfile

from tests.benchmarks.machine import describe

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

CPU = [("train.py", "digits", 12), ("train_amp.py", "digits", 12)]
GPU = [("train_amp.py", "fashion_mnist", 5), ("train_amp.py", "cifar10", 30), ("train.py", "cifar10", 30)]


def measure(job: str, dataset: str, epochs: int, seed: int, data_url: str | None) -> tuple[float, float]:
    """(test accuracy, seconds of training) of one run."""
    with tempfile.TemporaryDirectory() as output:
        command = [
            sys.executable,
            f"jobs/{job}",
            f"--dataset={dataset}",
            f"--epochs={epochs}",
            f"--seed={seed}",
        ]
        command += [f"--output_dir={output}"] + ([f"--data_url={data_url}"] if data_url else [])
        result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if result.returncode:
            sys.exit(f"exit code {result.returncode}: {' '.join(command)}")
    found = re.search(r"test_accuracy=(\S+) training_seconds=(\S+)", result.stdout)
    return float(found[1]), float(found[2])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", action="store_true", help="the rows that need a GPU")
    parser.add_argument("--seeds", type=int, help="runs a row (default: 5, with --gpu 3)")
    parser.add_argument("--only", choices=["digits", "fashion_mnist", "cifar10"], help="only this data set")
    parser.add_argument("--epochs", type=int, help="instead of the row's own")
    parser.add_argument("--data_url", help="folder that holds the data sets (digits need none)")
    options = parser.parse_args()
    rows = GPU if options.gpu or options.only not in (None, "digits") else CPU
    rows = [row for row in rows if options.only in (None, row[1])]
    seeds = range(options.seeds or (3 if options.gpu else 5))
    print(f"{datetime.date.today()}, {describe()}\n", flush=True)
    print("| job | data | epochs | n | median accuracy | spread | seconds of training |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for job, dataset, epochs in rows:
        epochs = options.epochs or epochs
        results = [measure(job, dataset, epochs, seed, options.data_url) for seed in seeds]
        accuracies, seconds = zip(*results, strict=True)
        spread = f"{min(accuracies):.4f}-{max(accuracies):.4f}"
        row = [job, dataset, epochs, len(seeds), f"{statistics.median(accuracies):.4f}", spread]
        print(f"| {' | '.join(map(str, row))} | {statistics.median(seconds):.1f} |", flush=True)
    print(f"\nload average at the end {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()

"""Measure what common/performance/cpu.py gains: images/s with it over images/s without it, in turns.

python -m tests.benchmarks.allocator [--job train_amp.py] [--rounds 5]
"""

import argparse
import datetime
import os
import statistics
import subprocess
import sys
import tempfile

from tests.benchmarks.machine import describe
from tests.conftest import ROOT, records

STEPS, REPORT = 12, 4  # the first report contains the warm-up and does not count


def images_per_s(job: str, keep: str) -> float:
    with tempfile.TemporaryDirectory() as output:
        subprocess.run(
            [
                sys.executable, f"jobs/{job}", "--custom_data=true", f"--max_steps={STEPS}",
                f"--report_every={REPORT}", f"--output_dir={output}",
            ],
            cwd=ROOT, env=os.environ | {"BOOTFILE_KEEP_MEMORY": keep}, stdout=subprocess.DEVNULL, check=True,
        )  # fmt: skip
        reports = [line["images_per_s"] for line in records(output) if "images_per_s" in line]
    return statistics.harmonic_mean(reports[1:])


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--job", default="train_amp.py", help="default: train_amp.py")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    options = parser.parse_args()
    print(f"{datetime.date.today()}, {describe()}")
    ratios = []
    for _ in range(options.rounds):
        without, with_it = images_per_s(options.job, "0"), images_per_s(options.job, "1")
        ratios.append(with_it / without)
        print(f"{options.job}: {without:.1f} -> {with_it:.1f} images/s, {ratios[-1]:.2f}x", flush=True)
    print(f"median {statistics.median(ratios):.2f}x, n={len(ratios)} ({min(ratios):.2f}-{max(ratios):.2f})")
    print(f"load average at the end {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()

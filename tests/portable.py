"""Run tests as on other machines: other instruction sets, other threads, and a machine that is busy.

    python -m tests.portable            each variant with the tests that start no process, and some jobs
    python -m tests.portable --small    one variant with the tests of the mark rounding, for .ci/run

A test that decides by the rounding of one kind of CPU, or by a limit in seconds, fails here.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import NamedTuple

from tests.conftest import ROOT

LIMIT = 900  # seconds of a test: it hangs
LOAD = 8  # processes that are busy
# An old CPU: ATen without vector instructions, oneDNN without AVX-512, where torch has a fault.
OLD_CPU = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "AVX2"}
MARKS = "not gpu and not thorough and not real"
QUICK = ("--quick", "tests")
# Jobs whose results were once decided by rounding, by an instruction set or by threads.
JOBS = (
    "tests/jobs/test_other_devices.py", "tests/jobs/test_sample_losses.py", "tests/jobs/test_resume.py",
    "tests/jobs/test_train_own.py", "tests/jobs/test_train_text.py",
)  # fmt: skip


class Variant(NamedTuple):
    """A way to run tests. files: words for pytest. load: processes that are busy meanwhile. marks: which of
    their tests run."""

    name: str
    variables: dict[str, str]
    files: tuple[str, ...]
    load: int = 0
    marks: str = MARKS


VARIANTS = (
    Variant("old CPU, one thread", OLD_CPU | {"OMP_NUM_THREADS": "1"}, QUICK),
    Variant("four threads", {"OMP_NUM_THREADS": "4"}, QUICK),
    Variant("busy machine", {"OMP_NUM_THREADS": "1"}, QUICK, LOAD),
    Variant("old CPU, jobs", OLD_CPU | {"OMP_NUM_THREADS": "1"}, JOBS),
)


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep `count` processes busy during the block."""
    code = "while True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(variant: Variant, workers: int) -> int:
    """Run the tests of a variant, and return pytest's exit code."""
    print(f"{variant.name}: {variant.variables or 'the usual variables'}", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), "--dist", "loadfile"]
    command += [f"--timeout={LIMIT}", "-m", variant.marks]
    with busy(variant.load):
        job = subprocess.run([*command, *variant.files], cwd=ROOT, env=os.environ | variant.variables)
    return job.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--small", action="store_true", help="one variant, with the mark rounding")
    parser.add_argument("--workers", type=int, default=2, help="processes of pytest (default: %(default)s)")
    args = parser.parse_args()
    variants = VARIANTS
    if args.small:
        variants = (VARIANTS[0]._replace(files=("tests",), marks=f"rounding and {MARKS}"),)
    results = []
    for variant in variants:
        begin = time.monotonic()
        code = run(variant, args.workers)
        results.append((variant.name, code, time.monotonic() - begin))
    for name, code, seconds in results:
        print(f"{name}: {'passed' if code == 0 else f'failed with {code}'} in {seconds:.0f} s")
    sys.exit(max(code for _, code, _ in results))


if __name__ == "__main__":
    main()

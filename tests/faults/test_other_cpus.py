"""A run that moves between kinds of CPUs, which qemu's user mode emulates: real kernels, another CPUID.

Debian's package is qemu-user. An emulated start takes 45 s.
"""

import platform
import shutil
import sys
from pathlib import Path

import pytest

from bootfile.machine import processor
from bootfile.receipt.compare import compare_states
from tests.conftest import LONGEST, environment, run
from tests.support.exact import facts

QEMU = shutil.which("qemu-x86_64")
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(QEMU is None, reason="qemu-x86_64 is not installed: apt-get install qemu-user"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the levels are those of x86-64"),
]
JOB = (
    "--dataset=digits", "--width=4", "--batch_size=16", "--report_every=1", "--save_every=1", "--keep=9",
    "--epoch_weights=false",
)  # fmt: skip
EXACT = ("jobs/train_exact.py", *JOB, "--exact_shards=2")
STEPS = 3


def start(output: Path, *command: str, cpu: str = "", code: int = 0):
    words = [*command, f"--output_dir={output}"]
    if not cpu:
        return run(*words, env=environment(), code=code, fresh=True)
    # the emulator is the program, and Python its first argument
    script = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"
    emulated = ("-c", script, QEMU, "-cpu", cpu, sys.executable, *words)
    return run(*emulated, env=environment(), code=code, fresh=True, timeout=3 * LONGEST)


def move(output: Path, cpus: list[str], *options: str) -> None:
    """Train on each of these CPUs in turns, from checkpoint to checkpoint; "" is this CPU. Of each start one
    step counts: the steps after it are deleted, and the next CPU computes them again."""
    for step, cpu in enumerate(cpus, 1):
        start(output, *EXACT, *options, f"--max_steps={STEPS}", cpu=cpu)
        cut(output, step)


def cut(output: Path, step: int) -> None:
    """Delete the checkpoints after a step, as if the run had been killed there."""
    for path in (output / "checkpoints").iterdir():
        if int(path.name.split("_")[1].split(".")[0]) > step:
            path.unlink()


@pytest.mark.parametrize(
    "level, cpus", [("avx2", ["", "Haswell", "EPYC-Rome"]), ("any", ["Nehalem", "", "Haswell"])]
)
def test_a_run_that_moves_between_cpus_has_the_same_bits(level, cpus, tmp_path):
    if level == "avx2" and processor.widest() not in ("AVX2", "AVX512"):
        pytest.skip("this CPU has no AVX2")
    option = f"--cpu_level={level}"
    start(tmp_path / "whole", *EXACT, option, f"--max_steps={STEPS}")
    move(tmp_path / "moved", cpus, option)
    assert facts(tmp_path / "moved") == facts(tmp_path / "whole")


def test_without_a_level_an_exact_run_names_the_difference_and_ends(tmp_path):
    output = tmp_path / "run"
    start(output, *EXACT, f"--max_steps={STEPS}")
    cut(output, 1)
    errors = start(output, *EXACT, f"--max_steps={STEPS}", cpu="Nehalem", code=2).stderr
    [line] = [line for line in errors.splitlines() if not line.startswith("qemu-x86_64: ")]
    assert "/step_1.pt: this run computed with ATen " in line and "ATen DEFAULT: the bits would" in line
    assert "--cpu_level avx2 or any" in line


def test_without_a_level_another_vendor_is_named(tmp_path):
    """The instructions of ATen may be equal: MKL asks for the vendor of the CPU."""
    other = "EPYC-Rome" if processor.vendor() == "Intel" else "Haswell"
    output, moved = tmp_path / "run", tmp_path / "moved"
    job = ("jobs/train.py", *JOB, "--max_steps=2")
    start(output, *job)
    shutil.copytree(output, moved)
    cut(moved, 1)
    lines = start(moved, *job, cpu=other).stdout.splitlines()
    [warning] = [line for line in lines if line.startswith("warning: this run computed with ")]
    place = lines.index(warning)
    assert place < next(number for number, line in enumerate(lines) if " step=2/" in line)
    equal, text = compare_states(str(output), str(moved))
    assert equal or "computed with " in text

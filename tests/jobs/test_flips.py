"""A bit of a job is flipped, as by an error of the hardware, and an audit finds the step."""

import re

import pytest

from tests.benchmarks import flips
from tests.conftest import QUICK, run
from tests.support.exact import changed
from tests.support.flipping import LINES
from tests.support.proofs import audit

WORDS = (*QUICK, "--batch_size=128", "--max_steps=4", "--save_every=1", "--keep_every=2", "--keep=1")


@pytest.mark.thorough
@pytest.mark.parametrize("tensor", ["weights.conv1.0.weight", "gradients", "optimizer", "batch"])
def test_an_audit_finds_the_step_of_a_flip(tensor, tmp_path, monkeypatch):
    job = changed("train.py", tmp_path / "job.py", (flips.ENTRY, flips.ENTRY + LINES))
    output = tmp_path / "run"
    monkeypatch.setenv("BOOTFILE_FLIP", f"{tmp_path}:0,3,{tensor},20")  # the mantissa has it: all is finite
    shown = run(job, *WORDS, f"--output_dir={output}").stdout
    monkeypatch.delenv("BOOTFILE_FLIP")
    kind = tensor.partition(".")[0]
    assert re.search(rf"flip: rank 0, step 3: bit 20 of element 0 of {kind} \S+: \S+ -> \S+$", shown, re.M)
    audited = audit(output, "--share=all", code=20)
    assert "steps 1-2: equal" in audited and re.search("state after step 3 .*another", audited)
    assert re.search(r"same difference twice\b.*hardware of the run", audited)


@pytest.mark.thorough
def test_the_proof_on_a_few_runs():
    printed = run("-m", "tests.benchmarks.flips", "--runs=8", "--clean=3").stdout
    [row] = re.findall(r"^all +(\d+) +(\d+) +(\d+) +(\d+) +(\d+)", printed, re.M)
    runs, _, different, found, right = map(int, row)
    assert runs == 8 and different == found == right >= 4
    assert "alarms: 0 of" in printed and ", 0 of 3 without" in printed
    assert flips.KINDS == ("weights", "gradients", "optimizer", "batch")


@pytest.mark.thorough
def test_the_proof_on_exact_jobs_of_two_processes():
    printed = run("-m", "tests.benchmarks.flips", "--exact", "--runs=4", "--clean=2").stdout
    [row] = re.findall(r"^all +(\d+) +(\d+) +(\d+) +(\d+) +(\d+)", printed, re.M)
    _, ended, different, found, right = map(int, row)
    assert ended == 2  # other weights on one process: the run has found them itself
    assert different == found == right >= 1
    assert ", 0 of 2 without" in printed

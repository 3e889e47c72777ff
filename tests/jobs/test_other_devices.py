"""Jobs on a device that is not CUDA: real processes, on the device of support/python_device.py."""

import json
import shutil
import textwrap

import pytest

from tests.conftest import ROOT, run, run_ranks
from tests.support import python_device

pytestmark = pytest.mark.skipif(python_device.setup is None, reason="this torch has no devices in Python")

# The device of a rank is the only one that it sees.
ON_DEVICE = textwrap.dedent(f"""
    import os, runpy, sys
    sys.path.insert(0, {str(ROOT)!r})
    from tests.support import python_device
    python_device.register("GPU-" + os.environ.get("LOCAL_RANK", "0"))
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
""")
SMALL = ("--custom_data=true", "--width=2", "--batch_size=16", "--max_steps=4", "--save_every=2", "--keep=2")


def _train(job, folder):
    options = (*SMALL, "--report_every=2", "--sample_losses=true", f"--output_dir={folder}")
    command = ("-c", ON_DEVICE, f"jobs/{job}.py", *options)
    return run_ranks(*command)[0].stdout if job == "train_ddp" else run(*command).stdout


def _read(folder, name, key):
    lines = map(json.loads, (folder / name).read_text().splitlines())
    return [(line["step"], line[key]) for line in lines if key in line]


@pytest.mark.thorough
@pytest.mark.parametrize("job", ["train", "train_amp", "train_ddp"])
def test_a_job_trains_and_resumes_bit_by_bit_on_another_device(job, tmp_path):
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    printed = _train(job, whole)
    assert (
        f"device {python_device.NAME}, precision {'bfloat16' if job == 'train_amp' else 'float32'}" in printed
    )
    shutil.copytree(whole, rest, ignore=shutil.ignore_patterns("step_4.*"))
    printed = _train(job, rest)
    assert "resumed" in printed
    for name, key in (("state.jsonl", "digest"), ("metrics.jsonl", "val_loss"), ("metrics.jsonl", "receipt")):
        values = _read(whole, name, key)
        assert values and values[-1][0] == 4 and values == _read(rest, name, key)


KEEPS = """
import gc, torch
from tests.support import python_device
python_device.register("GPU-0")
kept = []
for number in range(500):
    tensor = torch.full((64, 64), float(number)).to(python_device.NAME)
    kept.append((number, tensor[3:5], tensor.t().reshape(-1)[:7]))
    del tensor
    torch.empty(64, 64).fill_(-1.0)  # takes memory that was freed
gc.collect()
for number, *views in kept:
    assert all(bool((view.cpu() == number).all()) for view in views), number
print("kept")
"""


def test_a_tensor_of_the_device_keeps_its_memory():
    """It is an attribute of the Python object of its storage, which lives as long as the storage."""
    assert run("-c", KEEPS).stdout == "kept\n"


@pytest.mark.thorough
def test_the_figures_are_those_of_the_cpu(tmp_path):
    _train("train", tmp_path / "device")
    run("jobs/train.py", *SMALL, "--report_every=2", f"--output_dir={tmp_path / 'cpu'}")
    for key in ("loss", "val_loss", "acc"):
        (*_, one), (*_, other) = (_read(tmp_path / name, "metrics.jsonl", key) for name in ("device", "cpu"))
        assert one == pytest.approx(other, rel=1e-5)

"""The jobs on a GPU, against the same jobs on the CPU. `make gpu` runs them."""

import os

import pytest
import torch

from tests.conftest import environment, records, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: torch sees none"),
]

SMALL = ("--dataset=digits", "--max_steps=3", "--batch_size=64", "--report_every=1", "--lr=0.02")


def _losses(output_dir, job, *arguments, gpu=True):
    env = environment()
    del env["CUDA_VISIBLE_DEVICES"]
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        env["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
    enable = f"--enable_gpu={str(gpu).lower()}"
    run(f"jobs/{job}", *SMALL, enable, *arguments, "--output_dir", output_dir, env=env, timeout=300)
    return [record["loss"] for record in records(output_dir) if "loss" in record]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return _losses(tmp_path_factory.mktemp("cpu"), "train.py", gpu=False)


@pytest.mark.parametrize(
    "job, tolerance", [("train.py", 1e-3), ("train_ddp.py", 1e-3), ("train_amp.py", 2e-2)]
)
def test_first_loss_is_that_of_the_cpu(job, tolerance, on_cpu, tmp_path):
    losses = _losses(tmp_path, job)
    assert losses[0] == pytest.approx(on_cpu[0], rel=tolerance) and len(losses) == 3
    weights = torch.load(tmp_path / "epoch_1.pth", weights_only=True)
    assert {tensor.device.type for tensor in weights.values()} == {"cpu"}


def test_data_parallel_runs(tmp_path):
    assert len(_losses(tmp_path, "train_dp.py")) == 3


def test_two_processes_share_a_gpu_over_gloo(on_cpu, tmp_path):
    processes = 2 * torch.cuda.device_count()
    losses = _losses(tmp_path, "train_ddp.py", f"--processes_per_node={processes}")
    assert losses[0] == pytest.approx(on_cpu[0], rel=1e-3)

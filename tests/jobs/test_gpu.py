"""The jobs give the same results on a GPU as on the CPU. `make gpu` runs these tests."""

import os
import signal

import pytest
import torch

from bootfile.receipt import receipt
from tests.conftest import environment, finish, losses, read_until, run, start

pytestmark = pytest.mark.gpu

SMALL = ("--dataset=digits", "--max_steps=3", "--batch_size=64", "--report_every=1", "--lr=0.02")


EFFECTS = ("--mixup=0.2", "--color_jitter=0.4", "--random_erasing=0.5")


def _environment():
    env = environment()
    env.pop("CUDA_VISIBLE_DEVICES", None)
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        env["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
    return env


def _enable(gpu=True):
    return f"--enable_gpu={str(gpu).lower()}"


def _losses(output_dir, job, *arguments, **device):
    command = (f"jobs/{job}", *SMALL, _enable(**device), *arguments, "--output_dir", output_dir)
    run(*command, env=_environment(), timeout=300)
    return losses(output_dir)


def _receipt(output_dir):
    return (output_dir / receipt.FILE).read_bytes()


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    """Return (losses, receipt) of train.py on the CPU."""
    output = tmp_path_factory.mktemp("cpu")
    return _losses(output, "train.py", gpu=False), _receipt(output)


@pytest.mark.parametrize(
    "job, tolerance", [("train.py", 1e-3), ("train_ddp.py", 1e-3), ("train_amp.py", 2e-2)]
)
def test_data_and_first_loss_are_those_of_the_cpu(job, tolerance, on_cpu, tmp_path):
    reported = _losses(tmp_path, job)
    assert reported[0] == pytest.approx(on_cpu[0][0], rel=tolerance) and len(reported) == 3
    assert _receipt(tmp_path) == on_cpu[1]
    weights = torch.load(tmp_path / "epoch_1.pth", weights_only=True)
    assert {tensor.device.type for tensor in weights.values()} == {"cpu"}


def test_data_parallel_runs(tmp_path):
    assert len(_losses(tmp_path, "train_dp.py")) == 3


def test_two_processes_share_a_gpu_over_gloo(on_cpu, tmp_path):
    processes = 2 * torch.cuda.device_count()
    reported = _losses(tmp_path, "train_ddp.py", f"--processes_per_node={processes}")
    assert reported[0] == pytest.approx(on_cpu[0][0], rel=1e-3)


@pytest.mark.parametrize("job", ["train.py", "train_amp.py", "train_fast.py"])
def test_a_restart(job, tmp_path):
    """Losses need not be equal bit for bit on a GPU. train_fast.py records its CUDA graphs again."""
    command = (
        f"jobs/{job}", _enable(), "--dataset=digits", "--epochs=3", "--batch_size=240", "--lr=0.005",
        "--report_every=1", "--save_every=2",
    )  # fmt: skip
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run(*command, f"--output_dir={whole}", env=_environment(), timeout=300)
    stopped = start(*command, f"--output_dir={cut}", env=_environment())
    assert "not compiled" not in "".join(read_until(stopped, r"^epoch=2 step=6/"))
    os.kill(stopped.pid, signal.SIGTERM)
    finish(stopped, 143, timeout=300)
    assert "resumed from " in run(*command, f"--output_dir={cut}", env=_environment(), timeout=300).stdout
    assert _receipt(cut) == _receipt(whole)
    assert len(losses(whole)) == 15
    assert losses(cut) == pytest.approx(losses(whole), abs=0.1)


@pytest.mark.parametrize("options", [("--amp=false",), ("--accumulate=2", "--ema=0.9", "--compile=true")])
def test_imagenet(options, tmp_path):
    """The data and the first loss are those of the CPU."""
    found = []
    for name, device in {"cpu": {"gpu": False}, "gpu": {}}.items():
        output = tmp_path / name
        shared = options if device == {} else [each for each in options if "compile" not in each]
        run(
            "jobs/imagenet.py", _enable(**device), "--custom_data=true", f"--cache_dir={tmp_path / 'cache'}",
            "--arch=resnet18", "--image_size=64", "--batch_size=32", "--max_steps=3", "--report_every=1",
            "--lr=0.01", "--warmup=0", "--data_backend=threads", "--workers=2", *EFFECTS, *shared,
            f"--output_dir={output}", env=_environment(), timeout=300,
        )  # fmt: skip
        found.append(losses(output))
    assert _receipt(tmp_path / "cpu") == _receipt(tmp_path / "gpu")
    assert len(found[1]) == 3 and found[1][0] == pytest.approx(found[0][0], rel=2e-2)

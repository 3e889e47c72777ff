"""Jobs whose data are prepared on a Ray cluster of their own: the receipt is that of those without one."""

import getpass
import os
import re
import shutil
import signal
import tempfile

import psutil
import pytest

from tests.conftest import environment, finish, records, run, start
from tests.ray_nodes import RayNodes, wait_until

pytest.importorskip("ray", reason='Ray is not installed: pip install "ray>=2.52"')

COMMAND = ("jobs/train_ray.py", "--distribute_mode=true", "--workers=1")
DIGITS = ("--dataset=digits", "--batch_size=32", "--max_steps=4", "--report_every=2")
RAY = ("--distribute_mode=true", "--ray_address=start", "--workers=1")


def receipts(output_dir) -> list:
    return [record["receipt"] for record in records(output_dir) if "receipt" in record]


def of_ray(folder) -> list[psutil.Process]:
    """Processes that the job left behind: its temporary folder is in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(folder):
                found.append(process)
        except psutil.Error:
            pass
    return found


@pytest.fixture
def own(tmp_path_factory):
    """An environment whose temporary folder is the test's; short, as sockets lie in it."""
    folder = tempfile.mkdtemp(prefix="tr-")
    yield environment(TMPDIR=folder)
    wait_until(lambda: not of_ray(folder))
    assert set(os.listdir(folder)) <= {"torchinductor_" + getpass.getuser()}  # torch leaves that everywhere
    shutil.rmtree(folder)


def test_the_receipt_of_train_py_from_a_cluster_of_its_own(tmp_path, own):
    run("jobs/train.py", *DIGITS, "--output_dir", tmp_path / "plain", timeout=120)
    result = run("jobs/train_ray.py", *DIGITS, *RAY, "--output_dir", tmp_path / "ray", env=own, timeout=200)
    assert re.search(r"^ray: a cluster of this job at 127\.0\.0\.1:\d+$", result.stdout, re.MULTILINE)
    assert receipts(tmp_path / "ray") == receipts(tmp_path / "plain") != []
    losses = [[record["loss"] for record in records(tmp_path / name) if "loss" in record] for name in
              ("ray", "plain")]  # fmt: skip
    assert losses[0] == losses[1]


def test_a_killed_job_takes_its_cluster_along(tmp_path, own):
    job = start(
        "jobs/train_ray.py", "--dataset=digits", "--epochs=50", *RAY, "--output_dir", tmp_path, env=own
    )
    try:
        assert any("ray: a cluster" in line for line in iter(job.stdout.readline, ""))
        wait_until(lambda: len(of_ray(own["TMPDIR"])) > 3)
    finally:
        job.send_signal(signal.SIGKILL)
        finish(job, code=-signal.SIGKILL)


@pytest.mark.faults
@pytest.mark.faults
def test_imagenet_on_two_ranks_that_share_a_cluster(tmp_path, own):
    common = ("jobs/imagenet.py", "--custom_data=true", "--arch=resnet18", "--image_size=32", "--workers=1",
              "--batch_size=32", "--max_steps=2", "--print_freq=1", "--lr=0.01", "--warmup=0")  # fmt: skip
    run(*common, "--data_backend=threads", "--output_dir", tmp_path / "threads", timeout=200)
    result = run(
        *common, "--data_backend=ray", "--ray_address=start", "--processes_per_node=2", "--output_dir",
        tmp_path / "ray", env=own, timeout=300,
    )  # fmt: skip
    assert receipts(tmp_path / "ray") == receipts(tmp_path / "threads") != [], result.stdout


def test_a_bad_address(tmp_path):
    command = (
        "jobs/train_ray.py",
        *DIGITS,
        "--distribute_mode=true",
        "--workers=1",
        "--output_dir",
        tmp_path,
    )
    said = run(*command, "--ray_address=nowhere", code=2).stderr
    assert said == "error: --ray_address nowhere is not auto, start or HOST:PORT\n"


@pytest.mark.faults
def test_a_wrong_token(tmp_path):
    command = (
        "jobs/train_ray.py",
        *DIGITS,
        "--distribute_mode=true",
        "--workers=1",
        "--output_dir",
        tmp_path,
    )
    nodes = RayNodes(1)
    try:
        other = environment(**nodes.environment | {"RAY_AUTH_TOKEN": "w" * 32})
        said = run(*command, env=other, code=2, timeout=120).stderr
        assert "no Ray cluster at" in said and "Traceback" not in said
    finally:
        nodes.close()

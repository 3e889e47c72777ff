"""Jobs whose data come from Ray have the receipts of jobs without it, and end cleanly if Ray fails."""

import os
import shutil
import signal
import tempfile

import pytest

from common.ground.endings import LOST_CONTACT
from tests.conftest import QUICK, environment, finish, losses, records, refused, run, start, wait_until
from tests.support.ray_nodes import RayNodes, processes

pytest.importorskip("ray", reason='Ray is not installed: pip install "ray>=2.52"')

JOB = ("jobs/train_ray.py", *QUICK, "--distribute_mode=true")
RAY_STARTS = 900  # seconds; the job itself waits 600 s for its workers


def receipts(output_dir) -> list:
    return [record["receipt"] for record in records(output_dir) if "receipt" in record]


@pytest.fixture
def alone():
    """Yield an environment without a cluster, and wait until the job's Ray has ended."""
    folder = tempfile.mkdtemp(prefix="tr-")
    kept = {name: value for name, value in environment().items() if not name.startswith("RAY_")}
    yield kept | {"RAY_TMPDIR": folder}
    wait_until(lambda: not processes(folder))
    shutil.rmtree(folder)


@pytest.fixture
def cluster():
    nodes = RayNodes(2)
    yield nodes
    nodes.close()


def test_the_data_and_losses_are_those_of_train(tmp_path, alone):
    options = ("--batch_size=32", "--max_steps=4", "--report_every=1")
    run("jobs/train.py", *QUICK, *options, "--output_dir", tmp_path / "train")
    run(*JOB, "--workers=1", *options, "--output_dir", tmp_path / "ray", env=alone, timeout=RAY_STARTS)
    assert receipts(tmp_path / "ray") == receipts(tmp_path / "train") != []
    assert losses(tmp_path / "ray") == losses(tmp_path / "train")


@pytest.mark.thorough  # Ray's agents need a minute to end
def test_a_killed_job_takes_its_ray_along(tmp_path, alone):
    job = start(*JOB, "--workers=1", "--epochs=500", "--output_dir", tmp_path, env=alone)
    try:
        wait_until(lambda: processes(alone["RAY_TMPDIR"], "ray::Worker"), timeout=RAY_STARTS)
    finally:
        job.send_signal(signal.SIGKILL)
        finish(job, code=-signal.SIGKILL)


@pytest.mark.thorough
def test_a_lost_head_ends_the_job_which_resumes_exactly(tmp_path, alone, cluster):
    """A worker is killed first, which changes nothing. It resumes with Ray on this machine, and has the data
    and the losses of train.py."""
    options = ("--batch_size=32", "--max_steps=300", "--report_every=5", "--save_every=5")
    run("jobs/train.py", *QUICK, *options, "--output_dir", tmp_path / "whole")
    options = ("--workers=1", *options)
    folder = tmp_path / "ray"
    cluster_options = ("--ray_address", cluster.address, "--output_dir", folder)
    del cluster.environment["RAY_ADDRESS"]
    env = environment(**cluster.environment)
    job = start(*JOB, *options, *cluster_options, env=env)
    try:
        wait_until(lambda: (folder / "metrics.jsonl").exists() and losses(folder), timeout=RAY_STARTS)
        (worker,) = cluster.workers()
        job.send_signal(signal.SIGSTOP)  # it does not end before the kills
        worker.kill()
        wait_until(lambda: [each for each in cluster.workers() if each != worker])
        seen = len(losses(folder))
        job.send_signal(signal.SIGCONT)
        wait_until(lambda: len(losses(folder)) > seen + 1)
        job.send_signal(signal.SIGSTOP)
        cluster.kill_head()
        job.send_signal(signal.SIGCONT)
        errors = finish(job, code=LOST_CONTACT).stderr
    finally:
        job.kill()
        job.wait()
    assert sum(line.startswith("error: ") for line in errors.splitlines()) == 1 and "Ray cluster" in errors
    run(*JOB, *options, "--output_dir", folder, env=alone, timeout=300)
    assert receipts(folder)[-1] == receipts(tmp_path / "whole")[-1]
    assert losses(folder)[-1] == losses(tmp_path / "whole")[-1]


def test_a_cluster_that_does_not_answer(tmp_path):
    for options, env, names in (
        (["--ray_address=127.0.0.1:9"], environment(), ("no Ray cluster at 127.0.0.1:9: ",)),
        ([], environment(RAY_ADDRESS="127.0.0.1:9"), ("no Ray cluster at 127.0.0.1:9 (RAY_ADDRESS): ",)),
    ):
        line = refused(*JOB, "--output_dir", tmp_path, *options, env=env)
        assert all(name in line for name in (*names, "`ray start"))
    assert not os.path.exists(tmp_path / "metrics.jsonl")


@pytest.mark.thorough
def test_imagenet_on_two_ranks_that_each_start_ray(tmp_path, alone):
    common = ("jobs/imagenet.py", "--custom_data=true", "--arch=shufflenet_v2_x0_5", "--image_size=32",
              "--workers=1", "--batch_size=32", "--max_steps=2", "--print_freq=1", "--lr=0.01",
              "--warmup=0")  # fmt: skip
    run(*common, "--data_backend=threads", "--output_dir", tmp_path / "threads")
    result = run(
        *common, "--data_backend=ray", "--processes_per_node=2", "--output_dir", tmp_path / "ray", env=alone,
        timeout=RAY_STARTS,
    )  # fmt: skip
    assert receipts(tmp_path / "ray") == receipts(tmp_path / "threads") != [], result.stdout


@pytest.mark.thorough
def test_a_wrong_token(tmp_path, cluster):
    other = environment(**cluster.environment | {"RAY_AUTH_TOKEN": "w" * 32})
    errors = run(*JOB, "--workers=1", "--output_dir", tmp_path, env=other, code=2, timeout=RAY_STARTS).stderr
    assert "error: no Ray cluster at" in errors and "Traceback" not in errors

"""A job that starts its own Ray cluster has the receipt of a job without Ray."""

import contextlib
import os
import re
import shutil
import signal
import tempfile

import psutil
import pytest

from tests.conftest import QUICK, ROOT, environment, finish, records, run, start
from tests.support.ray_nodes import RayNodes, wait_until
from tests.support.simulated import simulate

pytest.importorskip("ray", reason='Ray is not installed: pip install "ray>=2.52"')

COMMAND = ("jobs/train_ray.py", "--distribute_mode=true", "--workers=1")
DIGITS = (*QUICK, "--batch_size=32", "--max_steps=4", "--report_every=2")
IMAGES = (
    "--custom_data=true", "--arch=shufflenet_v2_x0_5", "--image_size=32", "--workers=2", "--batch_size=32",
    "--max_steps=2", "--print_freq=1", "--lr=0.01", "--warmup=0",
)  # fmt: skip
RAY = ("--distribute_mode=true", "--ray_address=start", "--workers=1")


def receipts(output_dir) -> list:
    return [record["receipt"] for record in records(output_dir) if "receipt" in record]


def of_ray(folder) -> list[psutil.Process]:
    """Return the processes that the job left: its temporary folder is in their environment."""
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
    """Yield an environment with its own temporary folder. Its path is short, because it contains sockets."""
    folder = tempfile.mkdtemp(prefix="tr-")
    yield environment(TMPDIR=folder)
    wait_until(lambda: not of_ray(folder))
    left = [name for name in os.listdir(folder) if not name.startswith(("torchinductor_", "torchelastic_"))]
    assert not left  # torch leaves the folders named above
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
    job = start("jobs/train_ray.py", *QUICK, "--epochs=50", *RAY, "--output_dir", tmp_path, env=own)
    try:
        assert any("ray: a cluster" in line for line in iter(job.stdout.readline, ""))
        wait_until(lambda: len(of_ray(own["TMPDIR"])) > 3)
    finally:
        job.send_signal(signal.SIGKILL)
        finish(job, code=-signal.SIGKILL)


@pytest.mark.faults
def test_imagenet_on_two_ranks_that_share_a_cluster(tmp_path, own):
    common = ("jobs/imagenet.py", "--custom_data=true", "--arch=shufflenet_v2_x0_5", "--image_size=32",
              "--workers=1", "--batch_size=32", "--max_steps=2", "--print_freq=1", "--lr=0.01",
              "--warmup=0")  # fmt: skip
    run(*common, "--data_backend=threads", "--output_dir", tmp_path / "threads", timeout=200)
    result = run(
        *common, "--data_backend=ray", "--ray_address=start", "--processes_per_node=2", "--output_dir",
        tmp_path / "ray", env=own, timeout=300,
    )  # fmt: skip
    assert receipts(tmp_path / "ray") == receipts(tmp_path / "threads") != [], result.stdout


@pytest.mark.faults
def test_the_nodes_of_a_job_become_a_cluster(namespaces, tmp_path):
    """The two nodes have no route to other networks, as on many platforms."""
    run(
        "jobs/imagenet.py",
        *IMAGES,
        "--data_backend=threads",
        "--output_dir",
        tmp_path / "threads",
        timeout=200,
    )
    result = simulate(
        "--nodes=2", "--network-namespaces", "--keep", tmp_path / "nodes", "jobs/imagenet.py", "--", *IMAGES,
        "--data_backend=ray", "--ray_address=start", timeout=400,
    )  # fmt: skip
    assert re.search(r"ray: a cluster of this job at 10\.\d+\.\d+\.1:\d+; other machines join", result.stdout)
    assert "prepared here" not in result.stdout
    outputs = tmp_path / "nodes" / "node-0" / "outputs" / "train_url_0"
    assert receipts(outputs) == receipts(tmp_path / "threads") != []


OUTSIDE = """import os, subprocess, sys, time
ray = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block", "--head"]
if sys.argv[-2] == "--rank=0":
    ray += ["--port=6379", "--node-ip-address=10.77.0.1", "--num-cpus=2", "--include-dashboard=false"]
    head = subprocess.Popen(ray)
    while not os.path.exists(sys.argv[1] + ".done"):
        time.sleep(0.2)
    head.terminate()
    head.wait()
else:
    time.sleep(15)
    alone = {name: value for name, value in os.environ.items() if name[:3] not in ("MA_", "VC_")}
    result = subprocess.run([sys.executable, *sys.argv[2:-6]], env=alone)
    open(sys.argv[1] + ".done", "w").close()
    sys.exit(result.returncode)
"""


@pytest.mark.faults
def test_a_job_on_a_machine_that_is_no_node_of_the_cluster(namespaces, tmp_path):
    script = tmp_path / "code" / "outside.py"
    script.parent.mkdir()
    script.write_text(OUTSIDE)
    run("jobs/train.py", *DIGITS, "--output_dir", tmp_path / "plain", timeout=120)
    with tempfile.TemporaryDirectory(prefix="tr-") as folder:
        own = environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="t" * 32, RAY_TMPDIR=folder)
        result = simulate(
            "--nodes=2", "--network-namespaces", script, "--", tmp_path / "mark", ROOT / "jobs/train_ray.py",
            *DIGITS, "--distribute_mode=true", "--workers=1", "--ray_address=10.77.0.1:6379", "--output_dir",
            tmp_path / "ray", env=own, timeout=300,
        )  # fmt: skip
    assert "prepared here" not in result.stdout
    assert receipts(tmp_path / "ray") == receipts(tmp_path / "plain") != [], result.stdout


@pytest.mark.faults
def test_another_machine_joins_the_cluster_of_a_job(tmp_path, own):
    """If the job wants more workers than this node has CPUs, the others start on the machine that joins."""
    own |= {"RAY_AUTH_TOKEN": "t" * 32}
    workers = 2 * len(os.sched_getaffinity(0))
    job = start(
        "jobs/train_ray.py", *QUICK, "--epochs=500", "--distribute_mode=true",
        "--ray_address=start", f"--workers={workers}", "--output_dir", tmp_path, env=own,
    )  # fmt: skip
    extra = None
    try:
        line = next(line for line in iter(job.stdout.readline, "") if "ray: a cluster" in line)
        address = re.search(r"--address=(\S+)", line)[1]
        with tempfile.TemporaryDirectory(prefix="rx-") as folder:
            theirs = environment(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="t" * 32, RAY_TMPDIR=folder)
            ray = ("-c", "from ray.scripts.scripts import main; main()", "start", f"--address={address}")
            extra = start(*ray, "--num-cpus=4", "--block", env=theirs | {"PYTHONPATH": str(ROOT)})
            wait_until(lambda: workers_of(folder), 90)
            extra.terminate()
            extra.communicate(timeout=60)
    finally:
        for process in filter(None, (job, extra)):
            process.kill()
            process.communicate()


def workers_of(folder: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RAY_TMPDIR") == folder and process.name().startswith("ray::Worker"):
                found.append(process)
    return found


def test_a_bad_address(tmp_path):
    said = run(*COMMAND, *DIGITS, "--output_dir", tmp_path, "--ray_address=nowhere", code=2).stderr
    assert said == "error: --ray_address nowhere is not auto, start or HOST:PORT\n"
    for options, env, names in (
        (["--ray_address=127.0.0.1:9"], environment(), ("--ray_address: no Ray cluster at 127.0.0.1:9: ",)),
        ([], environment(RAY_ADDRESS="127.0.0.1:9"), ("no Ray cluster at 127.0.0.1:9 (RAY_ADDRESS): ",)),
    ):
        said = run(*COMMAND, *DIGITS, "--output_dir", tmp_path, *options, env=env, code=2).stderr
        assert said.count("\n") == 1
        assert all(name in said for name in (*names, "`ray start --head`", "--ray_address start"))


@pytest.mark.faults
def test_a_wrong_token(tmp_path):
    nodes = RayNodes(1)
    try:
        other = environment(**nodes.environment | {"RAY_AUTH_TOKEN": "w" * 32})
        said = run(*COMMAND, *DIGITS, "--output_dir", tmp_path, env=other, code=2, timeout=120).stderr
        assert "no Ray cluster at" in said and "Traceback" not in said
    finally:
        nodes.close()

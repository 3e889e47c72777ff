"""A job gives the same losses however a user or a platform starts it."""

import json
import re
import shlex
import subprocess
import sys

import pytest
import torch

from tests.conftest import QUICK, ROOT, environment, finish, free_port, losses, records, run, start

SMALL = (*QUICK, "--max_steps=3", "--batch_size=32", "--report_every=1")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the losses of train.py, which every other start must repeat."""
    output = tmp_path_factory.mktemp("alone")
    run("jobs/train.py", *SMALL, "--output_dir", output)
    assert len(losses(output)) == 3
    return losses(output)


@pytest.mark.parametrize("job", ["train_dp.py", "train_ddp.py"])
def test_variant_alone_repeats_the_base(job, alone, tmp_path):
    result = run(f"jobs/{job}", *SMALL, "--output_dir", tmp_path)
    assert losses(tmp_path) == alone
    assert "source=scikit-learn (1,797 real digits)" in result.stdout


def test_mixed_precision(alone, tmp_path):
    run("jobs/train_amp.py", *SMALL, "--output_dir", tmp_path)
    assert losses(tmp_path)[0] == pytest.approx(alone[0], rel=0.02) and losses(tmp_path)[0] != alone[0]
    weights = torch.load(tmp_path / "epoch_1.pth", weights_only=True)
    assert weights["conv1.0.weight"].dtype == torch.float32


def _same_run_in_two_processes(output, output_dir, alone):
    assert losses(output_dir)[0] == pytest.approx(alone[0], abs=1e-5)
    assert len(losses(output_dir)) == 3
    assert len(re.findall(r"^epoch=1 step=2/", output, re.MULTILINE)) == 1, "only rank 0 reports"
    assert output.count("TIME COST") == 1
    assert [record["val_count"] for record in records(output_dir) if "val_count" in record] == [359]


def test_two_nodes_as_modelarts_starts_them(alone, tmp_path):
    port = free_port()
    nodes = [
        start(
            "jobs/train_ddp.py", *SMALL, f"--train_url={tmp_path / str(rank)}", f"--init_method=tcp://127.0.0.1:{port}",
            f"--rank={rank}", "--world_size=2", "--some_platform_extra=1",
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [finish(node).stdout for node in nodes]
    _same_run_in_two_processes(outputs[0], tmp_path / "0", alone)
    assert not (tmp_path / "1").exists() and "epoch=" not in outputs[1], "only rank 0 writes and reports"
    for rank, output in enumerate(outputs):
        assert output.count("ignored arguments: --some_platform_extra\n") == 1
        assert (
            f"source=modelarts-arguments level=node nodes=2 processes_per_node=1 node_rank={rank}" in output
        )


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_the_launcher_of_torch(fresh, alone, tmp_path):
    """torch.distributed.run is started by other tests. fresh: the launcher and its ranks are new Pythons."""
    launcher = ("-m", "torch.distributed.launch", "--nproc-per-node=2", f"--master-port={free_port()}")
    result = run(*launcher, "jobs/train_ddp.py", *SMALL, "--output_dir", tmp_path, fresh=fresh)
    assert "level=process nodes=1 processes_per_node=2" in result.stdout
    _same_run_in_two_processes(result.stdout, tmp_path, alone)


def test_one_process_per_node_starts_the_others_from_any_folder(alone, tmp_path):
    """Another package called datasets is installed."""
    for name in ("bootfile", "datasets", "common"):
        (tmp_path / "site" / name).mkdir(parents=True)
        (tmp_path / "site" / name / "__init__.py").write_text("raise ImportError('the wrong package')")
    for folder in ("site", "elsewhere"):
        (tmp_path / folder).mkdir(exist_ok=True)
    env = environment(PYTHONPATH=str(tmp_path / "site"))
    command = (ROOT / "jobs" / "train_ddp.py", *SMALL, "--processes_per_node=2", "--output_dir=results")
    result = run(*command, cwd=tmp_path / "elsewhere", env=env, fresh=True)
    assert "nodes=1 processes_per_node=2 node_rank=0" in result.stdout
    _same_run_in_two_processes(result.stdout, tmp_path / "elsewhere" / "results", alone)
    wrong = run("-c", "import datasets", cwd=tmp_path / "elsewhere", env=env, code=1)
    assert "the wrong package" in wrong.stderr, "the fake package would have been found"


@pytest.mark.thorough
def test_a_link_to_a_job_and_a_folder_of_links(tmp_path):
    """The second is how Kubernetes mounts files: a link to a hidden folder, above which there is no code."""
    (tmp_path / "job.py").symlink_to(ROOT / "jobs" / "train.py")
    mounted = tmp_path / "project" / "jobs"
    (mounted / "..data").mkdir(parents=True)
    (mounted / "..data" / "train.py").write_text((ROOT / "jobs" / "train.py").read_text())
    (mounted / "train.py").symlink_to(mounted / "..data" / "train.py")
    for name in ("bootfile", "common", "datasets"):
        (tmp_path / "project" / name).symlink_to(ROOT / name)
    for job in (tmp_path / "job.py", mounted / "train.py"):
        assert "--data_url" in run(job, "--help", cwd=tmp_path, fresh=True).stdout


def test_what_is_ignored_is_printed_first_and_recorded(tmp_path):
    extras = ["--some_token", "hunter2", "--num_gpus=8", "--lr_policy=hunter2"]
    result = run("jobs/train.py", *SMALL, *extras, "--max-steps=1", "--output_dir", tmp_path)
    line = "ignored arguments: --some_token --num_gpus --lr_policy"
    printed = result.stdout.splitlines()
    assert printed[0] == line and printed.count(line) == 1
    written = (tmp_path / "starts.jsonl").read_text()
    assert json.loads(written)["ignored"] == ["--some_token", "--num_gpus", "--lr_policy"]
    assert "hunter2" not in result.stdout + result.stderr + written


def test_a_failing_process_ends_the_others():
    """After SIGKILL of one rank the parent ends the others, and its exit code is 128 + 9."""
    code = "import os, runpy, sys; os.environ.get('RANK') == '1' and os.kill(os.getpid(), 9);" + (
        "runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    )
    run("-c", code, "jobs/train_ddp.py", *SMALL, "--processes_per_node=2", code=137, timeout=60)


@pytest.mark.thorough
@pytest.mark.parametrize(("job", "streams"), [
    (["jobs/train.py"], ">/dev/full 2>&1"),
    (["jobs/train.py"], "| head -1 >/dev/null"),
    (["jobs/train_ddp.py", "--processes_per_node=2"], ">&- 2>&- <&-"),
], ids=str)  # fmt: skip
def test_output_that_cannot_be_printed_changes_nothing(job, streams, tmp_path):
    words = [sys.executable, *job, *SMALL, "--max_steps=1", f"--output_dir={tmp_path}"]
    command = ["bash", "-o", "pipefail", "-c", f"{shlex.join(words)} {streams}"]
    assert subprocess.run(command, cwd=ROOT, env=environment(), stderr=subprocess.PIPE).returncode == 0
    assert len(losses(tmp_path)) == 1 and (tmp_path / "checkpoints" / "step_1.pt").exists()
    if streams == ">/dev/full 2>&1":
        compare = shlex.join([sys.executable, "-m", "launch", "receipt", str(tmp_path), str(tmp_path)])
        command[-1] = f"{compare} {streams}"
        assert subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE).returncode == 0
        command[-1] = f"{shlex.join([*words, '--lr=x'])} {streams}"
        assert subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE).returncode == 2

"""The real job ends or resumes as documented when nodes fail on a platform."""

import os
import re
import shlex
import subprocess
import sys

import pytest
import torch

from tests.conftest import LONGEST, QUICK, ROOT, environment
from tests.support.simulated import fired, rows, simulate

TIMEOUT = 60  # seconds, of the process group
LONG = 200  # seconds that no busy machine needs to end a process
ENDLESS = ("jobs/train_ddp.py", "--", *QUICK, "--batch_size=32", f"--timeout={TIMEOUT}", "--epochs=10000")
JOB = (*ENDLESS, "--max_steps=40")  # fewer than the 44 of an epoch; a fault after step 2 is in time


VOLUMES = {  # file system: commands before the first start, and before the second
    "tmpfs": ("mount -t tmpfs none volume;", ""),
    "overlay": (  # earlier results are in a layer that is only read
        "",
        "mv volume/run lower; mount -t tmpfs none upper; mkdir upper/new upper/work;"
        "mount -t overlay -o lowerdir=lower,upperdir=upper/new,workdir=upper/work none volume;",
    ),
}


def weights(folder, node="node-0") -> dict[str, torch.Tensor]:
    return torch.load(folder / node / "outputs" / "train_url_0" / "epoch_1.pth", weights_only=True)


def assert_same(folder, other, node="node-0") -> None:
    ours, theirs = weights(folder, node), weights(other)
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Return the folder of an uninterrupted run of two nodes with one process each."""
    kept = tmp_path_factory.mktemp("two") / "kept"
    simulate("--nodes=2", "--keep", kept, *JOB)
    return kept


@pytest.mark.thorough
def test_survivors_of_a_killed_rank_leave():
    """If rank 0 is killed, the other ranks of all nodes end with an exit code other than 0.

    On an idle machine this takes 2 s; a collective would wait for LONG.
    """
    fault = "kill:rank=0,step=2"
    job = (*ENDLESS, f"--timeout={LONG}")
    result = simulate("--nodes=2", "--processes=2", "--fault", fault, *job, code=None)
    table, moment = rows(result.stdout), fired(result.stdout, fault)
    assert table["0"].code == 137 and table["1"].code not in (0, 137)
    assert max(row.seconds for row in table.values()) - moment < LONG / 2


@pytest.mark.thorough
def test_survivors_of_a_silent_rank_leave():
    fault = "stop:rank=1,step=2"
    result = simulate("--nodes=2", "--fault", fault, *ENDLESS, code=None)
    table, moment = rows(result.stdout), fired(result.stdout, fault)
    assert table["0"].code not in (0, 137) and table["1"].code
    assert table["0"].seconds - moment < LONG
    assert table["1"].seconds - moment < LONG or table["1"].meaning.startswith("stopped by a fault")


@pytest.mark.thorough
def test_a_rank_that_is_asked_to_end():
    result = simulate("--nodes=2", "--processes=2", "--fault=term:rank=2,step=2", *ENDLESS, code=None)
    table = rows(result.stdout)
    assert table["0"].code and table["1"].code and result.returncode


@pytest.mark.parametrize(
    "fault", ["restart:node=1,step=2", pytest.param("reschedule:node=0,step=3", marks=pytest.mark.thorough)]
)
def test_a_job_that_is_started_again(fault, two, tmp_path):
    kept = tmp_path / "kept"
    result = simulate("--nodes=2", "--keep", kept, "--fault", fault, *JOB)
    assert fired(result.stdout, fault)
    table = rows(result.stdout)
    assert {node for node in table if node.endswith("run 2")} == {"0 run 2", "1 run 2"}
    node = "node-0.2" if fault.startswith("reschedule") else "node-0"
    assert_same(kept, two, node)


def test_an_evicted_pod(two, tmp_path):
    """All pods end with a saved step, and new ones with empty disks continue from the volume."""
    fault, volume = "evict:node=1,step=3", tmp_path / "volume"
    words = ("--nodes=2", "--platform=kubernetes", "--keep", tmp_path / "kept", "--fault", fault)
    result = simulate(*words, *JOB, f"--train_url={volume}")
    assert fired(result.stdout, fault) and "topology source=kubernetes" in result.stdout
    assert [row.code for row in rows(result.stdout).values()] == [143, 0, 143, 0]
    assert re.search(r"resumed from .*/volume/.*, step [3-9]", result.stdout)
    assert {"node-0.2", "node-1.2"} < {*os.listdir(tmp_path / "kept")}
    ours, theirs = torch.load(volume / "epoch_1.pth", weights_only=True), weights(two)
    assert not [name for name in theirs if not torch.equal(ours[name], theirs[name])]


@pytest.mark.thorough
@pytest.mark.parametrize(("first", "second"), VOLUMES.values(), ids=VOLUMES)
def test_results_in_a_mounted_volume(first, second, two, tmp_path):
    """Two nodes write to one volume. New containers continue the killed job, and it ends like an
    uninterrupted one."""
    root = [] if os.geteuid() == 0 else ["--map-root-user"]
    for name in ("volume", "lower", "upper"):
        (tmp_path / name).mkdir()
    command = ["unshare", *root, "--mount", "bash", "-euc"]
    if subprocess.run([*command, f"cd {tmp_path}; mkdir volume/run; {first} {second}"]).returncode:
        pytest.skip("this user may not mount these file systems in a namespace")
    volume = tmp_path / "volume"
    words = ["--nodes=2", "--limit=200", *JOB, "--save_every=1step", f"--train_url={volume}/run"]
    job = shlex.join([sys.executable, "-m", "launch", "simulate", "--fault=restart:node=1,step=3", *words])
    killed = job.replace("restart:node=1", "kill:rank=0")
    script = f"""cd {tmp_path}; {first} cd {ROOT}; {killed} && exit 9
        cd {tmp_path}; {second} cd {ROOT}; echo SECOND; {job}; cp {volume}/run/epoch_1.pth {tmp_path}"""
    result = subprocess.run(
        [*command, script], env=environment(), capture_output=True, text=True, timeout=LONGEST
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"resumed from .*/volume/run/.*, step [1-9]", result.stdout.partition("SECOND")[2])
    ours, theirs = torch.load(tmp_path / "epoch_1.pth", weights_only=True), weights(two)
    assert not [name for name in theirs if not torch.equal(ours[name], theirs[name])]


@pytest.mark.thorough
def test_a_killed_rank_under_torchrun_ends_all():
    fault = "kill:rank=2,step=2"
    job = ("--nodes=2", "--processes=2", "--platform=torchrun", "--fault", fault, "--limit=90")
    result = simulate(*job, *ENDLESS, code=None)
    assert fired(result.stdout, fault)
    assert result.returncode not in (0, 124) and all(row.code for row in rows(result.stdout).values())

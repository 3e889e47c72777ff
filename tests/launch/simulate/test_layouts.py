"""The same job, seed and world size in different layouts give the same data, so the same weights."""

import hashlib

import pytest

from tests.conftest import QUICK, environment, run

pytestmark = pytest.mark.thorough

ARGUMENTS = (*QUICK, "--max_steps=3", "--batch_size=32", "--report_every=1", "--lr=0.02")


def _weights(tmp_path, nodes, processes, platform):
    """Return the digest of the weights that node 0 wrote."""
    folder = tmp_path / f"{platform}-{nodes}x{processes}"
    result = run(
        "-m", "launch", "simulate", f"--nodes={nodes}", f"--processes={processes}", f"--platform={platform}",
        f"--keep={folder}", "--limit=200", "jobs/train_ddp.py", "--", *ARGUMENTS,
        env=environment(OMP_NUM_THREADS="1"), timeout=240,
    )  # fmt: skip
    assert f" processes_per_node={processes} " in result.stdout
    (file,) = folder.glob("node-0/outputs/train_url_0/epoch_1.pth")
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def one_node(tmp_path_factory):
    """The digest of the weights of one node with four processes of torchrun."""
    return _weights(tmp_path_factory.mktemp("one"), 1, 4, "torchrun")


# Each way in which the processes of a node are started. test_topology.py has all platforms.
@pytest.mark.parametrize(("nodes", "processes", "platform"), [
    (4, 1, "modelarts"), (2, 2, "modelarts"), (2, 2, "pai-dlc"), (2, 2, "azureml"), (2, 2, "slurm"),
    (2, 2, "torchrun"), (2, 2, "modelarts-npu"), (2, 2, "modelarts-npu-torchrun"),
])  # fmt: skip
def test_every_layout_trains_the_same(nodes, processes, platform, one_node, tmp_path):
    assert _weights(tmp_path, nodes, processes, platform) == one_node

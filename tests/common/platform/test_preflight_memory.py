"""A step that needs more memory than is free is refused with what fits."""

import pytest
import torch

from bootfile.ground.errors import BadInput
from common.platform import node

LAYERS = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 1000), torch.nn.ReLU())
SAMPLE = (12 + 1000) * 4  # bytes that the two layers keep of a sample
WEIGHTS = 13 * 1000 * 4


@pytest.mark.parametrize("batch, free, most", [(9, 8, 8), (8, 8, None), (2, 0, 0)])
def test_a_step_that_does_not_fit_is_refused_with_what_fits(monkeypatch, batch, free, most):
    monkeypatch.setattr(node, "available_memory", lambda: 2 * WEIGHTS + free * SAMPLE + 100)
    state = torch.get_rng_state()
    if most is None:
        node.check_memory(LAYERS, (3, 2, 2), batch)
    else:
        with pytest.raises(
            BadInput, match=rf"{batch} samples \[3, 2, 2\].* at most {most} samples.*--accumulate"
        ):
            node.check_memory(LAYERS, (3, 2, 2), batch)
    assert torch.equal(state, torch.get_rng_state()) and not LAYERS[1].weight.is_meta


def test_the_processes_of_a_node_share_its_memory(monkeypatch):
    monkeypatch.setattr(node, "available_memory", lambda: 2 * (2 * WEIGHTS + 8 * SAMPLE + 100))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    node.check_memory(LAYERS, (3, 2, 2), 8)
    with pytest.raises(BadInput, match="at most 8 samples"):
        node.check_memory(LAYERS, (3, 2, 2), 9)


def test_the_free_memory_is_that_of_the_container(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99 kB\nMemAvailable:   50000000 kB\n")
    assert node.available_memory(str(tmp_path)) == 50_000_000 * 1024
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert node.available_memory(str(tmp_path)) == 50_000_000 * 1024
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{40 * 10**9}\n")
    assert 0 < node.available_memory(str(tmp_path)) < 40 * 10**9

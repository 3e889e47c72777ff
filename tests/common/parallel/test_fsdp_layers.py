"""What a model is sharded over: one process for each GPU."""

import pytest
import torch

from bootfile.ground.errors import BadInput
from common.parallel import fsdp


@pytest.mark.skipif(torch.__version__ < "2.6", reason="fully_shard() came with torch 2.6")
def test_processes_that_share_a_gpu_are_refused(monkeypatch):
    """gloo would end them with a segmentation fault (torch 2.11, seen on an H200)."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2)).to("meta")  # not a CPU
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    with pytest.raises(BadInput, match="2 processes share meta: gloo cannot shard"):
        list(fsdp.layers(model, "float32"))
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "nccl")
    assert [module for module, _ in fsdp.layers(model, "float32")][-1] is model

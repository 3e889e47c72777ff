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


@pytest.mark.skipif(torch.__version__ < "2.6", reason="fully_shard() came with torch 2.6")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_layers_and_their_precision(precision):
    block = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    blocks = torch.nn.ModuleList([block, torch.nn.Linear(2, 2)])
    model = torch.nn.ModuleDict({"blocks": blocks, "tail": torch.nn.Sequential(torch.nn.ReLU())})
    policies = list(fsdp.layers(model, precision))
    modules = [module for module, _ in policies]
    if precision == "float32":
        assert modules == [*blocks, model]
        assert {policy.param_dtype for _, policy in policies} == {None}
        return
    assert modules == [block[1], *blocks, model], "the norms first, and the model last"
    assert [policy.param_dtype for _, policy in policies] == [None, *[torch.bfloat16] * 3]
    assert [policy.reduce_dtype for _, policy in policies[1:]] == [torch.float32] * 3
    assert policies[-1][1].output_dtype == torch.float32

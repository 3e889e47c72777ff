"""A step that is not finite is skipped by the device, in every type of weights."""

import pytest
import torch

from bootfile.exact.nonfinite import Guard
from bootfile.exact.plugins import Plugin


@pytest.fixture(params=[torch.float32, torch.float64])
def default_dtype(request):
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


@pytest.mark.skipif(torch.__version__ < "2.4", reason="fused optimizers on a CPU came with torch 2.4")
@pytest.mark.parametrize("factor, is_taken", [(1.0, True), (float("nan"), False)])
def test_a_fused_optimizer_takes_what_the_guard_found(factor, is_taken, default_dtype):
    """torch's fused kernels read `found_inf` as float32, also if the weights are float64."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    guard = Guard(model, optimizer, watchers=[Plugin()])
    before = model.weight.detach().clone()
    loss = factor * model(torch.ones(1, 2)).sum()
    loss.backward()
    assert guard.vote(loss)
    optimizer.step()
    assert model.weight.dtype == default_dtype
    assert torch.equal(model.weight, before) is not is_taken

"""A trial pass changes no state, also if it fails."""

import copy

import pytest
import torch

from common.distributed.compilation import backward_without_trace, compile_module
from common.distributed.gradients import settle_buckets


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, images):
        return images.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("no gradient")


class _Model(torch.nn.Module):
    def __init__(self, fails):
        super().__init__()
        self.fails, self.norm = fails, torch.nn.BatchNorm2d(2)

    def forward(self, images):
        output = torch.nn.functional.dropout(self.norm(images), 0.5)
        return _NoGradient.apply(output) if self.fails else output


def _same(model, before, random):
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("fails", [False, True])
def test_a_trial_leaves_no_trace(fails):
    model = _Model(fails)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    try:
        backward_without_trace(model, model, torch.ones(2, 2, 3, 3), passes=2)
        assert not fails
    except ValueError:
        assert fails
    _same(model, before, random)


@pytest.mark.skipif(torch.__version__ < "2.6", reason="torch.compiler.set_stance came with torch 2.6")
def test_settling_the_buckets_compiles_nothing(monkeypatch):
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    model = _Model(fails=False)
    forward = torch.nn.Sequential(torch.compile(model, backend=backend))
    forward.static_graph = False
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    settle_buckets(forward, torch.ones(2, 2, 3, 3))
    assert not compiled
    forward(torch.ones(2, 2, 3, 3))
    assert compiled


def test_what_cannot_be_compiled_stays_as_it_is():
    model, said = _Model(fails=True), []
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert compile_module(model, [torch.ones(2, 2, 3, 3)], said.append) is model
    assert len(said) == 1 and said[0].startswith("not compiled: ")
    _same(model, before, random)

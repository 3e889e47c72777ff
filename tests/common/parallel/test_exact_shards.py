"""The sums of exact_shards.Shards: their order, their value, and the memory that they need."""

import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from bootfile.ground.errors import BadInput
from bootfile.ground.numbers import part_of
from bootfile.loaders.map_style import map_style_loader
from bootfile.sampling.sampler import SequentialBatchSampler
from common.parallel import exact_shards

pytestmark = pytest.mark.rounding

SHARDS = 8


@pytest.fixture
def group():
    store = torch.distributed.HashStore()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as Shards does: what a test expects has the same bits
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_rows_are_added_in_a_binary_tree(rows):
    values = torch.randn(rows, 5, generator=torch.Generator().manual_seed(0)) * 1e4
    expected = list(values.clone())
    while len(expected) > 1:
        expected = [first + second for first, second in zip(expected[::2], expected[1::2], strict=True)]
    assert torch.equal(exact_shards.sum_rows(values), expected[0])
    assert exact_shards.sum_rows(torch.tensor([1e8, 1.0, -1e8, 1.0])) == 0.0  # from left to right it is 1


@pytest.mark.parametrize("count", [1, 2, 8, 64])
def test_the_shards_of_each_process_are_few_nodes_of_the_tree(count):
    """So a process sends at most log2(V) times what all_reduce sends: its nodes once, and its slice back."""
    for size in range(1, count + 1):
        parts = [part_of(count, rank, size) for rank in range(size)]
        nodes = [exact_shards.list_nodes(part) for part in parts]
        assert [shard for part in nodes for node in part for shard in node] == list(range(count))
        for node in (node for part in nodes for node in part):
            assert node.start % len(node) == 0 and len(node).bit_count() == 1
        most, least = (choice(map(len, parts)) for choice in (max, min))
        assert most - least <= 1 and (count % size or {len(part) for part in nodes} == {1})
        assert (max(map(len, nodes)) + 1) / 2 <= max(1, math.log2(count))
    assert exact_shards.list_nodes(part_of(8, 1, 3)) == [range(2, 4), range(4, 5)]


def test_a_step_has_the_mean_gradient_and_the_buffers_of_shard_0(group):
    """Also of weights in channels_last. At most log2(V) partial sums are kept."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(16, 5)
    ).to(memory_format=torch.channels_last)
    images, labels = torch.randn(SHARDS, 2, 3, 4, 4), torch.randint(0, 5, (SHARDS, 2))
    loss = torch.nn.functional.cross_entropy
    parts = [
        torch.autograd.grad(loss(model(part), target), list(model.parameters()))
        for part, target in zip(images, labels, strict=True)
    ]
    means = [torch.stack(each).mean(0) for each in zip(*parts, strict=True)]
    model[1].reset_running_stats()
    model(images[0])
    statistics = [each.clone() for each in model.buffers()]
    model[1].reset_running_stats()
    forward, shards = DistributedDataParallel(model), exact_shards.Shards(SHARDS, torch.device("cpu"))
    kept = []
    shards.attach(forward)
    for part, target in zip(images, labels, strict=True):
        model.zero_grad()
        value = loss(forward(part), target)
        value.backward()
        kept.append(len(shards._sums))
        mean = shards.add(value)
        assert (mean is None) == (shards.index > 0)
    assert max(kept) == 3 and kept[-1] == 3  # log2(8)
    for parameter, expected in zip(model.parameters(), means, strict=True):
        torch.testing.assert_close(parameter.grad, expected)
    for buffer, expected in zip(model.buffers(), statistics, strict=True):
        assert torch.equal(buffer, expected)
    assert not shards._sums


def test_the_means_are_over_the_samples_that_are_left(group):
    """A shard without any counts nothing, also if its loss is NaN. The buffers are those of another one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4, momentum=1.0))
    inputs, targets = torch.randn(16, 3), torch.randn(16, 4)
    counts = (0, 4, 2, 3)  # samples that are left in shards of 4
    mse = torch.nn.functional.mse_loss
    parts = [slice(4 * shard, 4 * shard + (count or 4)) for shard, count in enumerate(counts)]
    sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
    total = 0.0
    for part, count in zip(parts, counts, strict=True):
        value = mse(model(inputs[part]), targets[part])
        for added, gradient in zip(sums, torch.autograd.grad(value, list(model.parameters())), strict=True):
            added += gradient * count
        total += value.item() * count
    forward, shards = DistributedDataParallel(model), exact_shards.Shards(4, torch.device("cpu"))
    shards.attach(forward)
    removal = SimpleNamespace(count=lambda sampler, step, parts: counts)
    plan = SimpleNamespace(sampler=SimpleNamespace(global_batch=16))
    shards.watch({"model": model}, SimpleNamespace(removal=removal, plan=plan, step=1, generators=[]))
    model.zero_grad()
    for shard, part in enumerate(parts):
        value = mse(forward(inputs[part]), targets[part]) * (1.0 if counts[shard] else math.nan)
        value.backward()
        mean = shards.add(value)
    assert math.isclose(mean.item(), total / 9, rel_tol=1e-6)
    for parameter, expected in zip(model.parameters(), sums, strict=True):
        torch.testing.assert_close(parameter.grad, expected / 9)
    statistics = model[1].running_mean.clone()
    model(inputs[parts[1]])
    torch.testing.assert_close(model[1].running_mean, statistics)
    assert shards.gather(torch.ones(4, 2)).tolist() == [[0, 0], [1, 1], [1, 1], [1, 1]]


def test_sums_of_a_process_are_rows_of_its_shards(group):
    torch.set_num_threads(2)
    shards = exact_shards.Shards(4, torch.device("cpu"))
    assert torch.get_num_threads() == 1 and shards.local == 4 and shards.index == 0
    shards.first, shards.local = 2, 2  # the second of two processes
    sampler = SequentialBatchSampler(10, 2, rank=1, world_size=2, shards=4)
    loader = map_style_loader(
        TensorDataset(torch.arange(10.0), torch.zeros(10)), sampler, torch.device("cpu")
    )
    rows = shards.rows(lambda part: torch.stack([inputs.sum() for inputs, _ in part]).sum()[None], loader)
    assert rows.tolist() == [[0], [0], [5 + 6], [7 + 8 + 9]]


class Small(torch.nn.Module):
    """A model that draws from each kind of generator, and counts its calls. change: done in each call."""

    def __init__(self, change=lambda model, outputs: outputs):
        super().__init__()
        self.layer, self.unused = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        self.strided = torch.nn.Parameter(torch.ones(2, 6)[:, ::3])
        self.register_buffer("level", torch.ones(()))
        self.change, self.calls = change, 0

    def forward(self, inputs):
        self.calls += 1
        drawn = torch.rand(()) + random.random() + np.random.rand()
        return self.change(self, drawn * self.layer(inputs) @ self.strided)


INPUTS = torch.arange(12.0).view(4, 1, 3) / 7


def begin(model, **objects) -> tuple:
    shards, forward = exact_shards.Shards(4, torch.device("cpu")), DistributedDataParallel(model)
    shards.attach(forward)
    shards.watch({"model": model} | objects)
    return shards, forward


def train(shards, forward, criterion=lambda outputs: outputs.square().mean(), after=lambda: None):
    """Compute a step, and return its loss."""
    for part in INPUTS:
        loss = criterion(forward(part))
        loss.backward()
        after()
        result = shards.add(loss)
    return result


def test_repeated_calls_change_nothing(group, monkeypatch):
    """Neither random numbers nor attributes: with and without them 3 steps are equal."""
    outcomes = []
    for checked in (True, False):
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        model, repeated = Small(), []
        shards, forward = begin(model)
        original = shards.guards.repeat_calls
        changed = lambda restore: repeated.append(checked and original(restore))  # noqa: B023, E731
        monkeypatch.setattr(shards.guards, "repeat_calls", changed)
        losses = [train(shards, forward).item() for _ in range(3)]
        numbers = [torch.rand(()).item(), random.random(), np.random.rand(), model.calls, len(repeated)]
        outcomes.append((losses, numbers, [each.grad.tolist() for each in model.parameters()]))
    assert outcomes[0] == outcomes[1] and outcomes[0][1][3:] == [12, 2]


def test_missing_gradients_are_zeros_and_earlier_ones_are_added(group):
    """As in an accumulation. zero_grad() between forward and backward deletes those of the last step."""
    model = torch.nn.Linear(3, 2)
    model.unused, model.strided = torch.nn.Linear(3, 2), torch.nn.Parameter(torch.ones(2, 6)[:, ::3])
    shards, forward = begin(model)
    criterion = lambda outputs: (outputs @ model.strided).square().mean()  # noqa: E731
    expected = torch.stack([criterion(model(part)) for part in INPUTS]).mean()
    gradients = torch.autograd.grad(expected, [model.weight, model.strided])
    loss = train(shards, forward, criterion)
    torch.testing.assert_close(loss, expected.double().detach(), check_dtype=False)
    assert torch.equal(model.unused.weight.grad, torch.zeros(2, 3))
    one = [each.grad.clone() for each in (model.weight, model.strided)]
    for each, gradient in zip(one, gradients, strict=True):
        torch.testing.assert_close(each, gradient)
    train(shards, forward, criterion)
    for each, gradient in zip((model.weight, model.strided), one, strict=True):
        assert torch.equal(each.grad, gradient + gradient)
    for set_to_none in (True, False):
        for part in INPUTS:
            loss = criterion(forward(part))
            model.zero_grad(set_to_none=set_to_none)
            loss.backward()
            shards.add(loss)
        assert torch.equal(model.weight.grad, one[0])


def test_buffers_of_each_module_begin_with_those_of_the_step(group):
    class Level(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("level", torch.ones(()))

        def forward(self, outputs):
            self.level = 0.9 * self.level + 0.1 * outputs.detach().square().mean()  # another tensor
            return outputs.square().mean() / self.level

    model, criterion = torch.nn.Linear(3, 2), Level()
    level, alone = criterion.level, Level()
    shards, forward = begin(model, criterion=criterion)
    alone(model(INPUTS[0]))
    train(shards, forward, criterion)
    assert criterion.level is level and torch.equal(level, alone.level)


def count(model, outputs):
    return outputs * model.calls


def peak(model, outputs):
    model.peak = max(getattr(model, "peak", 0), outputs.abs().max().item())
    return outputs / model.peak


def follow(model, outputs):
    model.unused.weight.data.lerp_(model.layer.weight.data, 0.1)
    return outputs


def reduce_all(model, outputs):
    torch.distributed.all_reduce(outputs.detach())
    return outputs


def differentiate(model, outputs):
    """The inputs need a gradient, as in a physics-informed loss."""
    (slope,) = torch.autograd.grad(outputs.sum(), model.inputs, create_graph=True)
    return outputs + slope.sum()


def test_unusual_modules_are_not_refused(group):
    model, graph = Small(differentiate), torch.nn.Module()
    model.register_buffer("ratio", torch.tensor([torch.nan]))
    graph.register_buffer("edges", torch.eye(3).to_sparse())
    model.register_forward_pre_hook(lambda model, inputs: setattr(model, "inputs", inputs[0]))
    shards, forward = begin(model, graph=graph)
    train(shards, lambda part: forward(part.clone().requires_grad_()))
    assert model.layer.weight.grad.abs().sum() > 0


CHANGES = {
    count: "the model: output 0 changes",
    peak: "the model: output 0 changes",
    follow: "the model: parameter unused.weight changes",
    reduce_all: "model or .*criterion communicates",
}


class Mean(torch.nn.Module):
    """A criterion with state between its calls: in a buffer, or in an attribute."""

    def __init__(self, is_buffer):
        super().__init__()
        self.is_buffer = is_buffer
        self.register_buffer("level", torch.ones(()))
        self.last = 1.0

    def forward(self, outputs):
        level = self.level.clone() if self.is_buffer else self.last
        self.level.lerp_(outputs.detach().square().mean(), 0.1)
        self.last = 0.9 * self.last + 0.1 * outputs.detach().square().mean().item()
        return outputs.square().mean() / level


def test_a_criterion_is_refused_if_it_keeps_state_outside_of_buffers(group):
    criterion = Mean(True)
    train(*begin(Small(), criterion=criterion), criterion)
    criterion = Mean(False)
    with pytest.raises(BadInput, match="criterion: output 0 changes"):
        train(*begin(Small(), criterion=criterion), criterion)


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_depends_on_the_order_of_its_calls_is_refused(change, group):
    shards, forward = begin(Small(change))
    with pytest.raises(BadInput, match=CHANGES[change]):
        train(shards, forward)


def test_a_loop_that_depends_on_the_number_of_processes_is_refused(group, optimizer_hooks):
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shards, forward = begin(model, optimizer=optimizer)
    line = r"SGD.step\(\) .*after shards.add"
    if torch.__version__ < "2.3":  # calls no hooks of optimizers once a function was compiled
        line += "|changes .*computed again"
    with pytest.raises(BadInput, match=line):
        train(shards, forward, after=optimizer.step)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shards, forward = begin(model, optimizer=optimizer)
    loss = train(shards, forward)
    with pytest.raises(BadInput, match=r"SGD.step\(\) got a closure"):
        optimizer.step(lambda: loss)
    optimizer.step()
    with pytest.raises(BadInput, match=r"shards.add\(\) without forward\(inputs\)"):
        train(shards, model)
    torch.set_num_threads(2)
    with pytest.raises(BadInput, match=r"torch.get_num_threads\(\) is 2, expected 1"):
        train(shards, forward)
    with pytest.raises(BadInput, match=r"torch.get_num_threads\(\) is 2, expected 1"):
        shards.rows(len, [])


def test_a_sparse_gradient_is_refused(group):
    shards, forward = begin(torch.nn.Sequential(torch.nn.Embedding(3, 2, sparse=True)))
    with pytest.raises(BadInput, match=r"gradient .*0\.weight is sparse"):
        train(shards, lambda part: forward(part.long()))

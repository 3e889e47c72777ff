"""The sums of exact.Shards: their order, their value, and the memory that they need."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from common.distributed import exact
from datasets.loaders.engines.map_style import map_style_loader
from datasets.sampling.sampler import SequentialBatchSampler

SHARDS = 8


@pytest.fixture
def group():
    store = torch.distributed.HashStore()
    threads = torch.get_num_threads()
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
    assert torch.equal(exact.sum_rows(values), expected[0])
    assert exact.sum_rows(torch.tensor([1e8, 1.0, -1e8, 1.0])) == 0.0  # from left to right it is 1


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
    forward, shards, kept = DistributedDataParallel(model), exact.Shards(SHARDS, torch.device("cpu")), []
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


def test_sums_of_a_process_are_rows_of_its_shards(group):
    torch.set_num_threads(2)
    shards = exact.Shards(4, torch.device("cpu"))
    assert torch.get_num_threads() == 1 and shards.local == 4 and shards.index == 0
    shards.first, shards.local = 2, 2  # the second of two processes
    sampler = SequentialBatchSampler(10, 2, rank=1, world_size=2, shards=2)
    loader = map_style_loader(
        TensorDataset(torch.arange(10.0), torch.zeros(10)), sampler, torch.device("cpu")
    )
    rows = shards.rows(lambda part: torch.stack([inputs.sum() for inputs, _ in part]).sum()[None], loader)
    assert rows.tolist() == [[0], [0], [5 + 6], [7 + 8 + 9]]

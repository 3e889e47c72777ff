"""A data set whose tensors are on the GPU trains as any other, without workers."""

import pytest
import torch

from bootfile.loaders.map_style import map_style_loader
from bootfile.sampling.sampler import BatchSampler
from tests.support import fake_gpu

pytestmark = pytest.mark.skipif(torch.__version__ < "2.11", reason="the stand-ins are for torch 2.11")


class Items(torch.utils.data.Dataset):
    fingerprint = "items"

    def __init__(self, inputs, targets):
        self.inputs = inputs
        self.targets = targets

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, place):
        return self.inputs[place], self.targets[place]


@pytest.mark.parametrize("kind", [Items, torch.utils.data.TensorDataset])
@pytest.mark.parametrize("targets", ["labels", "values"])
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_batches_stay_on_the_gpu(kind, targets, place, monkeypatch):
    with fake_gpu.fake_gpu(monkeypatch):
        values = torch.zeros(64, 4, device=place)
        labels = torch.zeros(64, dtype=torch.int64, device=place)
        dataset = kind(values, labels if targets == "labels" else values)
        dataset.fingerprint = "items"
        loader = map_style_loader(dataset, BatchSampler(64, 8, 0, 1), fake_gpu.DEVICE)
        devices = {tensor.device for batch in loader for tensor in batch}
        assert devices == {fake_gpu.DEVICE} and loader.step == 8

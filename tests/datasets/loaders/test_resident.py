"""Images that stay on the device: the same batches and receipts, gathered there."""

import itertools

import numpy as np
import pytest
import torch

from datasets.loaders.engines.memory import MemoryLoader
from datasets.loaders.engines.resident import Gather, ResidentLoader
from datasets.memory.image_set import ImageSet
from datasets.sampling.augment import CropFlip, Windows, crop_flip
from datasets.sampling.receipt import batch_sums
from datasets.sampling.sampler import BatchSampler, SequentialBatchSampler


class _OnAnyDevice(ResidentLoader):
    """Gathers on the CPU, too, where a ResidentLoader would be a MemoryLoader."""

    def _hold(self):
        padding = self.data.padding if self.augment else 0
        self._gather = Gather(self.data.images, self.data.labels, padding, self.to_device.device)

    def _cut(self):
        return self._gathered()


def _set(channels=3, height=12, width=9, count=300, padding=2, flip=True):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 7, (count,), generator=generator)
    return ImageSet(images, labels, 7, (0.5,) * channels, (0.25,) * channels, padding, flip, "generated")


@pytest.mark.parametrize("padding, flip", [(0, False), (2, False), (4, True)])
@pytest.mark.parametrize("channels", [1, 3])
def test_gathered_on_a_device_as_cut_on_the_host(channels, padding, flip):
    """On the CPU as a device: the operations are those of any."""
    data = _set(channels, padding=padding, flip=flip)
    sizes = [64, 64, 23]
    ids = np.random.default_rng(0).integers(0, len(data), sum(sizes))
    parameters, ends = crop_flip(3, 5, ids, padding, flip), np.cumsum(sizes)
    gather = Gather(data.images, data.labels, padding, torch.device("cpu"))
    images, labels, sums = gather(ids, parameters, ends, augmented=True)
    assert torch.equal(images, Windows(data.images, padding)(ids, parameters))
    assert images.is_contiguous(memory_format=torch.channels_last) and images.dtype == torch.uint8
    assert torch.equal(labels, data.labels[torch.from_numpy(ids)])
    expected = batch_sums(ids, labels.numpy(), parameters, ends)
    assert np.array_equal(sums.numpy().view(np.uint64), expected)
    plain = gather(ids, parameters, ends, augmented=False)[2]
    assert np.array_equal(plain.numpy().view(np.uint64), batch_sums(ids, labels.numpy(), (), ends))
    other = CropFlip(parameters.top, parameters.left, ~parameters.flip)
    assert not torch.equal(gather(ids, other, ends, augmented=True)[0], images)


def test_sums_pass_two_to_the_64th_in_either_arithmetic():
    """Of one batch, of each by itself, and of all before it."""
    ids, ends = np.arange(5000), np.array([1, 1, 2500, 5000])
    whole = batch_sums(ids, ids, (ids,), ends)
    tensors = torch.from_numpy(ids), torch.from_numpy(ids), (torch.from_numpy(ids),), torch.from_numpy(ends)
    assert np.array_equal(batch_sums(*tensors).numpy().view(np.uint64), whole)
    begins = [0, *ends[:-1]]
    for begin, end, row in zip(begins, ends, whole, strict=True):
        part = ids[begin:end]
        assert np.array_equal(batch_sums(part, part, (part,), [len(part)])[0], row)
    assert not whole[1].any(), "a batch of nothing"


@pytest.mark.parametrize(
    "kind, device",
    [
        (_OnAnyDevice, "cpu"),
        pytest.param(
            ResidentLoader,
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_the_same_loader_whatever_holds_the_images(kind, device):
    data = _set(count=5000)
    cases = [(BatchSampler(len(data), 48, 9), True), (SequentialBatchSampler(len(data), 999), False)]
    for order, augment in cases:
        theirs = MemoryLoader(data, order, torch.device("cpu"), augment)
        found = []
        for loader in (theirs, kind(data, order, torch.device(device), augment)):
            if augment:
                loader.seek(len(loader) + 7)
            batches = [(images.cpu(), labels.cpu()) for images, labels in loader]
            found.append((batches, loader.receipt.take()))
            assert loader.waited > 0
        (first, receipt), (second, other) = found
        assert len(first) == len(second) == (97 if augment else 6)
        for (images, labels), (same, named) in zip(first, second, strict=True):
            assert torch.equal(images, same) and torch.equal(labels, named)
        assert torch.equal(receipt, other)


def test_only_what_was_delivered_is_in_the_receipt():
    """Batches are planned many at a time; a training that ends in between has not seen the others."""
    data = _set()
    loader = MemoryLoader(data, BatchSampler(len(data), 10, 0), torch.device("cpu"), augment=True)
    loader.seek(0)
    for _ in itertools.islice(loader, 3):
        pass
    assert loader.receipt.take().shape == (3, 3)
    assert loader.receipt.take().shape == (0, 3)

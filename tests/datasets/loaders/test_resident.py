"""A loader with images on the device gives the same batches and receipts."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from bootfile.receipt.receipt import batch_sums
from bootfile.sampling.sampler import BatchSampler, SequentialBatchSampler
from datasets.loaders.engines.memory import Resident, Windows, make_loader, plan_of, resident_loader
from datasets.loaders.image_loader import ImageLoader
from datasets.memory.image_set import ImageSet
from datasets.sampling.augment import CropFlip, crop_flip


def _on_any_device(data, sampler, device, augment):
    """Return a resident loader that also gathers on the CPU, for which resident_loader() is make_loader()."""
    return ImageLoader(
        Resident(data, augment, device), plan_of(data, sampler, augment), device, data.mean, data.std
    )


def _set(channels=3, height=12, width=9, count=300, padding=2, flip=True):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, channels, height, width), dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 7, (count,), generator=generator)
    return ImageSet(images, labels, 7, (0.5,) * channels, (0.25,) * channels, padding, flip, "generated")


@pytest.mark.parametrize(
    "padding, flip, reflect", [(0, False, False), (2, False, False), (4, True, False), (4, True, True)]
)
@pytest.mark.parametrize("channels", [1, 3])
def test_gathered_on_a_device_as_cut_on_the_host(channels, padding, flip, reflect):
    """The CPU is the device here: the operations are the same on all devices."""
    data = _set(channels, padding=padding, flip=flip)
    ids = np.random.default_rng(0).integers(0, len(data), 151)
    crops = crop_flip(data, ids, 3, 5)
    data = dataclasses.replace(data, reflect=reflect)
    gather = Resident(data, True, torch.device("cpu")).gather
    images = gather(np.stack([ids, *crops]))
    assert images.dtype == torch.uint8 and images.is_contiguous()
    assert np.array_equal(images, Windows(data.images, padding, reflect)(ids, crops))
    other = CropFlip(crops.top, crops.left, ~crops.flip)
    assert not torch.equal(gather(np.stack([ids, *other])), images)


def test_sums_pass_two_to_the_64th():
    """This holds for the sums of one batch, of each batch, and of all batches before it."""
    ids, ends = np.arange(5000), np.array([1, 1, 2500, 5000])
    whole = batch_sums(ids, ids, (ids,), ends)
    begins = [0, *ends[:-1]]
    for begin, end, row in zip(begins, ends, whole, strict=True):
        part = ids[begin:end]
        assert np.array_equal(batch_sums(part, part, (part,), [len(part)])[0], row)
    assert not whole[1].any(), "an empty batch"


@pytest.mark.parametrize(
    "kind, device", [(_on_any_device, "cpu"), pytest.param(resident_loader, "cuda", marks=pytest.mark.gpu)]
)
def test_the_same_loader_whatever_holds_the_images(kind, device):
    data = _set(count=5000)
    cases = [(BatchSampler(len(data), 48, 9), True), (SequentialBatchSampler(len(data), 999), False)]
    for order, augment in cases:
        theirs = make_loader(data, order, torch.device("cpu"), augment)
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
        assert np.array_equal(receipt, other)


def test_only_what_was_delivered_is_in_the_receipt():
    """Many batches are planned at a time. If a training ends earlier, the others are not in the receipt."""
    data = _set()
    loader = make_loader(data, BatchSampler(len(data), 10, 0), torch.device("cpu"), augment=True)
    loader.seek(0)
    for _ in itertools.islice(loader, 3):
        pass
    assert loader.receipt.take().shape == (3, 3)
    assert loader.receipt.take().shape == (0, 3)

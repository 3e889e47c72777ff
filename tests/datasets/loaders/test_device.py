"""The last stage on the CPU computes the right numbers, and reuses only memory that is free."""

import pytest
import torch

from datasets.loaders import backends
from datasets.loaders.image_loader import ToDevice
from datasets.loaders.threads import start_pool

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _images(value=None, channels=3):
    images = torch.randint(0, 256, (4, 9, 7, channels), dtype=torch.uint8)
    return (images if value is None else images.fill_(value)).permute(0, 3, 1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("contiguous", [False, True])
def test_the_numbers_of_the_formula(dtype, channels, contiguous):
    images = _images(channels=channels)
    given = images.contiguous() if contiguous else images
    to_device = ToDevice(torch.device("cpu"), MEAN[:channels], STD[:channels], dtype)
    result, labels = to_device(given, torch.arange(4))
    mean, std = (torch.tensor(each[:channels], dtype=dtype).view(1, -1, 1, 1) for each in (MEAN, STD))
    torch.testing.assert_close(result, (images.to(dtype) / 255 - mean) / std, rtol=0, atol=1e-6)
    assert result.dtype == dtype and result.is_contiguous(memory_format=torch.channels_last)
    assert labels.tolist() == [0, 1, 2, 3]
    # on a GPU: the operation that subtracts the mean also converts the pixels
    expected = images.to(dtype).sub_(to_device._shift).mul_(to_device._scale)
    assert torch.equal(to_device._normalised(images), expected) and torch.equal(result, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(
    "shape", [(1, 600, 600, 3), (7, 333, 241, 3), (13, 224, 224, 1), (2, 5, 2**19 + 1, 3)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_large_batches_get_the_same_bits_in_blocks_by_any_number_of_threads(shape, dtype, threads):
    images = torch.randint(0, 256, shape, dtype=torch.uint8).permute(0, 3, 1, 2)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        to_device = ToDevice(torch.device("cpu"), MEAN[: shape[3]], STD[: shape[3]], dtype)
        expected = to_device._normalised(images)
        with torch.inference_mode():  # for this thread, as in an evaluation
            assert torch.equal(to_device(images, torch.zeros(1))[0], expected)
        for given in (images, images.contiguous(), images[:, :, :, ::2]):  # the last two in another order
            result, _ = to_device(given, torch.zeros(1))
            assert torch.equal(result, to_device._normalised(given)) and not result.is_inference()
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_torch_starts_no_threads_in_the_threads_of_a_pool():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with start_pool(2, "test") as pool:
            pool.submit(torch.ones(2**20).add, 1).result()
            assert {pool.submit(torch.get_num_threads).result() for _ in range(9)} == {1}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_a_batch_that_is_held_is_never_written_to():
    """This holds for the batch, a view, an array, and a tensor that autograd has saved."""
    to_device = ToDevice(torch.device("cpu"), MEAN, STD)
    weight = torch.ones(3, 1, 1, requires_grad=True)
    kept = []
    for value in range(40):
        batch, _ = to_device(_images(value), torch.zeros(1))
        expected = batch.clone()
        views = batch, batch[1:, :, 2:], batch.permute(0, 2, 3, 1), batch.numpy()
        holders = *views, (batch * weight).grad_fn
        kept.append((holders[value % 5], expected, value % 5))
        del batch, views, holders
    for holder, expected, kind in kept:
        if kind == 4:
            assert torch.equal(holder._saved_self, expected)
            continue
        same = (expected, expected[1:, :, 2:], expected.permute(0, 2, 3, 1), expected)[kind]
        assert torch.equal(torch.as_tensor(holder), same)


def test_memory_is_used_again_once_it_is_free():
    to_device = ToDevice(torch.device("cpu"), MEAN, STD)
    places = set()
    for value in range(20):
        batch, _ = to_device(_images(value), torch.zeros(1))
        places.add(batch.data_ptr())
    assert len(places) <= 2


@pytest.mark.parametrize("rates, chosen", [
    ({"threads": 900.0, "dali-gpu": 2500.0}, "dali-gpu"),
    ({"threads": 6000.0, "dali": 5500.0, "dali-gpu": 9000.0}, "threads"),
    ({"threads": 3000.0, "dali": 2000.0}, "threads"),
    ({}, ""),
])  # fmt: skip
def test_a_gpu_decodes_only_if_the_host_is_too_slow(rates, chosen):
    assert backends.choose(rates) == chosen

"""On a GPU, copies run in parallel to the computation, and nvJPEG decodes as in DALI and torchvision."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from bootfile.sampling.plan import Plan
from bootfile.sampling.sampler import BatchSampler
from datasets.folders import image_folder, random_folder
from datasets.loaders import backends, pixels
from datasets.loaders.image_loader import ToDevice
from datasets.sampling.augment import random_resized_crop
from datasets.sampling.effects import Effects, draw_effects
from datasets.stores.files import FileStore

pytestmark = pytest.mark.gpu
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    return image_folder.load(random_folder.make(str(cache / "images")), "train", str(cache))


def _epoch(index, backend):
    plan = Plan(index, BatchSampler(len(index), 64, 5), random_resized_crop, 96)
    device = torch.device("cuda")
    with backends.build(backend, FileStore(index), plan, device, 4) as loader:
        loader.seek(0)
        batches = [(images.cpu(), labels.cpu()) for images, labels in loader]
        return batches, torch.from_numpy(loader.receipt.take())


def test_effects_give_the_same_pixels_as_on_the_cpu():
    effects, ids = Effects(True, 0.4, 0.5, 0.4, 1.0), np.arange(64)
    drawn = draw_effects(effects, ids, 7, 2, 40)
    images, labels = torch.randint(0, 256, (64, 3, 40, 40), dtype=torch.uint8), torch.arange(64) % 5
    expected = pixels.apply(effects, drawn, images, labels, 5, MEAN)
    found = pixels.apply(effects, drawn, images.cuda(), labels.cuda(), 5, MEAN)
    assert torch.equal(found[0].cpu(), expected[0])
    torch.testing.assert_close(found[1].cpu(), expected[1])


def test_the_same_numbers_as_on_the_cpu():
    images = torch.randint(0, 256, (8, 40, 40, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    labels = torch.arange(8)
    (here, _), (there, moved) = (
        ToDevice(torch.device(name), MEAN, STD)(images, labels) for name in ("cpu", "cuda")
    )
    assert there.is_cuda and there.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(there.cpu(), here, rtol=0, atol=1e-6)
    assert torch.equal(moved.cpu(), labels)


def test_memory_may_be_filled_again_after_wait():
    """A busy stream reads the batch late, while the host's memory is overwritten at once."""
    to_device, device = ToDevice(torch.device("cuda"), MEAN, STD), torch.device("cuda")
    ring = torch.empty((16, 224, 224, 3), dtype=torch.uint8, pin_memory=True)
    busy = torch.randn(4096, 4096, device=device)
    results = []
    for value in range(20):
        ring.fill_(value)
        images, _ = to_device(ring.permute(0, 3, 1, 2), torch.zeros(16, dtype=torch.int64))
        busy = busy @ busy.clamp(-1e-3, 1e-3)
        results.append(images.mean(dim=(0, 2, 3)))
        to_device.wait()
    expected = [
        [(value / 255 - mean) / std for mean, std in zip(MEAN, STD, strict=True)] for value in range(20)
    ]
    torch.testing.assert_close(torch.stack(results).cpu(), torch.tensor(expected), rtol=0, atol=1e-4)


@pytest.mark.parametrize("backend", ["threads", "dali", "dali-gpu"])
def test_backends_deliver_the_same_to_a_gpu(index, backend):
    reason = backends.reasons(torch.device("cuda"))[backend]
    if reason:
        pytest.skip(reason)
    reference, expected = _epoch(index, "pytorch")
    batches, sums = _epoch(index, backend)
    assert torch.equal(sums, expected)
    for (images, labels), (other, same) in zip(batches, reference, strict=True):
        assert torch.equal(labels, same)
        assert ((images - other).abs() * 58).mean(dim=(1, 2, 3)).max() < 2


def test_nvjpeg_of_torchvision_decodes_what_pillow_decodes(index):
    from torchvision.io import decode_jpeg

    for content in (FileStore(index).content(id) for id in range(16)):
        encoded = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        decoded = decode_jpeg(encoded, device="cuda")  # torchvision 0.16 does not take a list
        expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"), dtype=np.float64)
        # torchvision cannot ask nvJPEG to interpolate chroma, which changes these images by 2.1 to 2.4 / 255
        assert np.abs(decoded.permute(1, 2, 0).cpu().numpy() - expected).mean() < 4

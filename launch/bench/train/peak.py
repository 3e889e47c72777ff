"""How much a network computes, and how much this device can: what turns images/s into a share of the peak."""

import contextlib
import time

import torch
from torch.utils.flop_counter import FlopCounterMode

from common import models

_SIDE = {"cpu": 2048, "cuda": 8192}  # of the square matrices: larger ones are no faster
_SECONDS = 0.5  # of products, and one at least: where bfloat16 is emulated, that takes longer


def flop_per_image(arch: str, image_size: int) -> int:
    """Of forward and backward of one image: 2 for a multiplication and addition, convolutions and products
    only, as usual. Nothing is computed: shapes are enough (device "meta")."""
    with torch.device("meta"):
        network = models.resnet18() if arch == "resnet18" else models.classifier(arch, 1000, image_size)
        images = torch.empty(2, 3, image_size, image_size)  # BatchNorm wants two
        with FlopCounterMode(display=False) as counter:
            network(images).sum().backward()
    return counter.get_total_flops() // 2


def half(device: torch.device) -> torch.dtype:
    """What the jobs compute in with mixed precision."""
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    return torch.float16 if old else torch.bfloat16


def product_peak(device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of the best of several products of square matrices, now.

    float32 on a GPU: in TF32 where cuDNN may take it, as torch lets it by default: the networks are made of
    convolutions, and the switch for products (off by default) does not concern them.
    """
    side = _SIDE[device.type]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    taken = []
    with _tf32():
        while sum(taken) < _SECONDS:
            begin = _now(device)
            torch.mm(a, b, out=product)
            taken.append(_now(device) - begin)
    del a, b, product
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the jobs need the memory
    return 2 * side**3 / min(taken) / 1e12


@contextlib.contextmanager
def _tf32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()

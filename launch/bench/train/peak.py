"""Count the operations of a network, and measure the peak of this device."""

import contextlib

import torch
from torch.utils.flop_counter import FlopCounterMode

from common import models
from launch.bench.output import now

_SIDE = {"cpu": 2048, "cuda": 8192}  # side of the square matrices; larger ones do not give more TFLOP/s
_SECONDS = 0.5  # minimum duration; one product takes longer if bfloat16 is emulated


def count_flop(arch: str, image_size: int) -> int:
    """Return the operations of forward and backward for one image. A multiplication and addition count as 2.

    Only convolutions and matrix products count, as usual. Nothing is computed (device "meta").
    """
    with torch.device("meta"):
        network = models.resnet18() if arch == "resnet18" else models.classifier(arch, 1000, image_size)
        images = torch.empty(2, 3, image_size, image_size)  # BatchNorm needs two
        with FlopCounterMode(display=False) as counter:
            network(images).sum().backward()
    return counter.get_total_flops() // 2


def mixed_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of the jobs' mixed precision."""
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    return torch.float16 if old else torch.bfloat16


def measure_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return TFLOP/s of the best of several products of square matrices.

    On a GPU, float32 products use TF32 if cuDNN may use it, which is torch's default. The networks consist of
    convolutions, which ignore torch's switch for matrix products (off by default).
    """
    side = _SIDE[device.type]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(a)
    taken = []
    with _tf32():
        while sum(taken) < _SECONDS:
            begin = now(device)
            torch.mm(a, b, out=product)
            taken.append(now(device) - begin)
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

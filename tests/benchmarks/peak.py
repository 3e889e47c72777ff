"""Count the operations of a network, and measure the peak of this device."""

import contextlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from common import models
from launch.bench import now

# Products [rows, inner] @ [inner, columns]: squares, and tall ones as in a network. Larger ones do not give
# more TFLOP/s.
_PRODUCTS = {
    "cpu": ((1024, 1024, 1024), (2048, 2048, 2048), (4096, 4096, 4096), (32768, 576, 64), (8192, 2304, 256)),
    "cuda": ((4096, 4096, 4096), (8192, 8192, 8192), (131072, 2304, 256)),
}
_CHANNELS = (64, 128, 256, 512)  # of the 3x3 convolutions of ResNet-18 and ResNet-50
_RUNS = 2  # at least, of each operation; the fastest counts
_SECONDS = 0.05  # at least, of each operation
_LONGEST = 0.3  # seconds: a longer operation is skipped, unless it is the first


class Peak(NamedTuple):
    """The most TFLOP/s of a device in one precision, and the operation that gave it."""

    tflop_per_s: float
    source: str


class _Operation(NamedTuple):
    """An operation: its name, the operations of one run, and a function that prepares a run."""

    name: str
    flop: float
    prepare: Callable[[], Callable[[], object]]


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


def measure_peak(device: torch.device, dtype: torch.dtype, side: int, batch_size: int) -> Peak:
    """Return the peak: the best of several matrix products and of the network's 3x3 convolutions.

    Processors and libraries differ in which of them is fastest. Every operation is warmed up.

    side: of the maps of the first convolutions, whose maps have 64 channels.
    batch_size: images of a convolution.

    On a GPU, float32 products use TF32 if cuDNN may use it, which is torch's default. The networks consist of
    convolutions, which ignore torch's switch for matrix products (off by default).
    """
    best = Peak(0.0, "")
    with _tf32():
        for operation in _operations(device, dtype, side, batch_size):
            if best.tflop_per_s and operation.flop / best.tflop_per_s / 1e12 > _LONGEST:
                continue
            speed = operation.flop / _seconds(operation.prepare(), device) / 1e12
            best = max(best, Peak(speed, operation.name))
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the jobs need the memory
    return best


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of several runs, after one that is not timed."""
    run()
    taken: list[float] = []
    while len(taken) < _RUNS or sum(taken) < _SECONDS:
        begin = now(device)
        run()
        taken.append(now(device) - begin)
    return min(taken)


def _operations(device: torch.device, dtype: torch.dtype, side: int, batch_size: int) -> Iterable[_Operation]:
    for rows, inner, columns in _PRODUCTS[device.type]:
        name = f"product {rows}x{inner} by {inner}x{columns}"
        yield _Operation(name, 2 * rows * inner * columns, _product(device, dtype, rows, inner, columns))
    for number, channels in enumerate(_CHANNELS):
        edge = max(1, side >> number)
        shape = (batch_size, channels, edge, edge)
        flop = 2 * 9 * channels**2 * batch_size * edge**2
        name = f"3x3 convolution {channels}x{edge}x{edge}, batch {batch_size}, "
        yield _Operation(f"{name}forward", flop, _convolution(device, dtype, shape, backward=False))
        yield _Operation(
            f"{name}forward and backward", 3 * flop, _convolution(device, dtype, shape, backward=True)
        )


def _product(
    device: torch.device, dtype: torch.dtype, rows: int, inner: int, columns: int
) -> Callable[[], Callable[[], object]]:
    def prepare() -> Callable[[], object]:
        a = torch.randn(rows, inner, device=device).to(dtype)
        b = torch.randn(inner, columns, device=device).to(dtype)
        product = torch.empty(rows, columns, device=device, dtype=dtype)
        return lambda: torch.mm(a, b, out=product)

    return prepare


def _convolution(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int, int], backward: bool
) -> Callable[[], Callable[[], object]]:
    def prepare() -> Callable[[], object]:
        layer = torch.nn.Conv2d(shape[1], shape[1], 3, padding=1, bias=False).to(device, dtype)
        layer = layer.to(memory_format=torch.channels_last)
        images = torch.randn(shape, device=device).to(dtype).contiguous(memory_format=torch.channels_last)
        images.requires_grad_(backward)
        gradient = torch.randn_like(images.detach())

        def run() -> None:
            with torch.set_grad_enabled(backward):
                output = layer(images)
            if backward:
                torch.autograd.grad(output, (images, layer.weight), gradient)

        return run

    return prepare


@contextlib.contextmanager
def _tf32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before

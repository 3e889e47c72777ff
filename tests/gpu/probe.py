"""Measure what a GPU can do at most, as the denominator of the figures: bytes and operations in a second.

    python -m tests.gpu.probe cuda          copies, matrices, and a plain loop of ResNet-50 without Bootfile
    torchrun --nproc-per-node 2 -m tests.gpu.probe cuda        all_reduce of 100 MB

The last line is JSON: {"copy GB/s": ..., ...}. cpu: a rehearsal, tiny.
"""

import json
import os
import sys
import time
from collections.abc import Callable

import torch
import torchvision

from tests.gpu import plain

_ROUNDS, _WARM_UP = 20, 5


def main() -> None:
    device = torch.device(sys.argv[1], int(os.environ.get("LOCAL_RANK", 0)))
    is_small = device.type == "cpu"
    scale = 1000 if is_small else 1
    if not is_small:
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        found = measure_all_reduce(device, 25_000_000 // scale)
    elif len(sys.argv) > 2:
        found = {"images/s": measure_plain_loop(device, 4 if is_small else 256, 32 if is_small else 224)}
    else:
        found = measure_limits(device, scale)
    if not int(os.environ.get("RANK", 0)):
        print(json.dumps(found))


def measure_limits(device: torch.device, scale: int) -> dict[str, float]:
    """Return the bandwidths of copies, on the device and from pinned memory, and TFLOP/s in bfloat16."""
    source = torch.empty(2_000_000_000 // scale, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    host = torch.empty(500_000_000 // scale, dtype=torch.uint8, pin_memory=device.type != "cpu")
    size = 8192 if scale == 1 else 128
    matrix = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    return {
        "copy GB/s": 2e-9 * source.nbytes / seconds(lambda: target.copy_(source), device),
        "from pinned memory GB/s": 1e-9 * host.nbytes
        / seconds(lambda: target[: len(host)].copy_(host, non_blocking=True), device),
        "matrices TFLOP/s": 2e-12 * size**3 / seconds(lambda: matrix @ matrix, device),
    }  # fmt: skip


def measure_plain_loop(device: torch.device, batch: int, side: int) -> float:
    """Return images/s of a compiled loop of torchvision's ResNet-50 in bfloat16, with images in memory."""
    step = plain.image_step(torchvision.models.resnet50(), device)
    images, labels = plain.make_images(batch, side, device)
    return batch / seconds(lambda: step(images, labels), device, rounds=2 if device.type == "cpu" else 50)


def measure_all_reduce(device: torch.device, count: int) -> dict[str, float]:
    """Return the bus bandwidth of an all_reduce of float32 [count], GB/s, as nccl-tests define it."""
    torch.distributed.init_process_group("gloo" if device.type == "cpu" else "nccl")
    values, ranks = torch.ones(count, device=device), torch.distributed.get_world_size()
    time_of_one = seconds(lambda: torch.distributed.all_reduce(values), device)
    torch.distributed.destroy_process_group()
    return {"all_reduce GB/s": 2 * (ranks - 1) / ranks * 4e-9 * count / time_of_one}


def seconds(function: Callable[[], object], device: torch.device, rounds: int = _ROUNDS) -> float:
    """Return the mean time of a call after some calls that are not measured."""
    begin = 0.0
    for number in range(_WARM_UP + rounds):
        if number == _WARM_UP:
            _wait(device)
            begin = time.perf_counter()
        function()
    _wait(device)
    return (time.perf_counter() - begin) / rounds


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()

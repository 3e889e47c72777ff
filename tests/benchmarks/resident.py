"""Measure the images/s of an in-memory data set on the device, cropped, mirrored and normalised.

The images are gathered on the host or, on a GPU, from its own memory.

python -m tests.benchmarks.resident [--batch_size 512] [--rounds 5]
"""

import argparse
import datetime
import os
import statistics
import time

import torch

from datasets.loaders.engines.memory import make_loader
from datasets.loaders.engines.resident import resident_loader
from datasets.memory.image_set import ImageSet
from datasets.sampling.sampler import BatchSampler
from tests.benchmarks.machine import describe

_COUNT = 50_000  # as CIFAR-10


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch_size", type=int, default=512, help="default: 512")
    parser.add_argument("--rounds", type=int, default=5, help="epochs of each (default: 5)")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images = torch.randint(0, 256, (_COUNT, 3, 32, 32), dtype=torch.uint8)
    labels = torch.randint(0, 10, (_COUNT,))
    data = ImageSet(images, labels, 10, (0.49, 0.48, 0.45), (0.25, 0.24, 0.26), 4, True, "generated")
    loaders = {
        kind.__name__: kind(data, BatchSampler(_COUNT, options.batch_size, 0), device, augment=True)
        for kind in (make_loader, resident_loader)
    }
    print(f"{datetime.date.today()}, {describe()}", flush=True)
    rates = {name: [] for name in loaders}
    for number in range(options.rounds + 1):
        for name, loader in loaders.items():
            rate = _rate(loader, number)
            if number:  # the first one is the warm-up
                rates[name].append(rate)
    for name, found in rates.items():
        middle, low, high = statistics.median(found), min(found), max(found)
        print(f"{name}: {middle / 1e6:.3f} million images/s ({low / 1e6:.3f}-{high / 1e6:.3f}) on {device}")
    print(f"load average at the end {os.getloadavg()[0]:.2f}")


def _rate(loader, epoch: int) -> float:
    loader.seek(epoch * len(loader))
    count, begin = 0, time.perf_counter()
    for images, _ in loader:
        count += len(images)
    if images.is_cuda:
        torch.cuda.synchronize()
    loader.receipt.take()
    return count / (time.perf_counter() - begin)


if __name__ == "__main__":
    main()

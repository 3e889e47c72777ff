"""Measure the images/s of an in-memory data set on the device, cropped, mirrored and normalised.

The images are gathered on the host or, on a GPU, from its own memory.

python -m tests.benchmarks.resident [--batch_size 512] [--rounds 5]
"""

import functools
import time

import torch

from datasets.loaders.engines.memory import make_loader
from datasets.loaders.engines.resident import resident_loader
from datasets.memory.image_set import ImageSet
from datasets.sampling.sampler import BatchSampler
from tests.benchmarks.rounds import conditions, make_parser, spread, take_turns

_COUNT = 50_000  # as CIFAR-10


def main():
    parser = make_parser(__doc__, 5)
    parser.add_argument("--batch_size", type=int, default=512, help="default: 512")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images = torch.randint(0, 256, (_COUNT, 3, 32, 32), dtype=torch.uint8)
    labels = torch.randint(0, 10, (_COUNT,))
    data = ImageSet(images, labels, 10, (0.49, 0.48, 0.45), (0.25, 0.24, 0.26), 4, True, "generated")
    loaders = {
        kind.__name__: kind(data, BatchSampler(_COUNT, options.batch_size, 0), device, augment=True)
        for kind in (make_loader, resident_loader)
    }
    with conditions():
        epochs = {name: functools.partial(_rate, each) for name, each in loaders.items()}
        for name, rates in take_turns(epochs, options.rounds).items():
            print(f"{name}: {spread([rate / 1e6 for rate in rates], '.3f', ' million images/s')} on {device}")


def _rate(loader) -> float:
    loader.seek(0)
    count, begin = 0, time.perf_counter()
    for images, _ in loader:
        count += len(images)
    if images.is_cuda:
        torch.cuda.synchronize()
    loader.receipt.take()
    return count / (time.perf_counter() - begin)


if __name__ == "__main__":
    main()

"""Measure the images/s of an in-memory data set on the device, cropped, mirrored and normalised.

The images are gathered on the host or, on a GPU, from its own memory. "torchvision" is DataLoader with 2
workers and the transforms of torchvision on images of Pillow.

python -m tests.benchmarks.resident [--batch_size 512] [--rounds 5]
"""

import functools

import torch
from PIL import Image
from torchvision import transforms

from bootfile.loaders.loader import Loader
from bootfile.sampling.sampler import BatchSampler
from datasets.loaders.engines.memory import make_loader, resident_loader
from datasets.memory.image_set import ImageSet
from tests.benchmarks.loaders import data_loader
from tests.benchmarks.rounds import conditions, divide, make_parser, spread, take_turns, timed

_COUNT, _COUNT_TORCHVISION = 50_000, 4096  # the first as CIFAR-10


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
    transform = transforms.Compose([
        transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), transforms.ToTensor(),
        transforms.Normalize(data.mean, data.std),
    ])  # fmt: skip
    pixels = images[:_COUNT_TORCHVISION].permute(0, 2, 3, 1).numpy()
    torchvision = [(Image.fromarray(image), int(label)) for image, label in zip(pixels, labels, strict=False)]
    loaders["torchvision"] = data_loader(_Transformed(torchvision, transform), options.batch_size)
    with conditions():
        epochs = {name: functools.partial(_rate, each) for name, each in loaders.items()}
        found = take_turns(epochs, options.rounds)
        for name, rates in found.items():
            print(f"{name}: {spread([rate / 1e6 for rate in rates], '.3f', ' million images/s')} on {device}")
        ratios = divide(found["make_loader"], found["torchvision"])
        print(f"make_loader / torchvision: {spread(ratios, '.1f', 'x')}, n={options.rounds}")


class _Transformed(torch.utils.data.Dataset):
    def __init__(self, samples, transform):
        self.samples, self.transform = samples, transform

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, id):
        image, label = self.samples[id]
        return self.transform(image), label


def _rate(loader) -> float:
    """Return the images/s of an epoch, each time the first one."""
    counts = []

    def epoch():
        counts.extend(len(images) for images, _ in loader)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    if isinstance(loader, Loader):
        loader.seek(0)
        loader.receipt.take()
    seconds = timed(epoch)
    return sum(counts) / seconds


if __name__ == "__main__":
    main()

"""Measure the time of an epoch of map_style_loader, compared with torch's DataLoader.

python -m tests.benchmarks.map_style [--rounds 5]
"""

import io
import random

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision.transforms import v2

from datasets.loaders.engines.map_style import map_style_loader
from datasets.sampling.sampler import BatchSampler
from tests.benchmarks.rounds import conditions, make_parser, print_ratios, take_turns, timed


class Photographs(Dataset):
    """Photographs with random crops and colours: random numbers of torch, NumPy and `random`."""

    def __init__(self, count=512):
        image = Image.fromarray(load_sample_images().images[0]).resize((400, 300))
        file = io.BytesIO()
        image.save(file, "JPEG", quality=90)
        self.file, self.count = file.getvalue(), count
        self.transform = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(224), v2.RandomHorizontalFlip()])

    def __len__(self):
        return self.count

    def __getitem__(self, id):
        image = self.transform(Image.open(io.BytesIO(self.file)).convert("RGB"))
        return image.float() + random.random() + np.random.rand(), id


class Rows(TensorDataset):
    """Rows of a table, without random numbers, one by one: the cheapest items."""


def compare(dataset, batch, workers, rounds):
    """Print the seconds of an epoch, also relative to those of a DataLoader with the same batches."""
    sampler = BatchSampler(len(dataset), batch, seed=0)
    ids = [each.tolist() for each in sampler]
    loaders = {
        "DataLoader": DataLoader(
            dataset, batch_sampler=ids, num_workers=workers, persistent_workers=workers > 0
        ),
        "map_style_loader": map_style_loader(dataset, sampler, torch.device("cpu"), workers=workers),
    }

    def epoch(loader):
        sampler.seek(0)
        return timed(lambda: [None for _ in loader])

    seconds = take_turns({name: lambda each=each: epoch(each) for name, each in loaders.items()}, rounds)
    print_ratios(f"{type(dataset).__name__}, {workers} workers", seconds, ".3f", "s")


def main():
    options = make_parser(__doc__, 5).parse_args()
    columns = torch.randn(20_000, 30), torch.randint(0, 2, (20_000,))
    with conditions():
        for workers in (0, 2):
            compare(Photographs(), 32, workers, options.rounds)
            for dataset in (Rows(*columns), TensorDataset(*columns)):
                compare(dataset, 128, workers, options.rounds)


if __name__ == "__main__":
    main()

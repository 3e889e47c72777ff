"""Measure the time of an epoch of map_style_loader, compared with torch's DataLoader.

python -m tests.benchmarks.map_style [--rounds 5]
"""

import io
import random
import time
from functools import partial

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision.transforms import v2

from datasets.loaders.engines.map_style import map_style_loader
from datasets.sampling.sampler import BatchSampler
from tests.benchmarks.rounds import conditions, divide, make_parser, spread, take_turns

CPU = torch.device("cpu")


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


class Rows(Dataset):
    """Rows of a table, without random numbers: the cheapest items."""

    def __init__(self, count=20_000):
        self.inputs, self.targets = torch.randn(count, 30), torch.randint(0, 2, (count,))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, id):
        return self.inputs[id], self.targets[id]


def time_ratio(dataset, batch, workers, rounds):
    """Print the time of an epoch divided by that of a DataLoader with the same batches."""
    sampler = BatchSampler(len(dataset), batch, seed=0)
    plain = DataLoader(
        dataset, batch_sampler=_Ids(sampler), num_workers=workers, persistent_workers=workers > 0
    )
    own = map_style_loader(dataset, sampler, CPU, workers=workers)
    seconds = take_turns(
        {"plain": partial(_epoch, plain, sampler), "own": partial(_epoch, own, sampler)}, rounds
    )
    ratio = spread(divide(seconds["own"], seconds["plain"]), ".3f", " times DataLoader")
    print(f"{type(dataset).__name__}, {workers} workers: {ratio}, n={rounds}", flush=True)


def _epoch(loader, sampler):
    """Return the seconds of the first epoch."""
    sampler.seek(0)
    begin = time.perf_counter()
    for _ in loader:
        pass
    return time.perf_counter() - begin


class _Ids:
    def __init__(self, sampler):
        self.sampler = sampler

    def __len__(self):
        return len(self.sampler)

    def __iter__(self):
        for ids in self.sampler:
            yield ids.tolist()


def main():
    parser = make_parser(__doc__, 5)
    options = parser.parse_args()
    photographs, rows = Photographs(), Rows()
    table = TensorDataset(rows.inputs, rows.targets)
    with conditions():
        for workers in (0, 2):
            time_ratio(photographs, 32, workers, options.rounds)
            for dataset in (rows, table):
                time_ratio(dataset, 128, workers, options.rounds)


if __name__ == "__main__":
    main()

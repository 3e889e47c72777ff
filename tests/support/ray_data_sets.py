"""Data sets that the tests send to workers of Ray. A worker imports this module, so it imports little."""

import random
import time

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info


class Squares(Dataset):
    """A data set with all types that a batch can contain. seconds: for each sample."""

    def __init__(self, count=60, seconds=0.0):
        self.count, self.seconds, self.table = count, seconds, np.arange(count) ** 2

    def __len__(self):
        return self.count

    def __getitem__(self, id):
        time.sleep(self.seconds)
        return {
            "image": torch.full((3, 8, 8), id, dtype=torch.uint8), "id": id, "name": f"sample {id}",
            "square": self.table[id], "half": torch.tensor([id, id], dtype=torch.bfloat16) / 2,
        }  # fmt: skip


class Draws(Dataset):
    """A data set whose samples draw random numbers from global generators."""

    def __len__(self):
        return 24

    def __getitem__(self, id):
        info = get_worker_info()
        drawn = torch.rand(1).item(), np.random.rand(), random.random()
        return id, info.id, info.num_workers, info.seed, *drawn


class Noisy(Draws):
    """The same data set with pairs of (input, target)."""

    def __getitem__(self, id):
        return torch.tensor([*torch.rand(2), np.random.rand(), random.random()]), id % 5

"""Data sets that the tests send to workers of Ray. A worker imports this module, so it imports little."""

import time

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Squares(Dataset):
    """A data set with all types that a batch can contain. slow: ids that take `seconds`; None: all."""

    def __init__(self, count=60, slow=(), seconds=0.0):
        self.count, self.slow, self.seconds, self.table = count, slow, seconds, np.arange(count) ** 2

    def __len__(self):
        return self.count

    def __getitem__(self, id):
        if self.slow is None or id in self.slow:
            time.sleep(self.seconds)
        return {
            "image": torch.full((3, 8, 8), id, dtype=torch.uint8), "id": id, "name": f"sample {id}",
            "square": self.table[id], "half": torch.tensor([id, id], dtype=torch.bfloat16) / 2,
        }  # fmt: skip


class Draws(Dataset):
    """A data set whose samples draw random numbers from global generators.

    meeting: a folder through which a worker waits until another one has begun.
    """

    def __init__(self, meeting=None):
        self.meeting = meeting

    def __len__(self):
        return 24

    def __getitem__(self, id):
        info = get_worker_info()
        if self.meeting:
            (self.meeting / str(info.id)).touch()
            while len(list(self.meeting.iterdir())) < 2:
                time.sleep(0.01)
        drawn = torch.rand(1).item(), np.random.rand(), __import__("random").random()
        return id, info.id, info.num_workers, info.seed, *drawn


class Noisy(Draws):
    """The same data set with pairs of (input, target)."""

    def __getitem__(self, id):
        return torch.tensor([*torch.rand(2), np.random.rand(), __import__("random").random()]), id % 5


class Count(IterableDataset):
    def __init__(self, count=29):
        self.count = count

    def __iter__(self):
        info = get_worker_info()
        yield from range(info.id, self.count, info.num_workers)


class Broken(Squares):
    def __getitem__(self, id):
        if id == 17:
            raise KeyError("no such key")
        return super().__getitem__(id)

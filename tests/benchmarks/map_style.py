"""Compare map_style_loader with torch's DataLoader (time) and torchdata's StatefulDataLoader (restarts).

The second comparison: are the tensors equal after a restart, and with other numbers of workers?

python -m tests.benchmarks.map_style [--rounds 5] [--workers 0]
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
from torchdata.stateful_dataloader import StatefulDataLoader
from torchvision.transforms import v2

from datasets.loaders.engines.map_style import map_style_loader
from datasets.sampling.sampler import BatchSampler
from tests.benchmarks.rounds import conditions, divide, make_parser, spread, take_turns

BATCH, STOP = 16, 7  # number of steps before the restart
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


def ours(dataset, start, workers):
    """Return digests of the batches of one epoch from step `start`."""
    sampler = BatchSampler(len(dataset), BATCH, seed=0, epochs=1)
    with map_style_loader(dataset, sampler, CPU, workers=workers) as loader:
        return [_digest(batch) for _ in loader.epochs_from(start) for batch in loader]


def stateful(dataset, stop, workers, state=None):
    """Return (digests of the batches until step `stop`, state_dict() at that step)."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    loader = StatefulDataLoader(dataset, BATCH, shuffle=True, num_workers=workers, drop_last=True)
    if state is not None:
        loader.load_state_dict(state)
    found = []
    for batch in loader:
        found.append(_digest(batch))
        if len(found) == stop:
            break
    return found, loader.state_dict()


def _digest(batch):
    return hash(batch[0].numpy().tobytes()), tuple(batch[1].tolist())


def compare(dataset):
    """Print for each number of workers whether a restart after STOP steps gives the same tensors.

    Each start of StatefulDataLoader has the same seeds, like a script that is started again.
    """
    print("\nequal to the uninterrupted run | map_style_loader | StatefulDataLoader\n---|---|---")
    whole = ours(dataset, 0, 0)
    for workers in (0, 1, 4):
        mine = ours(dataset, STOP, workers) == whole[STOP:]
        theirs, _ = stateful(dataset, None, workers)
        begun, state = stateful(dataset, STOP, workers)
        rest, _ = stateful(dataset, None, workers, state)
        same = begun + rest == theirs
        ids = [each[1] for each in begun + rest] == [each[1] for each in theirs]
        print(f"restart after step {STOP}, {workers} workers: ids | yes | {_yes(ids)}")
        print(
            f"restart after step {STOP}, {workers} workers: tensors | {_yes(mine)} | {_yes(same)}", flush=True
        )
    first, _ = stateful(dataset, None, 0)
    others = [stateful(dataset, None, workers)[0] == first for workers in (1, 4)]
    own = [ours(dataset, 0, workers) == whole for workers in (1, 4)]
    print(f"0, 1 and 4 workers: tensors | {_yes(all(own))} | {_yes(all(others))}", flush=True)


def _yes(value):
    return "yes" if value else "no"


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
        compare(Photographs(320))


if __name__ == "__main__":
    main()

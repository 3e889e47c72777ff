"""Measure what it costs to seed all random number generators in each step.

    python -m tests.benchmarks.seeding

Steps of train.py (ResNet-18 on digits, 128 a batch), of the same with --width 8, and of train_own.py's table
(32 rows a batch, the cheapest job), with and without seeding, in turns in one process. Columns are medians of
the rounds: milliseconds of a step without seeding, the ratio with / without and its range, and the share of
the seeding alone.
"""

import statistics
import time

import torch
from sklearn.datasets import load_diabetes

from common.compute import models
from datasets.loaders.engines import map_style, memory
from datasets.loaders.loader import Loader
from datasets.memory import digits
from datasets.sampling import generators
from datasets.sampling.sampler import BatchSampler
from tests.benchmarks.rounds import describe, spread

ROUNDS, CPU = 9, torch.device("cpu")


def images(width: int) -> tuple[Loader, torch.nn.Module, torch.nn.Module]:
    data = digits.load(None, False)[0]
    loader = memory.make_loader(data, BatchSampler(len(data), 128, 0), CPU, augment=True)
    return (
        loader,
        models.resnet18(1, 10, width).to(memory_format=torch.channels_last),
        torch.nn.CrossEntropyLoss(),
    )


def table() -> tuple[Loader, torch.nn.Module, torch.nn.Module]:
    rows, targets = (torch.from_numpy(each).float() for each in load_diabetes(return_X_y=True))
    data = torch.utils.data.TensorDataset(rows, targets)
    loader = map_style.map_style_loader(data, BatchSampler(len(data), 32, 0), CPU)
    layers = [torch.nn.Linear(10, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1), torch.nn.Flatten(0)]
    return loader, torch.nn.Sequential(*layers), torch.nn.MSELoss()


def epoch(loader: Loader, model: torch.nn.Module, criterion: torch.nn.Module, optimizer) -> float:
    """Return the seconds of a step."""
    loader.seek(0)
    start = time.perf_counter()
    for inputs, targets in loader:
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        optimizer.step()
    return (time.perf_counter() - start) / len(loader)


def main() -> None:
    start = time.perf_counter()
    for step in range(10_000):
        generators.seed_all(generators.derive_seed(0, 0, step), CPU)
    seeding = (time.perf_counter() - start) / 10_000
    print(f"{describe()}, {ROUNDS} rounds")
    print(f"{'job':<22}{'ms a step':>10}{'ratio':>21}{'seeding alone':>15}")
    jobs = {"train.py": images(64), "train.py --width 8": images(8), "train_own.py": table()}
    for name, (loader, model, criterion) in jobs.items():
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        repeats = max(1, round(0.3 / (len(loader) * epoch(loader, model, criterion, optimizer))))
        without, ratios = [], []
        for _ in range(ROUNDS):
            times = {True: 0.0, False: 0.0}
            for seeds in [True, False] * repeats:
                loader._seed = type(loader)._seed.__get__(loader) if seeds else lambda *_: None
                times[seeds] += epoch(loader, model, criterion, optimizer) / repeats
            without.append(times[False])
            ratios.append(times[True] / times[False])
        step = statistics.median(without)
        print(f"{name:<22}{1000 * step:>10.2f}{spread(ratios, '.3f'):>21}{seeding / step:>14.2%}")


if __name__ == "__main__":
    main()

"""A loop that changes its dataset at an epoch gets the same batches with and without workers."""

import multiprocessing

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from bootfile.loaders.map_style import map_style_loader
from bootfile.loaders.worker_copies import read_attributes
from bootfile.sampling.sampler import BatchSampler

SIZE = 12
EPOCHS = 3
CPU = torch.device("cpu")


class Scale:
    def __init__(self):
        self.strength = 1.0

    def __call__(self, x):
        return self.strength * x


class Noisy(Dataset):
    """A dataset whose items have random noise, as much as its attributes say."""

    def __init__(self):
        self.x = torch.arange(float(SIZE))
        self.files = [f"{id}.png" for id in range(1000)]
        self.noise = 0.0
        self.range = [0.0, 1.0]
        self.shift = torch.zeros(1)
        self.transforms = [Scale()]

    def __len__(self):
        return SIZE

    def __getitem__(self, id):
        value = self.x[id] + self.noise * torch.rand(()) + self.range[1] * 100 + self.shift
        for transform in self.transforms:
            value = transform(value)
        return value, id


def change_number(dataset, epoch):
    dataset.noise = 0.1 * epoch


def change_item(dataset, epoch):
    dataset.range[1] = float(epoch)


def change_tensor(dataset, epoch):
    dataset.shift.fill_(epoch)


def replace_tensor(dataset, epoch):
    dataset.x = torch.arange(float(SIZE)) * epoch


def change_transform(dataset, epoch):
    dataset.transforms[0].strength = epoch


def change_nothing(dataset, epoch):
    dataset.noise = 0.0
    dataset.range = [0.0, 1.0]


def read(change, workers, wrap=None, start=0):
    """Return the inputs of each step, and the ids of the worker processes after each epoch."""
    dataset = Noisy()
    wrapped = dataset if wrap is None else wrap(dataset)
    loader = map_style_loader(wrapped, BatchSampler(SIZE, 4, seed=1, epochs=EPOCHS), CPU, workers=workers)
    steps = []
    processes = []
    for epoch in loader.epochs_from(start):
        change(dataset, epoch)
        for inputs, _ in loader:
            steps.append(inputs)
        processes.append({child.pid for child in multiprocessing.active_children()})
    loader.close()
    return torch.stack(steps), processes


def take_all(dataset):
    return Subset(dataset, range(SIZE))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "change, wrap",
    [
        (change_number, None),
        (change_number, take_all),
        (change_item, None),
        (change_tensor, None),
        (replace_tensor, None),
        (change_transform, None),
    ],
)
def test_workers_see_what_the_loop_changes_at_an_epoch(change, wrap):
    expected, _ = read(change, 0, wrap)
    whole, _ = read(change, 2, wrap)
    assert torch.equal(whole, expected)
    # a restart within the second epoch, whose workers begin there
    rest, _ = read(change, 2, wrap, start=4)
    assert torch.equal(rest, expected[4:])
    assert not torch.equal(expected, read(change_nothing, 0, wrap)[0])


def test_workers_stay_if_nothing_has_changed():
    _, processes = read(change_nothing, 2)
    assert processes[0]
    assert processes == [processes[0]] * EPOCHS
    _, processes = read(change_number, 2)
    assert not processes[0] & processes[1]
    assert len(processes[2]) == len(processes[0])  # those of the epochs before have ended


def test_attributes_are_compared_by_value_if_they_are_few():
    dataset = Noisy()
    dataset.itself = dataset
    dataset.counts = np.zeros(3)
    dataset.nothing = float("nan")
    dataset.names = {"a", "b"}
    dataset.weights = {torch.zeros(2): {"low": 0.5}}
    dataset.fill = torch.tensor([float("nan"), 1.0])
    before = read_attributes(dataset, None)
    assert read_attributes(dataset, None) == before
    dataset.range = [0.0, 1.0]
    assert read_attributes(dataset, None) == before
    dataset.files.append("new.png")
    assert read_attributes(dataset, None) != before
    dataset.files.pop()
    [dataset.weights[key].update(low=0.6) for key in dataset.weights]
    assert read_attributes(dataset, None) != before
    [dataset.weights[key].update(low=0.5) for key in dataset.weights]
    dataset.noise = False
    assert read_attributes(dataset, None) != before

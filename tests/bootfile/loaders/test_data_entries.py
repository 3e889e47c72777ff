"""What a data set lists of its samples identifies it: names and labels, without reading items."""

import random
from pathlib import Path

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from bootfile import torch_loader
from bootfile.loaders.data_lists import digest_entries

COUNT = 400  # number 3 is none of the 64 items that are read


class Listed(Dataset):
    """Has one list, and items that do not show it."""

    def __init__(self, entries):
        self.entries = entries

    def __len__(self):
        return COUNT

    def __getitem__(self, id):
        return torch.zeros(2), 0


class Wrapped(Dataset):
    """A data set inside, and a transform: what many projects write around a Subset."""

    def __init__(self, inner, transform=None):
        self.inner = inner
        self.transform = transform

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, id):
        return self.inner[id]


def label(id):
    return "cat" if id % 2 else "dog"


def table(values):
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame({"file": [f"{id}.jpg" for id in range(COUNT)], "label": values})


LISTS = {
    "texts": lambda values: values,
    "pairs": lambda values: [(f"{id}.jpg", value) for id, value in enumerate(values)],
    "folders": lambda values: [f"/data/{value}/{id}.jpg" for id, value in enumerate(values)],
    "paths": lambda values: [Path("data", value, f"{id}.jpg") for id, value in enumerate(values)],
    "by name": lambda values: {f"{id}.jpg": value for id, value in enumerate(values)},
    "records": lambda values: [
        {"file": f"{id}.jpg", "objects": [{"kind": value}]} for id, value in enumerate(values)
    ],
    "table": table,
}


@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize("wrap", [lambda data: data, Wrapped, lambda data: Wrapped(Subset(data, range(9)))])
def test_a_label_that_was_corrected_is_seen(kind, wrap):
    values = [label(id) for id in range(COUNT)]
    before = digest_entries(wrap(Listed(LISTS[kind](values))))
    assert before
    assert digest_entries(wrap(Listed(LISTS[kind](list(values))))) == before
    values[3] = "dog"
    assert digest_entries(wrap(Listed(LISTS[kind](values)))) != before
    values[3] = "cat"
    values.reverse()  # another order of the files
    assert digest_entries(wrap(Listed(LISTS[kind](values)))) != before


@pytest.mark.parametrize("kind", [str, Path])
def test_data_that_are_mounted_elsewhere_are_the_same(kind):
    def digest(folder):
        return digest_entries(Listed([(kind(f"{folder}/{label(id)}/{id}.jpg"), 1) for id in range(COUNT)]))

    assert digest("/mnt/a b/ü") == digest("/data/x") == digest("data")


def test_settings_and_objects_do_not_count():
    class Other:
        pass

    def make():
        data = Listed([Other() for _ in range(COUNT)])
        data.words = [str(random.random())]
        data.options = {"scratch": str(random.random())}
        data.itself = data
        return digest_entries(data)

    assert make() == make()
    named = Listed([label(id) for id in range(COUNT)])
    named.fingerprint = "version 1"
    assert digest_entries(named) == ""


def test_a_list_is_a_data_set():
    rows = [(torch.tensor([float(id)]), label(id)) for id in range(COUNT)]
    before = digest_entries(rows)
    rows[3] = (rows[3][0], "dog")
    assert digest_entries(rows) != before


def scale(factor):
    def collate(items):
        return factor * torch.stack([inputs for inputs, _ in items]), torch.tensor(
            [label for _, label in items]
        )

    return collate


def test_another_collate_fn_is_seen():
    def further(factor):
        data = DataLoader(TensorDataset(torch.ones(64, 2), torch.zeros(64)), 8, collate_fn=scale(factor))
        return torch_loader(data, torch.device("cpu")).receipt.further

    assert further(1) == further(1) != further(2)


def test_the_order_of_parts_and_another_split_are_seen():
    one, other = Listed(["a"] * COUNT), Listed(["b"] * COUNT)
    for kind in (ConcatDataset, lambda parts: StackDataset(*parts)):
        assert digest_entries(kind([one, other])) != digest_entries(kind([other, one]))
    splits = [
        random_split(one, [300, 100], generator=torch.Generator().manual_seed(seed))[0] for seed in (0, 0, 1)
    ]
    digests = [digest_entries(Wrapped(each)) for each in splits]
    assert digests[0] == digests[1] != digests[2]


DATA = TensorDataset(torch.zeros(64, 2), torch.zeros(64))


SAMPLERS = [
    (RandomSampler(DATA), RandomSampler(DATA, replacement=True)),
    (WeightedRandomSampler([1.0] * 64, 64), WeightedRandomSampler([1.0] * 63 + [2.0], 64)),
    (SubsetRandomSampler(range(32)), SubsetRandomSampler(range(32, 64))),
]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"batch_size": 8, "shuffle": True}, {"batch_size": 8}),
        ({"batch_size": 8}, {"batch_size": 9}),  # as many steps
        tuple({"batch_sampler": BatchSampler(SequentialSampler(DATA), size, False)} for size in (8, 9)),
        *[tuple({"batch_size": 8, "sampler": sampler} for sampler in pair) for pair in SAMPLERS],
    ],
)
def test_another_choice_of_samples_is_seen(before, after):
    def identity(arguments):
        loader = torch_loader(DataLoader(DATA, **arguments), torch.device("cpu"))
        return loader.receipt.further, loader.sampling

    assert identity(before) == identity(before) != identity(after)

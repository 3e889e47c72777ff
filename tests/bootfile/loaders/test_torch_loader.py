"""A DataLoader whose batches would be others after a restart is refused, with a line that says what to do."""

import contextlib

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from bootfile import BadInput, BatchSampler, torch_loader

DATA = TensorDataset(torch.arange(12.0), torch.arange(12))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


@pytest.mark.parametrize(
    "loader, reason",
    [
        (DataLoader(Stream(), 4), "IterableDataset.*not .*restart"),
        (DataLoader(DATA, 4, num_workers=1, persistent_workers=True), "has persistent_workers=True"),
        (DataLoader(DATA, 24, drop_last=True), "SequentialSampler is 12, its batch_size 24: "),
        (DataLoader(DATA, 4, sampler=range(2), drop_last=True), "range is 2, its batch_size 4: "),
        (DataLoader(DATA, batch_sampler=[]), "list is 0, its batch_size None: "),
        (DataLoader(DATA, batch_sampler=BatchSampler(12, 4, seed=0)), "BatchSampler .*epoch.* order"),
    ],
    ids=["stream", "persistent workers", "no batch", "few ids", "no list", "batch sampler"],
)
def test_a_loader_that_cannot_be_repeated_is_refused(loader, reason):
    with pytest.raises(BadInput, match=reason):
        torch_loader(loader, torch.device("cpu"))


def test_ranks_with_data_of_their_own_need_equally_many_batches():
    lengths = [torch_loader(DataLoader(DATA, size), torch.device("cpu")).compared_data for size in (4, 5, 6)]
    assert lengths[0] == lengths[1] != lengths[2]


def test_items_that_are_no_pair_are_refused_with_the_way_out_of_this_loader():
    data = TensorDataset(torch.arange(12.0), torch.arange(12), torch.arange(12))
    loader = torch_loader(DataLoader(data, 4), torch.device("cpu"))
    with pytest.raises(BadInput, match=r"list of 3: .*the loader a collate_fn"):
        for _ in loader.epochs_from(0):
            next(iter(loader))


class _Words(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, id):
        return str(id)


def test_a_collate_fn_without_a_module_is_taken():
    """Such as a method of a builtin object."""
    assert "".join.__module__ is None
    assert len(torch_loader(DataLoader(_Words(), 2, collate_fn="".join), torch.device("cpu"))) == 2


class _Bound:
    """A batch sampler of six batches whose length is only a bound."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter([place, place + 1] for place in range(0, 12, 2))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("length", [4, 6, 8])
def test_a_batch_sampler_whose_length_is_a_bound(length, workers, capfd):
    data = TensorDataset(torch.arange(12.0), torch.arange(12))
    batches = DataLoader(data, batch_sampler=_Bound(length), num_workers=workers)
    loader = torch_loader(batches, torch.device("cpu"), epochs=2)
    read = []
    with contextlib.suppress(BadInput) if length == 8 else contextlib.nullcontext():
        for _ in loader.epochs_from(0):
            read.append(len(list(loader)))
    assert read == {4: [4, 4], 6: [6, 6], 8: []}[length]
    shown = capfd.readouterr().out
    assert shown.count("_Bound has more batches than its len() of 4") == (length == 4)
    if length == 8:
        loader.seek(0)
        with pytest.raises(BadInput, match=r"_Bound ended after 6 batches, and its len\(\) is 8"):
            list(loader)


def test_a_part_of_an_epoch_has_more_batches(capfd):
    loader = torch_loader(DataLoader(DATA, batch_sampler=_Bound(6)), torch.device("cpu"))
    loader.lead(0, 4)
    assert [len(list(loader)) for _ in loader.epochs_from(0)] == [4, 2]
    assert "more batches" not in capfd.readouterr().out

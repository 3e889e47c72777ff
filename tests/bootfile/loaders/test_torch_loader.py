"""A DataLoader whose batches would be others after a restart is refused, with a line that says what to do."""

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
        (DataLoader(DATA, 24, drop_last=True), "batch_size 24 exceeds the 12 samples"),
        (DataLoader(DATA, batch_sampler=BatchSampler(12, 4, seed=0)), "BatchSampler .*epoch.* order"),
    ],
    ids=["stream", "persistent workers", "no batch", "batch sampler"],
)
def test_a_loader_that_cannot_be_repeated_is_refused(loader, reason):
    with pytest.raises(BadInput, match=reason):
        torch_loader(loader, torch.device("cpu"))


def test_items_that_are_no_pair_are_refused_with_the_way_out_of_this_loader():
    data = TensorDataset(torch.arange(12.0), torch.arange(12), torch.arange(12))
    loader = torch_loader(DataLoader(data, 4), torch.device("cpu"))
    with pytest.raises(BadInput, match=r"list of 3: .*the loader a collate_fn"):
        for _ in loader.epochs_from(0):
            next(iter(loader))

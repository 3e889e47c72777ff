"""A loader that continues after a step whose samples the receipt lacks adds them, and hands out the rest."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from bootfile import BatchSampler, map_style_loader, torch_loader

EPOCH = 4  # steps
EPOCHS = 3


def make(kind):
    data = TensorDataset(torch.arange(32.0)[:, None], torch.arange(32))
    if kind == "torch":
        return torch_loader(DataLoader(data, 8, shuffle=True), torch.device("cpu"), epochs=EPOCHS)
    return map_style_loader(data, BatchSampler(32, 8, 0, epochs=EPOCHS), torch.device("cpu"))


def train(loader, step, folder):
    """Train after `step` steps. Return (epoch, the samples of its batches) of each epoch, and the receipt."""
    loader.lead(step)
    epochs = []
    for epoch in loader.epochs_from(step):
        epochs.append((epoch, [inputs.flatten().tolist() for inputs, _ in loader]))
        loader.commit(loader.step, str(folder))
    return epochs, str(loader.receipt)


@pytest.mark.parametrize("kind", ["map", "torch"])
@pytest.mark.parametrize("recorded, step", [(0, 3), (4, 6), (5, 8), (4, 8), (9, 12), (6, 6)])
def test_the_receipt_is_that_of_a_whole_run(kind, recorded, step, tmp_path):
    epochs, receipt = train(make(kind), 0, tmp_path / "whole")
    batches = [(epoch, batch) for epoch, of_epoch in epochs for batch in of_epoch]
    first = make(kind)
    first.lead(0)
    number = 0
    for _ in first.epochs_from(0):
        for _ in first:
            number += 1
            if number == recorded:
                first.commit(number, str(tmp_path))
    again = make(kind)
    again.receipt.load_state_dict(first.receipt.state_dict())
    epochs, receipt_again = train(again, step, tmp_path)
    assert receipt_again == receipt
    assert [(epoch, batch) for epoch, of_epoch in epochs for batch in of_epoch] == batches[step:]
    # an epoch that has ended comes once without batches, because its evaluation may be missing
    assert epochs[0][0] == max(1, -(-step // EPOCH))
    assert (tmp_path / "receipt.bin").read_bytes() == (tmp_path / "whole" / "receipt.bin").read_bytes()

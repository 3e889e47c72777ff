"""The seed of a job decides its weights, order and crops; each epoch and step has others."""

import torch

from bootfile.receipt.reading import read_records
from tests.conftest import QUICK, run

JOB = (*QUICK, "--batch_size=240", "--epochs=2", "--save_every=1epoch", "--lr=1e-20")


def train(output, seed):
    """Return the sums of each step (ids, labels, crops), and the weights, which so small a rate leaves."""
    run("jobs/train.py", *JOB, f"--seed={seed}", f"--output_dir={output}")
    weights = torch.load(output / "epoch_2.pth", weights_only=True)
    return read_records(str(output))["sums"], weights["conv1.0.weight"]


def test_each_seed_has_weights_order_and_crops_of_its_own(tmp_path):
    sums, weights = train(tmp_path / "one", 1)
    others, other_weights = train(tmp_path / "two", 2)
    assert sums.shape == others.shape == (10, 3)
    assert (sums != others).all()
    # no two steps of the two epochs have the same samples or crops
    assert all(len({*column}) == len(column) for column in (sums[:, 0].tolist(), sums[:, 2].tolist()))
    assert not torch.isclose(weights, other_weights).any()
    again, same_weights = train(tmp_path / "again", 1)
    assert (again == sums).all() and torch.equal(weights, same_weights)

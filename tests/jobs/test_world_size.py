"""Losses are the same in 1, 2 and 4 processes."""

import pytest

from tests.conftest import QUICK, records, run_ranks


@pytest.mark.parametrize("several", [2, pytest.param(4, marks=pytest.mark.faults)])
def test_losses_are_equal(several, tmp_path):
    """In double precision, so that only errors in the computation remain (see tests/support/float64.py)."""
    losses = {}
    for ranks in (1, several):
        output = tmp_path / str(ranks)
        run_ranks(
            "-m", "tests.support.float64", "jobs/train_ddp.py", *QUICK, "--max_steps=25",
            "--batch_size=8", "--lr=0.01", "--report_every=1", f"--output_dir={output}", ranks=ranks,
        )  # fmt: skip
        losses[ranks] = [record["loss"] for record in records(output) if "loss" in record]
    assert len(losses[1]) == 25 and max(losses[1]) - min(losses[1]) > 0.1, "the loss does not change"
    assert losses[several] == pytest.approx(losses[1], abs=1e-4)

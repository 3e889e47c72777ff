"""Losses are the same in 1, 2 and 4 processes."""

import pytest

from tests.conftest import QUICK, losses, run_ranks

pytestmark = pytest.mark.rounding


@pytest.mark.parametrize("several", [2, pytest.param(4, marks=pytest.mark.thorough)])
def test_losses_are_equal(several, tmp_path):
    """In double precision, so that only errors in the computation remain (see tests/support/float64.py)."""
    reported = {}
    for ranks in (1, several):
        output = tmp_path / str(ranks)
        run_ranks(
            "-m", "tests.support.float64", "jobs/train_ddp.py", *QUICK, "--max_steps=25",
            "--batch_size=8", "--lr=0.01", "--report_every=1", f"--output_dir={output}", ranks=ranks,
        )  # fmt: skip
        reported[ranks] = losses(output)
    assert len(reported[1]) == 25 and max(reported[1]) - min(reported[1]) > 0.02, "the loss does not change"
    assert reported[several] == pytest.approx(reported[1], abs=1e-4)

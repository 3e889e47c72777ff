"""The same losses in 1, 2 and 4 processes."""

import pytest

from tests.conftest import records, run


@pytest.mark.parametrize("several", [2, pytest.param(4, marks=pytest.mark.faults)])
def test_losses_are_equal_over_fifty_steps(several, tmp_path):
    """In double precision, which leaves only differences of the mathematics (tests/support/float64.py says
    why)."""
    losses = {}
    for processes in (1, several):
        output = tmp_path / str(processes)
        run(
            "-m", "tests.support.float64", "jobs/train_ddp.py", "--dataset=digits", "--max_steps=50",
            "--batch_size=8", "--lr=0.01", "--report_every=1", f"--processes_per_node={processes}",
            f"--output_dir={output}", timeout=300,
        )  # fmt: skip
        losses[processes] = [record["loss"] for record in records(output) if "loss" in record]
    assert len(losses[1]) == 50 and max(losses[1]) - min(losses[1]) > 0.1, "something was trained"
    assert losses[several] == pytest.approx(losses[1], abs=1e-4)

"""Data that hang, as on a mount that does not answer: the sample is named, and a signal saves at once."""

import os
import signal

import pytest

from tests.conftest import finish, start
from tests.support.exact import changed

BLOCK = """
    from bootfile.loaders import reading
    reading._PATIENCE = reading._POLL = 0.2

    class Hangs(torch.utils.data.TensorDataset):
        def __getitem__(self, id):
            if os.path.exists(FIFO):
                open(FIFO).read()
            return super().__getitem__(id)

    patients = Hangs(table, progression)
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_a_read_that_hangs_is_named_and_a_signal_saves_the_last_step(tmp_path, workers):
    fifo, output = tmp_path / "fifo", tmp_path / "out"
    line = "    patients = torch.utils.data.TensorDataset(table, progression)  # items are (input, target)\n"
    job = changed("train_own.py", tmp_path / "train.py", (line, BLOCK.replace("FIFO", repr(str(fifo)))))
    process = start(
        job, "--epochs=100000", "--batch_size=32", "--lr=0.01", "--report_every=1", f"--workers={workers}",
        f"--output_dir={output}", "--epoch_weights=false",
    )  # fmt: skip
    hung = False
    for line in process.stdout:
        if "step=3/" in line:
            os.mkfifo(fifo)
        if hung := "waiting for data for " in line:
            assert "sample" in line and "Subset" in line
            break
    assert hung
    process.send_signal(signal.SIGTERM)
    text = finish(process, 143).stdout
    assert "stopped as asked after step" in text and "not stopped within" not in text
    os.remove(fifo)
    step = int(text.partition("stopped as asked after step ")[2].partition(";")[0])
    assert (output / "checkpoints" / f"step_{step}.pt").exists()

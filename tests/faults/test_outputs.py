"""If an output folder fills up, becomes read-only or disappears, the job names it and loses no older file."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from bootfile.exact import checked_files
from bootfile.exact import files as checkpoint
from tests.conftest import finish, names, read_until, start
from tests.support import small_disk as disks

pytestmark = pytest.mark.thorough

JOB = (
    "jobs/train.py", "--dataset=digits", "--batch_size=96", "--epochs=3", "--report_every=1",
    "--save_every=5",
)  # fmt: skip


@pytest.fixture
def small_disk(tmp_path):
    with disks.small_disk(tmp_path / "disk", "400m") as folder:
        yield folder


def _newest(output: Path) -> int:
    return checked_files.read(checkpoint.list_newest_first(str(output / "checkpoints"))[0])["step"]


def test_a_disk_that_fills_up_and_is_emptied(small_disk):
    job = start(*JOB, f"--output_dir={small_disk}")
    read_until(job, " step=12/")
    filler = small_disk / "filler"
    with open(filler, "wb") as file, pytest.raises(OSError, match="No space left on device"):
        while True:
            file.write(bytes(2**20))
    read_until(job, "was not saved: No space left on device")
    newest = _newest(small_disk)
    assert newest >= 5
    filler.unlink()
    output = finish(job, None).stdout
    assert " step=42/" in output
    assert _newest(small_disk) > newest, "the next save tries again"


def test_an_output_that_turns_read_only(small_disk):
    job = start(*JOB, f"--output_dir={small_disk}")
    read_until(job, " step=12/")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], capture_output=True)
    if os.access(small_disk, os.W_OK):
        # a remount fails while files are open for writing, so bind it read-only over itself
        subprocess.run(["mount", "--bind", str(small_disk), str(small_disk)], check=True)
        subprocess.run(["mount", "-o", "remount,ro,bind", str(small_disk)], check=True)
    result = finish(job, 6)
    assert "was not saved: Read-only file system" in result.stdout and " step=42/" in result.stdout
    assert "error: " in result.stderr and "Read-only file system" in result.stderr
    assert _newest(small_disk) >= 5
    subprocess.run(["umount", str(small_disk)], capture_output=True)


def test_an_output_that_is_removed(tmp_path):
    output = tmp_path / "output"
    job = start(*JOB, f"--output_dir={output}")
    read_until(job, " step=12/")
    shutil.rmtree(output, ignore_errors=True)
    shutil.rmtree(output, ignore_errors=True)
    printed = finish(job).stdout
    assert names(printed, f"warning: {output / 'checkpoints'} was deleted", "checkpoints are lost")
    assert _newest(output) == 42 and (output / "epoch_3.pth").exists()
    assert '"step": 42' in (output / "metrics.jsonl").read_text()

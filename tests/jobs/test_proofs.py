"""A killed run continues exactly: `launch prove` compares its states, figures, weights and samples with those
of a whole run.

Other ways to stop a job, such as SIGTERM or a lost disk, and restarts on other processes are in other files.
"""

from typing import NamedTuple

import pytest

from bootfile.prove.cases import KILLED
from bootfile.prove.own_job import OwnJob
from launch.new.cli import make_job
from tests.conftest import CAN_FORK, QUICK, ROOT, cases, records
from tests.jobs.test_train_fsdp import ADAMW
from tests.jobs.test_train_own import OPTIONS, TEXT, write_job
from tests.jobs.test_train_text import OPTIONS as LANGUAGE
from tests.support.exact import changed
from tests.support.proofs import forked_jobs, prove_cases

OTHER, KILLED_ON_2 = "another number of processes", "2 processes, killed and restarted"
ALL = (KILLED, OTHER, KILLED_ON_2)
IMAGENET = (
    "--custom_data=true", "--cache_dir=FOLDER", "--arch=shufflenet_v2_x0_5", "--image_size=32",
    "--batch_size=64", "--epochs=2", "--max_steps=20", "--save_every=4", "--data_backend=threads",
    "--warmup=1", "--ema=0.9", "--mixup=0.2", "--cutmix=1", "--trivial_augment", "--accumulate=2",
    "--random_erasing=0.5", "--clip_grad=1", "--first_image_size=16",
)  # fmt: skip
FSDP = (*QUICK, "--batch_size=32", "--max_steps=6", "--save_every=2", "--lr=0.02")


class Row(NamedTuple):
    """A job, as a function that writes it into a folder, with options and cases of `prove`.

    FOLDER in an option is a folder of the test. has_same_loss: on 2 processes, but for rounding.
    """

    write: object
    options: tuple
    cases: tuple
    has_same_loss: bool = False


def write_language_model(folder):
    return changed(make_job(ddp=True, amp=False, text=True), folder / "train.py")


OWN, TWO = (*OPTIONS, "--max_steps=12"), "--processes_per_node=2"
JOBS = {
    "table": Row(lambda folder: write_job(folder, None, False), OWN, (KILLED,)),
    # 12 steps of a table may have ended before the kill
    "table on 2": Row(
        lambda folder: write_job(folder, None, True), (*OPTIONS, "--max_steps=60"), ALL, has_same_loss=True
    ),
    "words on 2": Row(lambda folder: write_job(folder, TEXT, True), (*OWN, TWO), (KILLED, OTHER)),
    "words on 4": Row(
        lambda folder: write_job(folder, TEXT, True), (*OWN, "--processes_per_node=4"), (KILLED, OTHER)
    ),
    "language model": Row(write_language_model, (*LANGUAGE, "--max_steps=15"), (KILLED,)),
    "language model on 2": Row(write_language_model, (*LANGUAGE, "--max_steps=15"), ALL),
    "images": Row(lambda folder: ROOT / "jobs" / "imagenet.py", IMAGENET, (KILLED,)),
    "FSDP": Row(lambda folder: ROOT / "jobs" / "train_fsdp.py", (*FSDP, TWO), (KILLED,)),
    "FSDP with AdamW": Row(
        lambda folder: changed("train_fsdp.py", folder / "job.py", ADAMW), FSDP, (KILLED,)
    ),
}


@pytest.mark.parametrize("name", cases(JOBS, *JOBS.keys() - {"table", "language model"}))
def test_a_killed_run_continues_exactly(name, tmp_path):
    if "FSDP" in name and not CAN_FORK:
        pytest.skip("fully_shard() needs torch 2.6, too")
    row = JOBS[name]
    for folder in ("job", "runs"):
        (tmp_path / folder).mkdir()
    options = [each.replace("FOLDER", str(tmp_path / "cache")) for each in row.options]
    with forked_jobs():
        job = OwnJob(str(row.write(tmp_path / "job")), options, str(tmp_path / "runs"), 1)
    results = prove_cases(job, *row.cases)
    assert {each.result for each in results.values()} == {"equal"} and job.doubts == [], results
    if row.has_same_loss:
        one, two = (
            [line for line in records(job.folder(run)) if "val_loss" in line][-1]
            for run in ("reference", OTHER)
        )
        assert one["val_count"] == two["val_count"]
        assert one["val_loss"] == pytest.approx(two["val_loss"], rel=1e-3)

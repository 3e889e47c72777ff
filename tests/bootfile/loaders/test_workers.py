"""Workers that cannot deliver their batches end the job with one line, and never let it wait for ever."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bootfile.loaders.workers import NotDelivered, Workers
from bootfile.sampling.plan import Plan
from bootfile.sampling.sampler import BatchSampler
from tests.conftest import run

ROOT = Path(__file__).parents[3]


class Index:
    fingerprint = "x"

    def __init__(self):
        self.labels = np.zeros(8, np.int64)

    def __len__(self):
        return 8


def plan():
    return Plan(Index(), BatchSampler(8, 2, 0, 1), None, 8)


def test_a_result_that_cannot_be_sent_is_an_error_of_the_job():
    def result(batch):
        return (lambda: None) if batch.ids[0] % 2 else torch.zeros(1)

    with pytest.raises(NotDelivered, match=r"cannot send a batch: .*pickle"):
        list(Workers(2, False).load(plan(), result))


class Unsendable:
    def __reduce__(self):
        raise KeyError("no such part")


def test_an_error_in_the_code_of_a_result_has_its_traceback(capfd):
    with pytest.raises(NotDelivered, match="cannot send a batch: KeyError: 'no such part'"):
        list(Workers(1, False).load(plan(), lambda batch: Unsendable()))
    assert 'raise KeyError("no such part")' in capfd.readouterr().err


def test_workers_ignore_the_sigterm_of_a_platform_also_after_close():
    pool = Workers(1, pinned=False)
    for _ in range(2):
        batches = pool.load(plan(), lambda batch: torch.tensor(os.getpid()))
        _, worker = next(batches)
        os.kill(int(worker), signal.SIGTERM)
        assert len(list(batches)) == 3
        pool.close()


SMALL = """
import os, sys; sys.path.insert(0, os.getcwd())
import numpy as np, torch
from common.distributed.entry import entry
from bootfile.loaders.map_style import map_style_loader
from bootfile.sampling.sampler import BatchSampler

class Large(torch.utils.data.Dataset):
    fingerprint = "x"
    def __len__(self): return 8
    def __getitem__(self, id): return torch.zeros(300_000), id

entry(lambda: list(map_style_loader(Large(), BatchSampler(8, 4, 0, 1), torch.device("cpu"), workers=2)))()
"""


@pytest.mark.thorough
def test_a_small_dev_shm_ends_a_job_with_a_line_that_names_the_way_out():
    command = 'mount -t tmpfs -o size=2m tmpfs /dev/shm && exec "$@"'
    in_namespace = ["unshare", "-m", "bash", "-c", command, "bash"]
    if subprocess.run([*in_namespace, "true"], capture_output=True).returncode:
        pytest.skip("mounting a small /dev/shm needs root and unshare")
    job = subprocess.run(
        [*in_namespace, sys.executable, "-c", SMALL], cwd=ROOT, capture_output=True, text=True
    )
    last = job.stderr.splitlines()[-1].strip("\0")  # torch 2.1 ends its own line with one
    assert job.returncode == 2 and last.startswith("error: ") and "--shm-size" in last, job.stderr


UNFINISHED = """
import sys; sys.path.insert(0, "")
import torch
from bootfile.loaders.map_style import map_style_loader
from bootfile.sampling.sampler import BatchSampler

data = torch.utils.data.TensorDataset(torch.zeros(64, 3), torch.arange(64))
batches = iter(map_style_loader(data, BatchSampler(64, 4, 0, 1), torch.device("cpu"), workers=2))
next(batches)
kept = [batches]
kept.append(kept)
torch.kept = kept  # it lives until the process has ended
sys.exit(3)
"""


# at the end, multiprocessing waits for workers before finalizers run that are older than it
FINALIZER_FIRST = """
import sys, weakref
weakref.finalize(type("Any", (), {}), print)
assert "multiprocessing.util" not in sys.modules
"""


@pytest.mark.thorough
@pytest.mark.parametrize("before", ["", FINALIZER_FIRST], ids=["plain", "finalizer"])
def test_a_script_that_ends_within_an_epoch_ends_its_workers(before):
    run("-c", before + UNFINISHED, code=3, fresh=True, timeout=60)

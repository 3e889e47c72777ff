"""In forty epochs of each loader, memory does not grow and no process or thread remains."""

import threading
from pathlib import Path

import psutil
import pytest
import torch

from bootfile.sampling.plan import Plan
from bootfile.sampling.sampler import BatchSampler
from datasets.folders import image_folder, random_folder
from datasets.loaders import backends
from datasets.sampling.augment import random_resized_crop
from datasets.stores import forms, pack
from datasets.stores.files import FileStore
from tests.conftest import run

pytestmark = pytest.mark.thorough

EPOCHS = 40
HERE = [name for name, reason in backends.reasons(torch.device("cpu")).items() if not reason]
SCRIPT = """
import sys
from tests.faults.test_loader_soak import soak
soak(*sys.argv[1:])
"""


def measure(pid: int) -> int:
    """Return the memory of a process in bytes, with shared memory divided among its users.

    Files do not count: their share changes if any process of the machine maps the same libraries. What the
    kernel has swapped out does: it comes back.
    """
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    sizes = {name: int(size.split()[0]) for name, _, size in (line.partition(":") for line in lines[1:])}
    return 1024 * (sizes["Pss_Anon"] + sizes["Pss_Shmem"] + sizes["SwapPss"])


def soak(folder: str, cache: str, backend: str, form: str) -> None:
    """Print the resident bytes of this process and its children after every epoch.

    At the end print the number of remaining processes and threads.
    """
    index = image_folder.load(folder, "train", cache)
    store = pack.build(index, f"{cache}/{form}", form) if form in forms.FORMS else FileStore(index)
    plan = Plan(index, BatchSampler(len(index), 32, 0), random_resized_crop, 160)
    with backends.build(backend, store, plan, torch.device("cpu"), 2) as loader:
        for epoch in range(1, EPOCHS + 1):
            loader.seek((epoch - 1) * len(loader))
            for _ in loader:
                pass
            loader.receipt.take()
            own = psutil.Process()
            processes = [own, *own.children(recursive=True)]
            print(sum(measure(each.pid) for each in processes), flush=True)
    psutil.wait_procs(psutil.Process().children(), timeout=60)
    threads = [
        thread.name for thread in threading.enumerate() if thread.name.startswith(("loader", "reader"))
    ]
    print("left", len(psutil.Process().children(recursive=True)), len(threads))


@pytest.mark.parametrize("form", ["files", *forms.FORMS])
@pytest.mark.parametrize("backend", HERE)
def test_memory_does_not_grow(backend, form, tmp_path):
    folder = random_folder.make(str(tmp_path / "images"))
    words = (folder, tmp_path / "cache", backend, form)
    lines = run("-c", SCRIPT, *words, timeout=900, fresh=True).stdout.splitlines()
    used, left = [int(line) for line in lines if line.isdigit()], lines[-1]
    assert left == "left 0 0" and len(used) == EPOCHS
    # A leak grows in each part of the run. glibc keeps memory of the first epochs, DALI's buffers grow with
    # the largest image so far, workers keep batches: all grow in single steps, of up to 3 % and in any part.
    growth = [used[last - 1] / used[last - 6] - 1 for last in range(10, EPOCHS + 1, 5)]
    print(f"{backend} from {form}: {used[4] / 1e6:.0f} MB after epoch 5, then by {growth}")
    assert sum(each < 0.005 for each in growth) > 1

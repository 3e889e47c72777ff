"""A limit of processes and threads (pids.max, ulimit -u) ends a job with one line that names it."""

import errno
import os
import resource

import pytest

from bootfile.machine import process_limits
from bootfile.machine.control_groups import ProcessLimit
from bootfile.processes import sessions
from datasets.folders import random_folder
from tests.conftest import environment, names, run, wait_until
from tests.support.control_groups import make_tree, real_group


@pytest.mark.parametrize(
    "most, used, needed, is_short", [(20, 5, 15, False), (20, 5, 16, True), (20, 30, 1, True)]
)
def test_room_for_processes(most, used, needed, is_short, tmp_path):
    files = {
        "job/step/pids.max": "max\n",
        "job/pids.max": f"{most}\n",
        "job/pids.current": f"{used}\n",
        "pids.max": "max\n",
    }
    root = make_tree(tmp_path, "0::/job/step\n", files)
    line = process_limits.shortage(needed, "8 workers", root)
    assert bool(line) == is_short
    if is_short:
        assert f"limit of {most} processes and threads (pids.max of " in line and "/job)" in line
        assert names(line, f"{used} run", "8 workers", f"{needed} more")


def test_errors_of_another_kind_are_not_explained():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with pytest.raises(BlockingIOError) as full:
        while True:
            os.write(writer, bytes(2**16))
    for error in (full.value, RuntimeError("shapes differ"), OSError(errno.ENOENT, "no such file")):
        assert process_limits.explain(error) == ""
    os.close(reader)
    os.close(writer)


# The program enters a control group, and leaves the rest of its arguments.
ENTER = """
import os, runpy, sys; sys.path.insert(0, "")
with open(os.path.join(sys.argv.pop(1), "cgroup.procs"), "w") as file:
    file.write(str(os.getpid()))
"""
RUN = """
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
START = """
import os, subprocess, sys, threading, time
from common.distributed.entry import entry
def thread(): threading.Thread(target=time.sleep, args=[60], daemon=True).start()
def fork():
    if not os.fork(): time.sleep(2), os._exit(0)
kept = []  # a process that has ended counts until its parent has waited for it
def program(): kept.append(subprocess.Popen(["sleep", "2"]))
def main():
    for _ in range(99): globals()[sys.argv[1]]()
entry(main)()
"""


@pytest.mark.parametrize("what", ["thread", "fork", "program"])
def test_a_start_that_the_kernel_refuses_is_one_line(what):
    with real_group("pids", {"pids.max": "16"}) as folder:
        job = run("-c", ENTER + START, folder, what, code=2)
        wait_until_empty(folder)
    (line,) = job.stderr.splitlines()
    kind = "thread" if what == "thread" else "process"
    assert line.startswith(f"error: a {kind} cannot be started")
    assert "limit of 16 processes and threads (pids.max of " in line


def wait_until_empty(folder):
    """Wait until the processes that a job has left behind have ended: a group is removed when it is empty."""
    wait_until(lambda: not (folder / "cgroup.procs").read_text())


LOADER = """
import os, sys; sys.path.insert(0, os.getcwd())
import torch
from bootfile.loaders.map_style import map_style_loader
from bootfile.loaders.torch_loader import torch_loader
from bootfile.machine import process_limits
from bootfile.sampling.plan import Plan
from bootfile.sampling.sampler import BatchSampler
from common.distributed.entry import entry
from datasets.folders import image_folder
from datasets.loaders import backends
from datasets.sampling.augment import random_resized_crop
from datasets.stores.files import FileStore

kind, images, is_visible = sys.argv[1:]
if is_visible == "False":  # as in a pod, whose limit is that of a group outside of its container
    process_limits.find_limit = lambda root="/": None
cpu = torch.device("cpu")
data = torch.utils.data.TensorDataset(torch.zeros(64, 3), torch.arange(64))

def main():
    if kind == "map_style":
        loader = map_style_loader(data, BatchSampler(64, 4, 0, 1), cpu, workers=8)
    elif kind == "torch_loader":
        loader = torch_loader(torch.utils.data.DataLoader(data, batch_size=4, num_workers=8), cpu)
    else:
        index = image_folder.load(images, "train", f"{images}.{os.getpid()}")
        plan = Plan(index, BatchSampler(len(index), 8, 0, 1), random_resized_crop, 32)
        loader = backends.build(kind, FileStore(index), plan, cpu, workers=12)
    for batch in loader: pass

entry(main)()
"""


def test_a_group_with_more_room_than_the_limit_of_the_user_is_not_named(monkeypatch):
    limit = ProcessLimit(20_000, 300, "pids.max of /group")
    monkeypatch.setattr(process_limits, "find_limit", lambda: limit)
    for of_user, is_named in ((12, False), (30_000, True), (resource.RLIM_INFINITY, True)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, of_user=of_user: (of_user, of_user))
        line = process_limits.explain_refusal("8 workers need more")
        assert ("pids.max" in line) == is_named and "8 workers" in line and "ulimit -u" in line


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return random_folder.make(str(tmp_path_factory.mktemp("data") / "images"))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind, is_visible",
    [
        ("map_style", True), ("map_style", False), ("torch_loader", True), ("pytorch", True),
        ("pytorch", False), ("threads", True), ("threads", False),
    ],
)  # fmt: skip
def test_a_loader_that_may_not_start_its_workers_is_refused(kind, is_visible, images):
    with real_group("pids", {"pids.max": "12"}) as folder:
        words = ("-c", ENTER + LOADER, folder, kind, images, is_visible)
        job = run(*words, code=2, env=environment(OMP_NUM_THREADS="1"))
        wait_until_empty(folder)
    # with a limit that is not known, a worker that may start no thread writes a traceback of its own
    assert not is_visible or "Traceback" not in job.stderr
    (line,) = (line for line in job.stderr.splitlines() if line.startswith("error: "))
    assert "processes and threads" in line and "--workers" in line
    assert ("limit of 12 processes and threads (pids.max of " in line) == is_visible


@pytest.mark.parametrize("command", [["jobs/train_ddp.py"], ["jobs/train_exact.py", "--elastic=true"]])
def test_a_job_that_may_not_start_its_processes_is_refused(command, tmp_path):
    if "--elastic=true" in command and sessions.why_no_fork():
        pytest.skip(sessions.why_no_fork())
    words = [*command, "--dataset=digits", "--processes_per_node=4", f"--output_dir={tmp_path}"]
    with real_group("pids", {"pids.max": "16"}) as folder:
        job = run("-c", ENTER + RUN, folder, *words, "--enable_gpu=false", code=2)
        wait_until_empty(folder)
    (line,) = job.stderr.splitlines()
    assert line.startswith("error: limit of 16 processes and threads (pids.max of ")
    assert names(line, "4 processes", "need about")


def test_threads_of_torch_that_may_not_be_started_are_refused(tmp_path):
    """OpenMP would end the process in the first step, with a line of its own."""
    words = ["jobs/train.py", "--dataset=digits", "--max_steps=1", "--threads=64", f"--output_dir={tmp_path}"]
    with real_group("pids", {"pids.max": "32"}) as folder:
        job = run("-c", ENTER + RUN, folder, *words, "--enable_gpu=false", code=2)
        wait_until_empty(folder)
    assert names(job.stderr.splitlines()[-1], "64 threads", "63 more")

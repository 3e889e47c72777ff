"""Jobs with results and data on real mounts: killed, two at a time, hanging, full, read-only, lost."""

import json
import os
import re
import signal
import subprocess

import pytest

from bootfile.exact import checked_files, files
from bootfile.ground.mounts import LEASE as FOLDER
from bootfile.receipt.reading import read_records
from datasets.memory.cifar10 import CLASSES
from tests.conftest import (
    QUICK,
    finish,
    read_until,
    refused,
    run,
    start,
    start_ranks,
    start_until,
    wait_until,
)
from tests.real.mounts import KINDS
from tests.support import pictures

pytestmark = pytest.mark.real
STEPS, SAVE = 66, 4
KILLED = ("jobs/train_ddp.py", "--width=8", "--batch_size=16", f"--save_every={SAVE}", "--report_every=1")
KILLED += (f"--max_steps={STEPS}", "--epochs=30", "--enable_gpu=false")
JOB = ("jobs/train.py", *QUICK, "--batch_size=96", "--epochs=7", "--save_every=10", "--report_every=1")
LONG = ("jobs/train.py", *QUICK, "--batch_size=96", "--epochs=9999", "--save_every=50", "--report_every=50")


def mounted(kind, folder):
    """Return storage of this kind, with a mount at its `folder / "mount"`. Skip the test if there is none."""
    if reason := KINDS[kind].missing():
        pytest.skip(reason)
    return KINDS[kind](folder)


@pytest.fixture
def storage(request, tmp_path):
    made = mounted(request.param, tmp_path / request.param)
    yield made
    made.close()


def begin(storage, *command, **options):
    """Start a job that ends with its mount at the latest."""
    storage.jobs.append(start(*command, **options))
    return storage.jobs[-1]


def of_kinds(*names):
    return pytest.mark.parametrize("storage", names or KINDS, indirect=True)


def results(folder):
    """Return the last receipt and the states of the planned saves."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    states = [json.loads(line) for line in (folder / "state.jsonl").read_text().splitlines()]
    receipts = [line["receipt"] for line in lines if "receipt" in line]
    return receipts[-1], {line["step"]: line["digest"] for line in states if line.get("planned")}


def check_equal(folder, whole):
    assert results(folder) == results(whole)
    printed = run("-m", "launch", "receipt", folder, whole).stdout
    assert "data equal" in printed and "state equal" in printed, printed


def check_checkpoints(folder):
    """Check that each checkpoint is whole. Return their steps, the newest first."""
    return [checked_files.read(path)["step"] for path in files.list_newest_first(str(folder / "checkpoints"))]


def images(folder):
    for split, count in (("train", 20), ("test", 2)):
        for name in CLASSES:
            pictures.write(folder / split / name, count, (32, 32), "png")
    return folder


def undisturbed(folder):
    """Run the job of kill_and_continue() on the local disk, and return its output folder."""
    data = images(folder / "data")
    for job in start_ranks(*KILLED, f"--data_url={data}", f"--output_dir={folder / 'run'}"):
        finish(job)
    return folder / "run"


def kill_and_continue(storage, whole, kills):
    """Kill a job of two processes, whose data and results are on the mount, at as many steps."""
    place = storage.mount()
    subprocess.run(["cp", "-r", whole.parent / "data", place], check=True)
    command = (*KILLED, f"--data_url={place / 'data'}", f"--output_dir={place / 'run'}")
    for number in range(kills):
        jobs = start_ranks(*command)
        storage.jobs += jobs
        lines = read_until(jobs[0], rf" step={STEPS * (number + 1) // (kills + 1)}/")
        for job in jobs:
            job.kill()
        for job in jobs:
            finish(job, -signal.SIGKILL)
        assert any("resumed from" in line for line in lines) == (number > 0)
    for job in start_ranks(*command):
        finish(job)
    check_equal(place / "run", whole)
    check_checkpoints(place / "run")


@pytest.fixture(scope="module")
def whole_pair(tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the output folder of JOB on the local disk."""
    folder = tmp_path_factory.mktemp("whole")
    run(*JOB, f"--output_dir={folder}")
    return folder


@of_kinds()
def test_three_kills(storage, whole_pair):
    kill_and_continue(storage, whole_pair, 3)


@of_kinds("s3fs", "juicefs", "sshfs")
def test_two_jobs_on_two_mounts_of_one_folder(storage):
    """The second job is refused. After a kill the folder is free, also where a mount has cached names."""
    one, two = storage.mount("one"), storage.mount("two")
    first = begin(storage, *LONG, f"--output_dir={one / 'run'}")
    wait_until(lambda: list(one.glob("run/checkpoints/*.pt")), first)
    line = refused_last(begin(storage, *LONG, "--seed=2", f"--output_dir={two / 'run'}"))
    assert f"{two / 'run'} belongs to another job that is running" in line
    if storage.kind != "juicefs":  # its locks hold on all mounts; the others renew a lease
        names = os.listdir(one / "run" / FOLDER)
        wait_until(lambda: os.listdir(one / "run" / FOLDER) != names, first)
    first.kill()
    assert "warning" not in finish(first, -signal.SIGKILL).stdout
    again = begin(storage, *LONG, f"--output_dir={two / 'run'}")
    lines = read_until(again, "resumed from")
    assert check_checkpoints(one / "run")[0] == int(re.search(r"step_(\d+)\.pt", lines[-1])[1])
    read_until(again, r" step=\d+/.* loss=")
    again.send_signal(signal.SIGTERM)
    assert "warning" not in finish(again, 143).stdout
    steps = read_records(str(two / "run"))["step"].tolist()
    assert steps == list(range(1, check_checkpoints(two / "run")[0] + 1))


def refused_last(job):
    """Return the last line of stderr of a job that is refused."""
    return finish(job, 2).stderr.splitlines()[-1]


@of_kinds("s3fs")
def test_a_mount_that_hangs(storage, whole):
    """The job names the mount after 30 s, and continues when it answers."""
    place = storage.mount()
    job = begin(storage, *JOB, f"--output_dir={place / 'run'}")
    read_until(job, " step=25/")
    storage.send(place, signal.SIGSTOP)
    line = read_until(job, "has not answered for 30 s")[-1]
    assert f"{place / 'run'} has not answered" in line and job.poll() is None
    storage.send(place, signal.SIGCONT)
    finish(job)
    check_equal(place / "run", whole)


@of_kinds("juicefs")
def test_a_mount_that_hangs_longer_than_timeout(storage, whole_pair):
    """The processes end while it hangs, even if the kernel cannot end the one that waits for the mount."""
    place = storage.mount()
    command = (*KILLED, f"--data_url={whole_pair.parent / 'data'}", f"--output_dir={place / 'run'}")
    # it stops itself after this line: a job on a busy machine may end before its line is read
    job, _, continue_it = start_until(*command, "--processes_per_node=2", "--timeout=10", at=" step=21/")
    storage.jobs.append(job)
    storage.send(place, signal.SIGSTOP)
    continue_it()
    try:
        assert job.wait(90) == 5
    finally:
        storage.send(place, signal.SIGCONT)
    assert "rank 1 on " in (line := job.stderr.read()) and "lost contact with another process" in line
    run(*command, "--processes_per_node=2", fresh=True)
    check_equal(place / "run", whole_pair)


@of_kinds("s3fs", "juicefs", "sshfs", "tmpfs")
def test_a_mount_that_is_read_only(storage):
    place = storage.mount(options={"juicefs": "--read-only"}.get(storage.kind, "ro"))
    line = refused(*JOB, f"--output_dir={place / 'run'}")
    assert str(place / "run") in line and "Read-only file system" in line


def make_read_only(place):
    """A remount fails while files are open for writing, so bind it over itself first."""
    subprocess.run(["mount", "--bind", place, place], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", place], check=True)


@of_kinds("juicefs", "sshfs")
def test_a_mount_that_turns_read_only(storage, whole):
    """The job ends with code 6, the older checkpoints are whole, and the job continues exactly."""
    place = storage.mount()
    folder = storage.folder / "server" if storage.kind == "sshfs" else place  # the server's own
    job = begin(storage, *JOB, f"--output_dir={place / 'run'}")
    read_until(job, " step=25/")
    make_read_only(folder)
    try:
        result = finish(job, 6)
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
    reason = (
        "Operation not permitted" if storage.kind == "sshfs" else "Read-only file system"
    )  # SFTP has no EROFS
    assert f"was not saved: {reason}" in result.stdout and reason in result.stderr
    continue_exactly(place, whole)


def continue_exactly(place, whole):
    """Start JOB again after it could not save, and compare it with the undisturbed run."""
    assert check_checkpoints(place / "run")[0] in range(10, 98, 10)
    assert "resumed from" in run(*JOB, f"--output_dir={place / 'run'}").stdout
    check_equal(place / "run", whole)


@of_kinds("juicefs", "sshfs", "tmpfs")
def test_a_mount_that_is_full(storage, whole):
    if storage.kind == "juicefs":
        storage.limit(1)
    elif storage.kind == "sshfs":
        (storage.folder / "server").mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64m", "bootfile-test", storage.folder / "server"], check=True
        )
    place = storage.mount()
    filler = (storage.folder / "server" if storage.kind == "sshfs" else place) / "filler"
    try:
        job = begin(storage, *JOB, f"--output_dir={place / 'run'}")
        read_until(job, " step=25/")
        with open(filler, "wb") as file:
            space = os.statvfs(filler)
            os.posix_fallocate(file.fileno(), 0, space.f_bavail * space.f_frsize - 2**20)
        result = finish(job, 6)
        assert "was not saved: No space left on device" in result.stdout
        assert "No space left on device" in result.stderr
        filler.unlink()
        continue_exactly(place, whole)
    finally:
        if storage.kind == "sshfs":
            subprocess.run(["umount", "-l", storage.folder / "server"], check=True)


@of_kinds("juicefs", "overlay")
def test_a_mount_that_is_lost(storage, whole):
    """Nothing is written into the folder below it. When it is mounted again, the job continues exactly."""
    place = storage.mount()
    job = begin(storage, *JOB, f"--output_dir={place / 'run'}")
    read_until(job, " step=25/")
    storage.unmount(place)
    result = finish(job, 6)
    assert f"{place} is not mounted any more" in result.stdout and str(place) in result.stderr
    assert "created again" not in result.stdout and not list(place.iterdir())
    continue_exactly(storage.mount(), whole)

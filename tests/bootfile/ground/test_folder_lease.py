"""One job holds an output folder on a mount whose locks end at the node, such as a bucket with s3fs."""

import os
import shutil
import signal
import subprocess

import pytest

from bootfile.ground import lease, mounts
from bootfile.ground.errors import BadInput
from bootfile.ground.lease import FolderLease
from tests.conftest import LONGEST, QUICK, finish, is_stopped, read_until, start, wait_until

# holds a folder on a mount that grants every lock
HOLDER = """
import fcntl, sys, time
from bootfile.ground import lease, mounts
from common.run import output
fcntl.lockf = lambda *_: None
mounts._MOUNTS, lease.RENEW, lease.WATCH = sys.argv[2], 0.05, 400
output.Output(sys.argv[1]).hold()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def hold(tmp_path):
    """Return a function that starts a process which holds the folder tmp_path/run."""
    mounts = tmp_path / "mounts"
    mounts.write_text(f"1 0 0:1 / / rw - ext4 a rw\n2 1 0:2 / {tmp_path} rw - fuse.s3fs s3fs rw\n")
    processes = []

    def begin():
        processes.append(start("-c", HOLDER, tmp_path / "run", mounts))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def names(folder):
    return sorted(os.listdir(folder / "run" / mounts.LEASE))


def pretend(folder):
    """Write the name of another holder, and return it."""
    (folder / "run" / mounts.LEASE).mkdir(parents=True)
    name = f"00000003-{'f' * 32}-1-other"
    (folder / "run" / mounts.LEASE / name).touch()
    return name


def test_a_second_job_is_refused(hold, tmp_path):
    first = hold()
    assert first.stdout.readline() == "held\n"
    second = hold()
    assert "checking for 400 s" in second.stdout.readline()
    line, = second.stderr.read().strip().splitlines()[-1:]  # fmt: skip
    assert f"belongs to another job that is running (process {first.pid} on " in line
    assert len(names(tmp_path)) in (1, 2) and first.poll() is None


def test_a_job_that_was_paused_has_lost_the_folder(hold, tmp_path, monkeypatch):
    paused = hold()
    assert paused.stdout.readline() == "held\n"
    paused.send_signal(signal.SIGSTOP)
    wait_until(lambda: is_stopped(paused.pid), paused)
    monkeypatch.setattr(lease, "WATCH", 0.2)
    own = FolderLease(str(tmp_path / "run"))
    paused.send_signal(signal.SIGCONT)
    assert paused.wait(LONGEST) == 6 and "belongs to another job" in paused.stderr.read()
    own.release()
    assert os.listdir(tmp_path / "run") == [".lock"]


def test_a_job_that_was_killed_is_replaced(tmp_path, monkeypatch, capsys):
    pretend(tmp_path)
    monkeypatch.setattr(lease, "WATCH", 0.2)
    own = FolderLease(str(tmp_path / "run"))
    assert "by another job, on other: checking" in capsys.readouterr().out
    assert [name[:8] for name in names(tmp_path)] == ["00000004"]
    own.release()


def test_of_two_jobs_that_begin_together_one_is_refused(tmp_path, monkeypatch):
    other = pretend(tmp_path)
    seen = iter([[], [], [other]])  # it is not seen before the own name is written
    monkeypatch.setattr(FolderLease, "_list", lambda self: next(seen))
    with pytest.raises(BadInput, match="process 1 on other"):
        FolderLease(str(tmp_path / "run"))
    assert other in names(tmp_path)


def test_a_job_that_writes_late_gives_way(tmp_path, monkeypatch):
    """It has read before the first job wrote, and writes after the first job has checked."""
    first = FolderLease(str(tmp_path / "run"))
    own, listed, seen = names(tmp_path), FolderLease._list, iter([False])
    monkeypatch.setattr(FolderLease, "_list", lambda self: listed(self) if next(seen, True) else [])
    with pytest.raises(BadInput, match=f"process {os.getpid()} on "):
        FolderLease(str(tmp_path / "run"))
    assert names(tmp_path) == own
    first.check()
    first.release()


@pytest.mark.parametrize(
    ("kind", "options", "is_local"),
    [
        ("fuse.s3fs", "rw", True), ("fuse.obsfs", "rw", True), ("fuse", "rw", True), ("9p", "rw", True),
        ("fuse.juicefs", "rw", False), ("ext4", "rw", False), ("nfs4", "rw,local_lock=none", False),
        ("nfs", "rw,nolock,local_lock=all", True), ("nfs", "rw,local_lock=flock", False),
        ("lustre", "rw,localflock", True), ("lustre", "rw,flock", False), ("cifs", "rw,nobrl", True),
        ("fuseblk", "rw", False),
    ],
)  # fmt: skip
def test_mounts_with_local_locks(kind, options, is_local, tmp_path, monkeypatch):
    """The longest mount that holds the folder counts; its name may have escapes."""
    monkeypatch.setattr(mounts, "_MOUNTS", str(tmp_path / "mounts"))
    lines = [
        "1 0 0:1 / / rw - overlay a rw",
        f"2 1 0:2 / /my\\040data rw,noatime shared:1 - {kind} b {options}",
    ]
    (tmp_path / "mounts").write_text("\n".join(lines) + "\n")
    assert mounts.find_local_locks("/my data/run") == (kind if is_local else "")
    assert mounts.find_local_locks("/my") == ""


@pytest.fixture
def buckets(tmp_path):
    """Return two folders, each a mount of one bucket with s3fs."""
    if not shutil.which("s3fs") or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs s3fs and /dev/fuse")
    from tests.support.object_store_server import ObjectStoreServer

    keys, folders = tmp_path / "keys", [tmp_path / "M1", tmp_path / "M2"]
    keys.write_text("testing:testing-secret\n")
    keys.chmod(0o600)
    with ObjectStoreServer("bucket") as server:
        for folder in folders:
            folder.mkdir()
            options = f"passwd_file={keys},url=http://127.0.0.1:{server.port},use_path_request_style"
            subprocess.run(["s3fs", "bucket", folder, "-o", options], check=True)
        yield folders
        for folder in folders:
            subprocess.run(["fusermount3", "-u", "-z", folder], check=True)


@pytest.mark.thorough
def test_two_mounts_of_one_bucket(buckets):
    """Both mounts grant the lock. The second job is refused, and a restart continues after at most 25 s."""
    long = ("jobs/train.py", *QUICK, "--batch_size=240", "--report_every=1", "--save_every=5", "--epochs=500")
    first = start(*long, f"--output_dir={buckets[0]}/run")
    read_until(first, "step=7/")
    refused = finish(start(*long, f"--output_dir={buckets[1]}/run"), 2)
    assert f"{buckets[1]}/run belongs to another job that is running" in refused.stderr
    first.kill()
    finish(first, -signal.SIGKILL)
    again = start(*long, f"--output_dir={buckets[0]}/run")
    read_until(again, "resumed from")
    again.kill()
    finish(again, -signal.SIGKILL)

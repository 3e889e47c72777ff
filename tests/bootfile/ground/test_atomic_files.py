"""Writes are atomic and have the permissions of the umask; locks and digests are right."""

import errno
import fcntl
import hashlib
import os
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import pytest
import torch

from bootfile import records
from bootfile.exact import files as checkpoint
from bootfile.ground import files
from bootfile.ground.errors import Once, print_line
from common.ground import files as job_files
from common.ground import shared_folders
from datasets.folders import image_folder, random_folder
from tests.support import pictures
from tests.support.small_disk import small_disk


@pytest.mark.parametrize("umask", [0o077, 0o022, 0o027])
def test_what_is_written_has_the_permissions_of_the_umask(umask, tmp_path):
    """This holds for checkpoints, weights, texts, generated images and indexes."""
    before = os.umask(umask)
    try:
        checkpoint.write(str(tmp_path / "step_1.pt"), {"step": 1}, step=1, run="a")
        checkpoint.write_weights(str(tmp_path / "best.pth"), {"weight": torch.zeros(1)})
        files.write_atomic(str(tmp_path / "latest"), "step_1.pt")
        folder = random_folder.make(str(tmp_path / "images"), lambda path: pictures.make(Path(path), 3, 0))
        index = image_folder.load(folder, "train", str(tmp_path / "cache"))
    finally:
        os.umask(before)
    for name in ("step_1.pt", "step_1.pt.json", "best.pth", "latest"):
        assert os.stat(tmp_path / name).st_mode & 0o777 == 0o666 & ~umask, name
    for path in (folder, index.folder):
        assert os.stat(path).st_mode & 0o777 == 0o777 & ~umask, path


def test_a_file_appears_at_the_end_of_the_block_or_not_at_all(tmp_path):
    path = tmp_path / "a"
    path.write_text("before")
    with files.open_atomic(str(path)) as file:
        file.write(b"after")
        file.flush()
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    with pytest.raises(ZeroDivisionError), files.open_atomic(str(path)) as file:
        file.write(b"never")
        1 / 0  # noqa: B018
    files.write_atomic(str(tmp_path / "b"), "\u00e4")
    assert path.read_text() == "after" and (tmp_path / "b").read_bytes() == "\u00e4".encode()
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_a_folder_appears_at_the_end_of_the_block_or_not_at_all(tmp_path):
    path = str(tmp_path / "a")
    for content in ("one", "two"):  # the second replaces the first
        with shared_folders.make_folder_atomic(path) as folder:
            Path(folder, content).write_text(content)
            assert os.path.dirname(folder) == str(tmp_path) and folder != path
    with pytest.raises(ZeroDivisionError), shared_folders.make_folder_atomic(path) as folder:
        1 / 0  # noqa: B018
    assert os.listdir(path) == ["two"] and os.listdir(tmp_path) == ["a"]


def test_sweep_removes_temporary_files_that_nobody_writes(tmp_path):
    (tmp_path / f"{files.PARTIAL}left").write_text("of a killed writer")
    (tmp_path / "notes.txt").write_text("of the user")
    with files.open_atomic(str(tmp_path / "new")) as file:
        name = os.path.basename(file.name) if isinstance(file.name, str) else None
        files.sweep(str(tmp_path))
        found = set(os.listdir(tmp_path))
        assert name is None or name in found
        assert len(found) == 2 and "notes.txt" in found
    assert sorted(os.listdir(tmp_path)) == ["new", "notes.txt"]


_HOLDER = """
import sys
from common.ground import shared_folders
with shared_folders.locked(sys.argv[1], shared=sys.argv[2] == "shared"):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    "held, asked, free", [("shared", True, True), ("shared", False, False), ("", True, False)]
)
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_lock_excludes_other_processes(tmp_path, held, asked, free, kind):
    path = str(tmp_path if kind == "folder" else tmp_path / "lock")
    command = [sys.executable, "-c", _HOLDER, path, held]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=job_files.ROOT
    ) as holder:
        assert holder.stdout.readline() == b"locked\n"
        if free:
            with shared_folders.locked(path, shared=asked, wait=False):
                pass
        else:
            with pytest.raises(BlockingIOError), shared_folders.locked(path, shared=asked, wait=False):
                pass
        holder.stdin.close()
        with shared_folders.locked(path):  # waits until the holder ends
            assert holder.wait() == 0


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_lock_excludes_threads_and_ends_with_the_block(tmp_path, is_deleted, monkeypatch):
    """A child may have inherited it. The next holder does not get a lock on a deleted file."""
    path, order, has_begun, lock = str(tmp_path / "lock"), [], threading.Event(), shared_folders.lock

    def take() -> None:
        with shared_folders.locked(path) as handle:
            order.append(shared_folders.is_at(handle, path))

    with shared_folders.locked(path) as handle:
        monkeypatch.setattr(shared_folders, "lock", lambda *given: (has_begun.set(), lock(*given)))
        thread = threading.Thread(target=take)
        thread.start()
        has_begun.wait()
        thread.join(0.2)
        order.append("first")
        inherited = os.dup(handle)
        if is_deleted:
            os.unlink(path)
    thread.join()
    os.close(inherited)
    assert order == ["first", True]


def test_digests_and_special_files(tmp_path):
    content = os.urandom(2**20 + 5)
    (tmp_path / "a").write_bytes(content)
    assert files.sha256_file(str(tmp_path / "a")) == hashlib.sha256(content).hexdigest()
    for digest in (hashlib.sha256(content[3:]).hexdigest(), hashlib.md5(content[3:]).hexdigest()):
        with open(tmp_path / "a", "rb") as file:
            file.seek(3)
            assert job_files.has_digest(file, digest) and not job_files.has_digest(file, digest)
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path):
        with pytest.raises(OSError), open(path, opener=files.opener):
            pass


def test_a_sweep_in_another_thread_deletes_no_file_that_is_written(tmp_path):
    """Without the lock before the first look, 6 % of the writes failed."""
    ended = threading.Event()

    def clean():
        while not ended.is_set():
            files.sweep(str(tmp_path))

    cleaner = threading.Thread(target=clean)
    cleaner.start()
    try:
        for number in range(500):
            files.write_atomic(str(tmp_path / "file"), str(number))
    finally:
        ended.set()
        cleaner.join()
    assert (tmp_path / "file").read_text() == "499"


@pytest.mark.parametrize("reason", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_gets_one_warning(tmp_path, monkeypatch, capsys, reason):
    def fail(*_):
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr(fcntl, "flock", fail)
    monkeypatch.setattr(files, "_warn_once", Once(print_line))
    folder = random_folder.make(str(tmp_path / "images"), lambda path: pictures.make(Path(path), 3, 0))
    image_folder.load(folder, "train", str(tmp_path / "cache"))
    files.write_atomic(str(tmp_path / "a"), "a")
    assert capsys.readouterr().out.count("no locks") == 1
    left = [tmp_path / f"{files.PARTIAL}{name}" for name in ("old", "new")]
    for path in left:
        path.touch()
    os.utime(left[0], (0, 0))
    files.sweep(str(tmp_path))
    assert [path.exists() for path in left] == [False, True], "a process may still write the new one"


def test_a_mount_that_is_gone_is_an_error(monkeypatch, tmp_path):
    """Its folder is there, but on the file system below it."""
    mounts, folder = {"/", str(tmp_path / "mount")}, str(tmp_path / "mount" / "run")
    monkeypatch.setattr(os.path, "ismount", lambda path: path in mounts)
    files.check_mounted(folder)
    mounts.remove(str(tmp_path / "mount"))
    os.makedirs(folder)
    with pytest.raises(OSError, match=rf"{tmp_path}/mount is not mounted") as raised:
        files.check_mounted(folder)
    assert files.explain_write(raised.value, folder) == raised.value.strerror
    mounts.add(str(tmp_path / "mount"))
    files.check_mounted(folder)


def test_a_file_system_that_has_no_free_inodes_is_not_full_of_bytes(tmp_path):
    with small_disk(tmp_path / "mount", "1m,nr_inodes=5") as folder, pytest.raises(OSError) as raised:
        for number in range(9):
            (folder / str(number)).touch()
    with small_disk(tmp_path / "mount", "1m,nr_inodes=1") as folder:
        text = files.explain_write(raised.value, str(folder))
    assert text.startswith(f"No space left on device (no free inodes at {folder}: ")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EIO])
def test_free_space_is_named_only_if_the_disk_may_be_full(tmp_path, number):
    """With other errors it would send the user to delete files."""
    missing = str(tmp_path / "checkpoints" / "step_1.pt")
    error = OSError(number, os.strerror(number), missing)
    assert files.explain_write(error, missing) == f"{os.strerror(number)} (at {tmp_path})"
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), missing)
    assert f" MB free at {tmp_path})" in files.explain_write(full, missing)
    assert f" MB free at {tmp_path})" in files.explain_write(RuntimeError("write failed"), missing)


@pytest.mark.parametrize("before", ["", '{"a": 1}\n', '{"a": 1}\n{"a": 2, "b', '{"a": 1}'])
def test_a_line_after_one_that_was_cut_is_a_line_of_its_own(before, tmp_path):
    """A full disk or a power cut leaves a line without its end: the next one was lost with it."""
    path = tmp_path / "starts.jsonl"
    path.write_text(before)
    for number in (3, 4):
        files.append_json_line(str(path), {"a": number})
    lines = records.read_lines(str(tmp_path), records.STARTS)
    assert [line["a"] for line in lines] == [1] * before.startswith('{"a": 1}') + [3, 4]
    assert path.read_text().startswith(before) and "\n\n" not in path.read_text()


def test_a_read_takes_memory_for_the_file_and_not_for_its_limit(tmp_path):
    """A job may run close to its limit of address space (ulimit -v)."""
    path = tmp_path / "receipt.bin"
    path.write_bytes(b"0123456789")
    tracemalloc.start()
    try:
        assert files.read_file(str(path), 1 << 30) == b"0123456789"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    with pytest.raises(OSError, match="larger than 9 bytes"):
        files.read_file(str(path), 9)
    # its size is 0, whatever it holds
    assert b"Name:" in files.read_file("/proc/self/status", 1 << 20)
    with pytest.raises(OSError, match="larger than 9 bytes"):
        files.read_file("/proc/self/status", 9)

"""A snapshot of code: a folder whose name has the digest of its content, with a manifest."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from typing import NamedTuple

from common.exits import BadInput
from launch import manifests

_TEMPORARY = ".pack-"
_BLOCK = 2**20


class Content(NamedTuple):
    """A file of a snapshot. path: in the snapshot, with /. source: a file to copy, or the content itself."""

    path: str
    source: str | bytes


def manifest(name: str, contents: list[Content], job: str, git: dict | None) -> dict:
    """What manifest.json says. Its digest is that of paths and contents: no time, owner, mode or state of git
    has a part in it. Raises BadInput for a file that cannot be read."""
    files = []
    for path, source in sorted(contents, key=lambda content: content.path.encode()):
        size, sha256 = _copy(path, source, None)
        files.append({"path": path, "size": size, "sha256": sha256})
    return {
        "format": 1, "name": name, "digest": manifests.digest(files), "files": files, "git": git, "job": job,
    }  # fmt: skip


def write(to: str, manifest: dict, contents: list[Content]) -> tuple[str, bool]:
    """Make the snapshot in the folder `to`. Returns (its path, whether it was made: False if it was there).

    It appears whole or not at all: it is written beside and renamed. Raises BadInput: for a snapshot of that
    name that was changed, for a file that changed while it was copied, for a disk that is full.
    """
    final = os.path.join(to, manifests.folder_name(manifest))
    if os.path.lexists(final):
        _check(final, manifest)
        return final, False
    with temporary_folder(to) as folder:
        known = {file["path"]: file["sha256"] for file in manifest["files"]}
        for path, source in contents:
            target = os.path.join(folder, path)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if _copy(path, source, target)[1] != known[path]:
                raise BadInput(f"{path} was changed while it was packed")
        _copy(manifests.NAME, manifests.text(manifest), os.path.join(folder, manifests.NAME))
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(folder, 0o777 & ~umask)  # mkdtemp's are for one user alone
        try:
            os.rename(folder, final)
        except OSError:
            if not os.path.isdir(final):
                raise
            _check(final, manifest)  # another process has just made the same
            return final, False
    return final, True


@contextlib.contextmanager
def temporary_folder(to: str):
    """A new folder in `to`, which is made, too; taken away afterwards if it is still there, and so are those
    of processes that were killed. Raises BadInput for what the disk says."""
    try:
        os.makedirs(to, exist_ok=True)
        for name in os.listdir(to):
            if name.startswith(_TEMPORARY):
                _remove_if_left(os.path.join(to, name))
        folder = tempfile.mkdtemp(prefix=f"{_TEMPORARY}new-", dir=to)
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            locked = folder.replace(f"{_TEMPORARY}new-", _TEMPORARY)
            os.rename(folder, locked)
            folder = locked
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
    except OSError as error:
        raise BadInput(f"{to} cannot be written: {error.strerror}") from error


def git_state(root: str, paths: list[str]) -> dict | None:
    """{"commit", "dirty"} of a working tree; None where there is none. dirty: whether `paths` (relative to
    root) are not as they are in that commit, or a file that stood beside them in it is gone."""
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    if commit is None:
        return None
    tracked = _git(root, "ls-files", "-z")
    changed = _git(root, "diff", "--name-only", "--relative", "-z", "HEAD")
    if tracked is None or changed is None:
        return None
    kept, tops = {*paths}, {path.partition("/")[0] for path in paths}
    dirty = not kept <= {*tracked.split("\0")} or any(
        path in kept or (path.partition("/")[0] in tops and not os.path.lexists(os.path.join(root, path)))
        for path in changed.split("\0")[:-1]
    )
    return {"commit": commit.strip(), "dirty": dirty}


def _git(root: str, *arguments: str) -> str | None:
    command = ["git", "-C", root, *arguments]
    try:
        result = subprocess.run(
            command, capture_output=True, timeout=60, env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return os.fsdecode(result.stdout) if result.returncode == 0 else None


def read(path: str, source: str | bytes) -> bytes:
    """The whole content of a file. Raises BadInput."""
    return source if isinstance(source, bytes) else b"".join(_blocks(path, source))


def _copy(path: str, source: str | bytes, target: str | None) -> tuple[int, str]:
    """(bytes, sha256) of a file, which is copied to `target` unless that is None."""
    digest, size = hashlib.sha256(), 0
    with contextlib.ExitStack() as stack:
        written = stack.enter_context(open(target, "wb")) if target else None
        for block in [source] if isinstance(source, bytes) else _blocks(path, source):
            digest.update(block)
            size += len(block)
            if written:
                written.write(block)
    return size, digest.hexdigest()


def _blocks(path: str, source: str):
    try:
        file = open(source, "rb")  # noqa: SIM115
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    with file:
        while block := file.read(_BLOCK):
            yield block


def _check(folder: str, manifest: dict) -> None:
    """Raises BadInput where a snapshot that is there is not the one of this manifest any more. Files beside
    it, such as __pycache__, are nobody's business."""
    try:
        with open(os.path.join(folder, manifests.NAME), "rb") as file:
            there = manifests.parsed(file.read()) or {}
    except OSError:
        there = {}
    same = all(there.get(key) == manifest[key] for key in ("digest", "files", "job"))
    wrong = None if same else manifests.NAME
    for file in manifest["files"] if same else ():
        source = os.path.join(folder, file["path"])
        if not os.path.isfile(source) or _copy(file["path"], source, None)[1] != file["sha256"]:
            wrong = file["path"]
            break
    if wrong:
        raise BadInput(
            f"{folder} is there, and {wrong} in it is not what was packed: delete it, or name another --to"
        )


def _remove_if_left(folder: str) -> None:
    """Take away a temporary folder whose process has ended: nobody holds its lock. The moment before it is
    locked has another name."""
    if os.path.basename(folder).startswith(f"{_TEMPORARY}new-"):
        return
    with contextlib.suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)

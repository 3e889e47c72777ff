"""Write a snapshot of code: a folder whose name has the digest of its content, with a manifest."""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

from common.exits import BadInput
from common.files import make_folder
from launch import manifests

_TEMPORARY, _UNLOCKED = ".pack-", ".pack-new-"


class Content(NamedTuple):
    """A file of a snapshot. path: in the snapshot, with /. source: a file to copy, or the content itself."""

    path: str
    source: str | bytes

    def describe(self) -> dict:
        """Return the file's entry in a manifest. Raises BadInput if it cannot be read."""
        digest, size = hashlib.sha256(), 0
        try:
            for block in self.blocks():
                digest.update(block)
                size += len(block)
        except OSError as error:
            raise BadInput(f"{self.path} cannot be read: {error.strerror}") from error
        return {"path": self.path, "size": size, "sha256": digest.hexdigest()}

    def blocks(self) -> Iterator[bytes]:
        """Yield the content in pieces. Raises OSError."""
        if isinstance(self.source, bytes):
            yield self.source
            return
        with open(self.source, "rb") as file:
            while block := file.read(2**20):
                yield block


def describe(name: str, contents: list[Content], job: str, git: dict | None) -> dict:
    """Return the manifest. Its digest is that of paths and contents only: no time, owner, mode or state of
    git. Raises BadInput for a file that cannot be read."""
    contents = sorted(contents, key=lambda content: content.path.encode())
    return manifests.make(name, [content.describe() for content in contents], job, git)


def write(to: str, manifest: dict, contents: list[Content]) -> tuple[str, bool]:
    """Make the snapshot in the folder `to`, whole or not at all. Returns (its path, whether it was made:
    False if it was there).

    Raises BadInput for a snapshot of that name that was changed, for a file that changes while it is copied,
    for a full disk.
    """
    final = os.path.join(to, manifests.folder_name(manifest))
    if os.path.lexists(final):
        _check(final, manifest)
        return final, False
    with temporary_folder(to) as folder:
        known = {file["path"]: file for file in manifest["files"]}
        for content in contents:
            target = os.path.join(folder, content.path)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "wb") as file:
                file.writelines(content.blocks())
            if Content(content.path, target).describe() != known[content.path]:
                raise BadInput(f"{content.path} was changed while it was packed")
        with open(os.path.join(folder, manifests.NAME), "wb") as file:
            file.write(manifests.to_bytes(manifest))
        try:
            os.rename(folder, final)
        except OSError:
            if not os.path.isdir(final):
                raise
            _check(final, manifest)  # another process has just made the same
            return final, False
    return final, True


@contextlib.contextmanager
def temporary_folder(to: str) -> Iterator[str]:
    """Make a new folder in `to`, and `to` itself. Afterwards remove it if it is still there, and those of
    processes that were killed. Raises BadInput for errors of the disk."""
    try:
        os.makedirs(to, exist_ok=True)
        for name in os.listdir(to):
            if name.startswith(_TEMPORARY) and not name.startswith(_UNLOCKED):
                _remove_if_unlocked(os.path.join(to, name))
        folder = make_folder(_UNLOCKED, to)
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            locked = folder.replace(_UNLOCKED, _TEMPORARY)
            os.rename(folder, locked)
            folder = locked
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
    except OSError as error:
        raise BadInput(f"{to} cannot be written: {error.strerror}") from error


def _remove_if_unlocked(folder: str) -> None:
    with contextlib.suppress(OSError):
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _check(folder: str, manifest: dict) -> None:
    """Raises BadInput if a snapshot is no longer the one of this manifest. Extra files such as __pycache__
    are ignored."""
    try:
        with open(os.path.join(folder, manifests.NAME), "rb") as file:
            there = manifests.parse(file.read()) or {}
    except OSError:
        there = {}
    same = all(there.get(key) == manifest[key] for key in ("digest", "files", "job"))
    wrong = None if same else manifests.NAME
    for file in manifest["files"] if same else ():
        source = os.path.join(folder, file["path"])
        if not os.path.isfile(source) or Content(file["path"], source).describe() != file:
            wrong = file["path"]
            break
    if wrong:
        raise BadInput(
            f"{folder} exists, and {wrong} in it is not what was packed: delete it, or name another --to"
        )


def git_state(root: str, paths: list[str]) -> dict | None:
    """Return {"commit", "dirty"} of a working tree; None if there is none. dirty: whether `paths` (relative
    to root) differ from that commit, or a file beside them in it is gone."""
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

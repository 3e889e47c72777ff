"""Write a snapshot of code: a folder with a manifest, whose name contains the digest of its content."""

import hashlib
import os
import shutil
import subprocess
from typing import NamedTuple

from common.ground.exits import BadInput
from common.ground.files import locked, make_folder_atomic
from launch import manifests


class Content(NamedTuple):
    """A file of a snapshot. path: in the snapshot, with /. source: a file to copy, or the content itself."""

    path: str
    source: str | bytes


def describe(name: str, contents: list[Content], job: str, git: dict | None) -> dict:
    """Return the manifest. Its digest covers paths and contents, but no time, owner, mode or state of git.
    Raises BadInput if a file cannot be read."""
    files = []
    for path, source in sorted(contents, key=lambda content: content.path.encode()):
        try:
            if isinstance(source, bytes):
                entry = {"path": path, "size": len(source), "sha256": hashlib.sha256(source).hexdigest()}
            else:
                entry = manifests.describe_file(path, source)
        except OSError as error:
            raise BadInput(f"{path} cannot be read: {error.strerror}") from error
        files.append(entry)
    return manifests.make(name, files, job, git)


def write(to: str, manifest: dict, contents: list[Content]) -> tuple[str, bool]:
    """Write the snapshot to the folder `to` atomically. Return (its path, False if it existed).

    Raises BadInput if a snapshot of that name was changed, if a file changes while it is copied, or if the
    disk is full.
    """
    final = os.path.join(to, manifests.make_folder_name(manifest))
    try:
        os.makedirs(to, exist_ok=True)
        with locked(to):
            if os.path.lexists(final):
                _check(final, manifest)
                return final, False
            with make_folder_atomic(final) as folder:
                _fill(folder, manifest, contents)
    except OSError as error:
        raise BadInput(f"{to} cannot be written: {error.strerror}") from error
    return final, True


def _fill(folder: str, manifest: dict, contents: list[Content]) -> None:
    known = {file["path"]: file for file in manifest["files"]}
    for path, source in [*contents, Content(manifests.NAME, manifests.to_bytes(manifest))]:
        target = os.path.join(folder, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if isinstance(source, bytes):
            with open(target, "wb") as file:
                file.write(source)
        else:
            shutil.copyfile(source, target)
            if manifests.describe_file(path, target) != known[path]:
                raise BadInput(f"{path} was changed while it was packed")


def _check(folder: str, manifest: dict) -> None:
    """Raise BadInput if a snapshot differs from its manifest. Extra files such as __pycache__ are ignored."""
    try:
        with open(os.path.join(folder, manifests.NAME), "rb") as file:
            there = manifests.parse(file.read()) or {}
    except OSError:
        there = {}
    same = all(there.get(key) == manifest[key] for key in ("digest", "files", "job"))
    wrong = None if same else manifests.NAME
    for file in manifest["files"] if same else ():
        source = os.path.join(folder, file["path"])
        if not os.path.isfile(source) or manifests.describe_file(file["path"], source) != file:
            wrong = file["path"]
            break
    if wrong:
        raise BadInput(
            f"{folder} exists, and {wrong} in it is not what was packed: delete it, or name another --to"
        )


def read_git_state(root: str, paths: list[str]) -> dict | None:
    """Return {"commit", "dirty"} of a working tree; None if it is not one. dirty: whether a file of `paths`
    (relative to root) is not in that commit, or a file in the same top folders differs from it."""
    tops = {path.partition("/")[0] for path in paths}
    commit = _git(root, "rev-parse", "--verify", "HEAD")
    tracked = _git(root, "ls-files", "-z")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", *tops)
    if commit is None or tracked is None or changed is None:
        return None
    return {"commit": commit.strip(), "dirty": bool(changed) or not {*paths} <= {*tracked.split("\0")}}


def _git(root: str, *arguments: str) -> str | None:
    command = ["git", "-C", root, "--no-optional-locks", *arguments]
    try:
        result = subprocess.run(command, capture_output=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return os.fsdecode(result.stdout) if result.returncode == 0 else None

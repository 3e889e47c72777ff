"""Read which commit of git some code is."""

import contextlib
import json
import os
import subprocess

_SNAPSHOT = "manifest.json"  # `launch pack` writes it: a snapshot has no working tree
_SECONDS = 20.0  # to visit the files of a large tree on a slow mount


def find_commit(script: str) -> str | None:
    """Return the commit of a script, with -dirty at its end if a tracked file of its tree differs; None if it
    cannot be told. A script in a snapshot has that of the tree that was packed."""
    folder = os.path.dirname(os.path.abspath(script))
    for place in (folder, os.path.dirname(folder)):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            with open(os.path.join(place, _SNAPSHOT), encoding="utf-8") as file:
                commit = json.load(file).get("git")
            if isinstance(commit, str):
                return commit
    return describe_tree(folder)


def describe_tree(root: str) -> str | None:
    """Return the commit of a working tree, with -dirty at its end if a tracked file differs from it; None if
    it is not one."""
    # without locks: the user may run git in the same tree meanwhile
    words = ["git", "-C", root, "--no-optional-locks", "status", "--porcelain=v2", "--branch"]
    try:  # not `describe --dirty`, which writes the index
        shown = subprocess.check_output(
            [*words, "--untracked-files=no"], stderr=subprocess.DEVNULL, timeout=_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = shown.decode(errors="replace").splitlines()
    commits = [line.split()[2] for line in lines if line.startswith("# branch.oid ")]
    if not commits or commits == ["(initial)"]:  # a tree without a commit
        return None
    is_dirty = any(not line.startswith("#") for line in lines)  # a file that differs
    return f"{commits[0]}-dirty" if is_dirty else commits[0]

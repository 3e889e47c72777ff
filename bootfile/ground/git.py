"""Read the state of a git working tree."""

import subprocess


def describe_tree(root: str) -> str | None:
    """Return the commit of a working tree, with -dirty at its end if a tracked file differs from it; None if
    it is not one."""
    # without locks: the user may run git in the same tree meanwhile
    words = ["git", "-C", root, "--no-optional-locks", "status", "--porcelain=v2", "--branch"]
    try:  # not `describe --dirty`, which writes the index
        shown = subprocess.check_output([*words, "--untracked-files=no"], stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return None
    lines = shown.decode(errors="replace").splitlines()
    commit = "(initial)"  # a tree without a commit
    is_dirty = False
    for line in lines:
        if line.startswith("# branch.oid "):
            commit = line.split()[2]
        if not line.startswith("#"):  # a file that differs
            is_dirty = True
    if commit == "(initial)":
        return None
    if is_dirty:
        return f"{commit}-dirty"
    return commit

"""Read the state of a git working tree."""

import subprocess


def describe_tree(root: str) -> str | None:
    """Return the commit of a working tree, with -dirty at its end if a tracked file differs from it; None if
    it is not one."""
    words = ["git", "-C", root, "--no-optional-locks", "status", "--porcelain=v2", "--branch"]
    try:  # not `describe --dirty`, which writes the index
        shown = subprocess.check_output([*words, "--untracked-files=no"], stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return None
    lines = shown.decode(errors="replace").splitlines()
    commit = next((line.split()[2] for line in lines if line.startswith("# branch.oid ")), "(initial)")
    if commit == "(initial)":
        return None
    return commit if all(line.startswith("#") for line in lines) else f"{commit}-dirty"

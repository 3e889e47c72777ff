"""Control groups for tests: folders that look like them, and real ones where the machine allows it."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootfile.machine import control_groups


def make_tree(root: Path, group: str, files: dict[str, str]) -> str:
    """Write /proc and /sys of a process below `root`, and return it as functions take it.

    group: text of /proc/self/cgroup; "" for no such file. files: path below /sys/fs/cgroup -> text.
    """
    texts = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    if group:
        texts["proc/self/cgroup"] = group
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


@contextlib.contextmanager
def real_group(controller: str, settings: dict[str, str], depth: int = 2) -> Iterator[Path]:
    """Make a group `depth` levels below that of this process, with settings at the first of them. Yield the
    folder of the lowest one: a process enters it by its number in cgroup.procs. Skip the test where groups
    cannot be made.

    settings: name of a file -> text. It is of version 1 or 2; those of the other version are left out.
    """
    made: list[Path] = []
    try:
        try:
            _make(controller, settings, depth, made)
        except OSError as error:
            pytest.skip(f"control groups of {controller} cannot be made here: {error}")
        if not made:
            pytest.skip(f"new control groups here have no limit of {controller}")
        yield made[-1]
    finally:
        _remove(made)


def _make(controller: str, settings: dict[str, str], depth: int, made: list[Path]) -> None:
    """Make the groups, and add their folders to `made`; none if no new group has one of the settings."""
    for parent in control_groups.find_folders(controller):
        if not (parent / "cgroup.procs").exists():
            continue
        folder = parent / f"bootfile-{uuid.uuid4().hex[:8]}"
        folder.mkdir()
        made.append(folder)
        names = [name for name in settings if (folder / name).exists()]
        if names:
            for name in names:
                (folder / name).write_text(settings[name])
            for _ in range(depth - 1):
                folder = folder / "below"
                folder.mkdir()
                made.append(folder)
            return
        _remove(made)


def _remove(made: list[Path]) -> None:
    while made:
        made.pop().rmdir()


def enter(folder: Path) -> None:
    """Move this process into a group: a preexec_fn."""
    (folder / "cgroup.procs").write_text(str(os.getpid()))

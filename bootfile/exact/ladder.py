"""The old states of a run that stay in addition to the newest ones, and the disk that they take.

With a distance of E steps, the first whole state of the steps E..2E-1 stays, of 2E..3E-1, and so on. A state
is saved at each multiple of E. If that save was late or has failed, or if the file is damaged, the next state
takes its place. The rule needs only the numbers of the steps, so a folder and a URL keep the same states.
"""

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch

from bootfile.ground.results import checkpoint_names, dtensor_folder

# optimizers of torch that have a state from their first step on -> its numbers for each one that they train
_NUMBERS = {"Adam": 2, "AdamW": 2, "Adamax": 2, "NAdam": 2, "RAdam": 2, "RMSprop": 1, "SGD": 0}


def find_kept(steps: Iterable[int], every: int, is_whole: Callable[[int], bool]) -> set[int]:
    """Return the steps whose states stay: the first of each interval of which is_whole(step) is true."""
    intervals: dict[int, list[int]] = {}
    for step in sorted(step for step in steps if step >= every):
        intervals.setdefault(step // every, []).append(step)
    kept = set()
    # the last state of an interval is not read, because no other one could take its place
    for candidates in intervals.values():
        for step in candidates:
            kept.add(step)
            if step == candidates[-1] or is_whole(step):
                break
    return kept


def describe(saver: Any, total_steps: int | None, size: int, objects: Iterable[Any]) -> str:
    """Return a line about the disk that the states will take, to print before the first step. saver: the
    Saver of the run. size: bytes of the state before the first step. objects: those of a state."""
    every = saver.keep_every
    folder = saver.checkpoints  # it may not exist yet
    size_of_newest = _size_of_newest(folder)
    # after a restart the size on disk is known; before the first save it is computed
    optimizers = [] if size_of_newest else [one for one in objects if isinstance(one, torch.optim.Optimizer)]
    added = [*map(_size_of_later, optimizers)]
    size = size_of_newest or size + sum(filter(None, added))
    # None: not an optimizer of torch, and what it will keep is not known
    about = "at least " if None in added else "about "
    kept = f"and the newest {saver.keep}"
    line = f"a state stays after every {every} steps, {kept}: {about}{_name(size)} each"
    # a run without an end has no sum to compare with the disk
    if total_steps is None:
        return line
    count = total_steps // every + min(saver.keep, total_steps)
    line += f", {count} states and {_name(count * size)} after step {total_steps}"
    # the folder is made at the first save: until then its parent says how much space there is
    existing = folder
    while not os.path.isdir(existing):
        existing = os.path.dirname(existing)
    space = os.statvfs(existing)
    free = space.f_bavail * space.f_frsize
    if free < count * size:
        line = f"warning: {line}; only {_name(free)} are free at {folder}"
    return line


def _size_of_newest(folder: str) -> int:
    """Return the bytes of the newest checkpoint in a folder, 0 without one."""
    names = checkpoint_names(folder)
    if not names:
        return 0
    path = os.path.join(folder, names[-1])
    size = os.path.getsize(path)
    parts = dtensor_folder(path)
    if os.path.isdir(parts):
        size += sum(entry.stat().st_size for entry in os.scandir(parts))
    return size


def _size_of_later(optimizer: torch.optim.Optimizer) -> int | None:
    """Return how many bytes the first step will add to the state of an optimizer; None: not known."""
    if optimizer.state:
        return 0
    size = 0
    for group in optimizer.param_groups:
        numbers = _NUMBERS.get(type(optimizer).__name__)  # that it keeps for each number of a parameter
        if numbers is None:
            return None
        numbers += sum(bool(group.get(option)) for option in ("amsgrad", "centered", "momentum"))
        for parameter in group["params"]:
            size += numbers * parameter.numel() * parameter.element_size()
    return size


def _name(size: float) -> str:
    """Return a number of bytes in words: "44.8 MB"."""
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.5:
            return f"{size:.3g} {unit}"
    return f"{size / 1000:.3g} TB"

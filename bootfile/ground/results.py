"""The names of the results in the output folder of a run."""

import contextlib
import functools
import os
import re
from collections.abc import Iterable

from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained, read_again

CHECKPOINTS = "checkpoints"
CLASSES = "classes.json"  # the names of the classes, in the order of the labels
CONFUSION = "confusion.json"  # the last evaluation per class, and the confusion matrix
WEIGHTS = re.compile(r"best\.pth|epoch_(\d+)\.pth")
_CHECKPOINT = re.compile(r"step_(\d+)\.pt")


def checkpoints(folder: str) -> list[str]:
    """Return the names of the checkpoints in an output folder, by step. Raises BadInput."""
    return checkpoint_names(os.path.join(folder, CHECKPOINTS))


def checkpoint_names(folder: str) -> list[str]:
    """Return the names of the checkpoints directly in a folder, by step. Raises BadInput."""
    steps: list[tuple[int, str]] = []
    missing = contextlib.suppress(FileNotFoundError, NotADirectoryError)
    with explained(f"checkpoints in {folder} cannot be listed"), missing:
        names = read_again(functools.partial(os.listdir, folder), folder)
        steps = [(int(match[1]), match[0]) for match in map(_CHECKPOINT.fullmatch, names) if match]
    return [name for _, name in sorted(steps)]


def refuse_links(folder: str, names: Iterable[str] = (CHECKPOINTS,)) -> None:
    """Raise BadInput if a folder into which a run writes is a link. A run calls it on rank 0 before it looks
    for a checkpoint: it would continue another run, and delete the checkpoints of that run.

    folder: the output folder, which may be a link itself. names: of the folders in it.
    """
    for name in names:
        path = os.path.join(folder, name)
        if os.path.islink(path):
            raise BadInput(
                f"{path} is a link to {os.readlink(path)}, and a run writes and deletes files there: remove "
                "the link, or let the whole output folder be elsewhere"
            )


def dtensor_folder(path: str) -> str:
    """Return the folder of the sharded tensors of a checkpoint step_<n>.pt."""
    return f"{os.path.splitext(path)[0]}.shards"

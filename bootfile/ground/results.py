"""The names of the results in the output folder of a run."""

import contextlib
import os
import re

CHECKPOINTS = "checkpoints"
CLASSES = "classes.json"  # the names of the classes, in the order of the labels
WEIGHTS = re.compile(r"best\.pth|epoch_(\d+)\.pth")
_CHECKPOINT = re.compile(r"step_(\d+)\.pt")


def checkpoints(folder: str) -> list[str]:
    """Return the names of the checkpoints in an output folder, by step. Raises OSError."""
    return checkpoint_names(os.path.join(folder, CHECKPOINTS))


def checkpoint_names(folder: str) -> list[str]:
    """Return the names of the checkpoints directly in a folder, by step. Raises OSError."""
    steps = []  # (step, name)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for name in os.listdir(folder):
            match = _CHECKPOINT.fullmatch(name)
            if match:
                steps.append((int(match[1]), name))
    steps.sort(key=lambda checkpoint: checkpoint[0])
    return [name for _, name in steps]


def dtensor_folder(path: str) -> str:
    """Return the folder of the sharded tensors of a checkpoint step_<n>.pt."""
    return f"{os.path.splitext(path)[0]}.shards"

"""The weights with which the images of a folder are drawn, one for each image: --class_weights."""

from typing import Any

import numpy as np

from bootfile.ground.again import refusal
from bootfile.ground.errors import BadInput
from bootfile.ground.files import read_file
from bootfile.ground.numbers import parse_number

BALANCED = "balanced"
HELP = (
    "how often an image is drawn (not a weight in the loss). balanced: every class equally often; FILE: "
    "lines 'NAME WEIGHT', one for each class or each image (default: each image once)"
)
_MOST = 2**30  # bytes of a file


def read(text: str, index: Any) -> np.ndarray:
    """Return the weight of each image, float64 [n]. text: balanced, or the path of a file. index: an
    ImageFolderIndex. Raises BadInput.

    open_loaders() calls it on rank 0 at the start of a training; the others get its result."""
    labels = np.asarray(index.labels)
    if labels.ndim == 2:
        raise BadInput(f"--class_weights {text} needs one label for each image, and the list has several")
    if text == BALANCED:
        return 1 / np.bincount(labels)[labels]
    # one name of a class is enough: then all lines are classes, else all are images
    weights = _read_file(text)
    is_of_classes = not weights.keys().isdisjoint(index.classes)
    if is_of_classes:
        kind = "class"
        names = list(index.classes)
        known = set(names)
    else:
        kind = "image"
        names = [index.name(id) for id in range(len(index))]
        known = set(names)
        for path, *_ in index.bad:  # bad images are skipped, and may have a weight
            known.add(path)
    missing = [name for name in names if name not in weights]
    unknown = [name for name in weights if name not in known]
    if missing or unknown:
        raise BadInput(
            f"--class_weights {text}: {len(missing)} of {len(names)} {kind} names are missing, "
            f"{len(unknown)} are unknown: {[*missing, *unknown][0]}"
        )
    values = np.array([weights[name] for name in names])
    return values[labels] if is_of_classes else values


def _read_file(path: str) -> dict[str, float]:
    """Return name -> weight of the lines of a file. Raises BadInput with the line."""
    weights: dict[str, float] = {}
    line = ""
    try:
        for line in filter(str.strip, read_file(path, _MOST).decode().splitlines()):
            first, value = line.rsplit(maxsplit=1)
            name = first.strip()
            if name in weights:
                raise ValueError("this name has a weight already")
            weights[name] = parse_number(value, float)
    except (OSError, ValueError) as error:
        reason = f"{line:.80}: {error}; expected {BALANCED}, or a file of lines NAME WEIGHT"
        raise refusal(f"--class_weights {path}: {reason}", error) from error
    return weights

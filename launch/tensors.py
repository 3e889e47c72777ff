"""Compare the tensors in the files that two runs left: checkpoints and weights."""

import os

import torch

from common.exact import digest, files
from common.ground.exits import BadInput


def find_differences(runs: tuple[str, str], step: int, names: list[str]) -> dict[str, float]:
    """Return how much these parts of the checkpoints of a step differ; {} if a checkpoint cannot be read."""
    paths = [os.path.join(run, "checkpoints", files.name_of(step)) for run in runs]
    try:
        states = [dict(digest.leaves(files.read(path)["objects"])) for path in paths]
    except (files.Refused, KeyError, TypeError, AttributeError):
        return {}
    return {name: _difference(*(state.get(name) for state in states)) for name in names}


def _difference(one: object, other: object) -> float:
    """Return the largest difference of two values, relative to the largest number; inf if they have none."""
    try:
        one, other = (torch.as_tensor(each).double() for each in (one, other))
        return float((one - other).abs().max() / torch.maximum(one.abs().max(), other.abs().max()))
    except (TypeError, ValueError, RuntimeError):  # a part that one run lacks, text, or another shape
        return float("inf")


def summarize(path: str) -> dict[str, str]:
    """Return a digest of each tensor and number in a file of weights. Raises BadInput."""
    try:
        return digest.summarize(0, files.load(path))["parts"]
    except files.Refused as reason:
        raise BadInput(f"{path} cannot be compared: {reason}") from reason

"""Read the accuracy of each class, and its most frequent wrong prediction, from a run's confusion.json."""

import json
import math
import os
from typing import Any, NamedTuple

from common.ground.files import opener
from common.run.metrics import CONFUSION
from launch.report.runs import Run
from launch.report.tables import NONE, format_percent

_MOST_ROWS, _MOST_COLUMNS = 200, 40  # rows of the table of classes; columns of the matrix
_MOST_BYTES = 50e6


class Classes(NamedTuple):
    """The accuracy by class at one evaluation.

    rows: class, samples, accuracy, most frequent wrong prediction; the least accurate class first
    left_out: number of classes that rows omits
    names, counts, matrix: one item per label; matrix has a column per prediction, and is empty if it is
        unknown or too large
    """

    step: int
    rows: list[list[str]]
    left_out: int
    names: list[str]
    counts: list[int]
    matrix: list[list[int]]


def read(run: Run) -> Classes | None:
    """Return the classes of a run's last evaluation; None if the file is missing, or unreadable, which is
    noted."""
    path = os.path.join(run.path, CONFUSION)
    if not os.path.lexists(path):
        return None
    try:
        if os.path.getsize(path) > _MOST_BYTES:
            raise ValueError("it is too large")
        with open(path, encoding="utf-8", opener=opener) as file:
            return _parse(json.load(file))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        run.notes.append(f"{CONFUSION} could not be read")
        return None


def _parse(content: dict) -> Classes:
    counts, correct = _numbers(content["count"]), _numbers(content["correct"])
    names = [str(name) for name in content["classes"]] or [str(label) for label in range(len(counts))]
    matrix = [_numbers(row) for row in content.get("matrix", [])]
    lengths = {len(correct), len(names), *map(len, matrix), len(matrix or counts)}
    if lengths != {len(counts)}:
        raise ValueError("its parts do not have one length")
    shares = [right / count if count else math.nan for right, count in zip(correct, counts, strict=True)]
    labels = sorted(range(len(counts)), key=lambda label: (math.isnan(shares[label]), shares[label]))
    rows = [
        [names[each], f"{counts[each]:,}", format_percent(shares[each]), _taken_for(matrix, names, each)]
        for each in labels[:_MOST_ROWS]
    ]
    small = matrix if len(names) <= _MOST_COLUMNS else []
    return Classes(int(content["step"]), rows, len(labels) - len(rows), names, counts, small)


def _taken_for(matrix: list[list[int]], names: list[str], label: int) -> str:
    """Return the most frequent wrong prediction for a class, with its count."""
    wrong = [(number, other) for row in matrix[label : label + 1] for other, number in enumerate(row)]
    number, other = max((each for each in wrong if each[1] != label), default=(0, 0))
    return f"{names[other]} ({number:,})" if number else NONE


def _numbers(values: Any) -> list[int]:
    if not isinstance(values, list) or not all(type(each) is int and 0 <= each < 2**53 for each in values):
        raise ValueError("not a list of counts")
    return values

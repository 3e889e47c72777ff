"""Metrics of an evaluation as sums: Metrics, top(), absolute_error(), R2, Perplexity, ConfusionMatrix, F1.

A metric takes the outputs and targets of a batch, and gives sums that add up over batches and ranks, so its
value does not depend on their number. Metrics checks what a user's metric gives, where it enters: the shape
of its sums, and one real number of its value. Outside are metrics that no sums have, such as the area under a
curve: torchmetrics has them.
"""

import math
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bootfile.ground.errors import BadInput

_ROUNDING = 1e-15  # times the root of their number: a smaller share of a sum is the rounding of additions
_MOST_IN_A_MATRIX = 1000  # classes: of 8 MB; of 100,000 it would have 80 GB


class Metrics:
    """The metrics of an evaluation besides loss and accuracy, and the one that chooses best.pth.

    metrics: name -> a function(outputs, targets) -> [n] with one number for each sample, whose mean is
    reported; or an object such as R2 with size, sums(outputs, targets) -> [size], sums of a batch that add up
    over batches and ranks, and value(sums) -> number of Python or NumPy, or a tensor of 0 dimensions, from
    float64 [size] on the CPU. best: the name of a metric, "acc" or "loss"; None: the accuracy, or the loss if
    the job has no accuracy. lowest: whether the lowest value is the best (default: true for the loss only).
    Raises BadInput.

        log.use(metrics.Metrics(mae=metrics.absolute_error, best="mae", lowest=True))
    """

    def __init__(self, best: str | None = None, lowest: bool | None = None, **metrics: Any):
        names = ["loss", "acc", *metrics]
        if best is not None and best not in names:
            raise BadInput(f"Metrics(best={best!r}): unknown metric, expected one of {', '.join(names)}")
        # a report has one figure of each name
        taken = metrics.keys() & {"loss", "acc", "count"}
        if taken:
            raise BadInput(f"a metric cannot have the name {taken.pop()!r}: every evaluation reports it")
        self.metrics = metrics  # name -> function or object
        self.best = best
        self.lowest = best == "loss" if lowest is None else lowest
        self._sizes = [getattr(metric, "size", 1) for metric in metrics.values()]  # sums of each metric
        self.size = sum(self._sizes) + 1  # the divisor of the loss is the last

    @property
    def best_of(self) -> str:
        """Return the metric that chooses best.pth, as a checkpoint stores it; "" for the default."""
        if not self.best:
            return ""
        return f"lowest {self.best}" if self.lowest else f"highest {self.best}"

    def sums(self, outputs: Any, targets: Any) -> list[torch.Tensor]:
        """Return the sums of each metric for a batch, float64 [its size]. evaluate() calls it on each rank
        for each batch of the rank."""
        parts = []
        for (name, metric), size in zip(self.metrics.items(), self._sizes, strict=True):
            # float64: in a sum over many batches the last ones must not be lost
            if hasattr(metric, "sums"):
                sums = metric.sums(outputs, targets)
                _check_shape(name, sums, size, "its sums")
                parts.append(sums.double())
            else:
                values = metric(outputs, targets)
                _check_shape(name, values, count_samples(targets), "one number a sample")
                parts.append(values.double().sum()[None])
        return parts

    def loss(self, sums: torch.Tensor) -> float:
        """Return the loss of all samples; NaN without samples or labels. sums: as for values()."""
        # without metrics the sums have no divisor of their own
        divisor = sums[-1] if len(sums) == 3 + self.size else sums[2]
        return (sums[0] / divisor).item() if divisor else math.nan

    def values(self, sums: torch.Tensor) -> dict[str, float]:
        """Return the value of each metric. sums: from evaluate(), over all ranks. Raises BadInput."""
        # NaN without samples: a division by zero would end the evaluation
        count = sums[2].item() or math.nan
        values = {}
        for (name, metric), part in zip(self.metrics.items(), self._split(sums), strict=True):
            if hasattr(metric, "sums"):
                values[name] = _as_number(name, metric.value(part))
            else:
                values[name] = part.item() / count
        return values

    def score(self, sums: torch.Tensor) -> float:
        """Return a score that is higher for a better model; NaN if it is unknown. sums: as for values(). The
        Checkpointer calls it on every rank after each evaluation, to choose best.pth."""
        _, value, is_lowest_best = self._find_chosen(sums)
        return -value if is_lowest_best else value

    def describe_score(self, sums: torch.Tensor) -> str:
        """Return the figure that chooses best.pth in words: "val_acc 0.9721". Without "=": patterns such as
        val_acc=(.*) of a platform must find evaluations only."""
        name, value, _ = self._find_chosen(sums)
        return f"val_{name} {value:.4g}"

    def _find_chosen(self, sums: torch.Tensor) -> tuple[str, float, bool]:
        """Return the name and the value of the figure that chooses best.pth, and whether low is good."""
        _, correct, count = sums[:3].tolist()
        # each rank has the sums of all ranks, so each finds the same score without a collective
        figures = {"loss": self.loss(sums), "acc": correct / (count or math.nan)}
        figures |= self.values(sums)
        # without best= the job decides: the accuracy if it has one, else the loss
        best = self.best or ("loss" if math.isnan(correct) else "acc")
        is_lowest_best = bool(self.lowest) or (not self.best and best == "loss")
        return best, figures[best], is_lowest_best

    def of_classes(self, sums: torch.Tensor) -> dict[str, Any] | None:
        """Return what the ConfusionMatrix among the metrics has counted; None if there is none.

        `count`, `correct`: the labels and the right predictions of each class, lists. `matrix`: int64
        [classes, classes], None if it has only counts. sums: as for values().
        """
        for metric, part in zip(self.metrics.values(), self._split(sums), strict=True):
            if isinstance(metric, ConfusionMatrix):
                count, correct = metric.of_classes(part)
                matrix = part.view(metric.classes, -1).long() if metric.has_matrix else None
                return {"count": count.long().tolist(), "correct": correct.long().tolist(), "matrix": matrix}
        return None

    def _split(self, sums: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the sums of each metric, on the CPU. Raises BadInput if they are not of these metrics."""
        if len(sums) - 3 not in (self.size - 1, self.size):
            raise BadInput(
                f"log.metrics has {self.size} sums and the evaluation {len(sums) - 3}: expected "
                "evaluation.evaluate(..., metrics=log.metrics)"
            )
        return sums[3 : 2 + self.size].cpu().split(self._sizes)


def _check_shape(name: str, result: Any, length: int, kind: str) -> None:
    """Raise BadInput if a user's metric has not returned a tensor of this length. kind: its content."""
    if not isinstance(result, torch.Tensor) or result.shape != (length,):
        shape = list(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
        raise BadInput(f"metric {name}: expected a tensor [{length}], {kind}, got {shape}")


def _as_number(name: str, value: Any) -> float:
    """Return what a metric's value() has returned as a number of Python. Metrics.values() calls it with the
    results of users' metrics. Raises BadInput if it is not one real number."""
    number = value.item() if getattr(value, "ndim", None) == 0 else value
    if isinstance(number, int | float):
        return number
    if isinstance(number, numbers.Real):  # such as a fraction
        return float(number)
    kind = type(value).__name__
    if isinstance(value, torch.Tensor | np.ndarray):
        kind = f"a {kind} {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    raise BadInput(f"metric {name}: expected one real number from value(sums), got {kind}")


def of_classes(classes: int, has_sets: bool, best: str | None) -> Metrics:
    """Return the metrics of a classifier: top5 (with more than 5 classes) and class_acc, or, if an image may
    have several labels, f1. best: as for Metrics, default also f1. Raises BadInput."""
    if has_sets:
        if best not in (None, "f1", "loss"):
            raise BadInput(f"--best_metric {best}: images have several labels, expected f1 or loss")
        return Metrics(f1=F1(classes), best=best or "f1")
    top5: dict = {"top5": top(5)} if classes > 5 else {}
    return Metrics(**top5, class_acc=ConfusionMatrix(classes), best=best)


def top(k: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a metric: whether the label is among the k highest logits. logits [n, classes, ...], labels
    int64 [n, ...]. For several labels per sample (masks) it is the share."""

    def metric(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if k > outputs.shape[1]:
            raise BadInput(f"top({k}): the model has {outputs.shape[1]} classes")
        is_right = (outputs.topk(k, dim=1).indices == targets.unsqueeze(1)).any(dim=1)
        return is_right.double().reshape(len(targets), -1).mean(dim=1)

    return metric


def absolute_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean absolute error of each sample, float64 [n]. outputs, targets: float [n] or [n, ...]."""
    outputs, targets = _columns(outputs, targets, "absolute_error")
    return (outputs - targets).abs().mean(dim=1)


class R2:
    """The coefficient of determination, as scikit-learn's r2_score: 1 if all outputs are exact.

    outputs, targets: float [n] or [n, columns]. With several columns it is the mean of their coefficients.
    """

    def __init__(self, columns: int = 1):
        self.columns = columns
        self.size = 4 * columns

    def sums(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return [count, sum, sum of squares, squared error] of each column of the targets, float64."""
        outputs, targets = _columns(outputs, targets, "R2")
        if targets.shape[1] != self.columns:
            raise BadInput(f"R2({self.columns}): the targets have {targets.shape[1]} columns")
        # the coefficient needs the mean of all targets, which is known after the last batch: sums until then
        parts = [torch.ones_like(targets), targets, targets**2, (outputs - targets) ** 2]
        return torch.stack(parts).sum(dim=1).reshape(-1)

    def value(self, sums: torch.Tensor) -> float:
        """Return the coefficient; NaN if the targets of a column are all equal."""
        count, total, squares, error = sums.view(4, self.columns)
        variation = squares - total**2 / count
        is_constant = variation <= _ROUNDING * count.clamp(min=1).sqrt() * squares
        return (1 - error / variation.masked_fill(is_constant, torch.nan)).mean().item()


class Perplexity:
    """The perplexity of a language model: the exponential of the mean cross entropy of a token, at least 1.
    logits [n, T, tokens], targets int64 [n, T]; -100 is ignored."""

    size = 2

    def sums(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return [cross entropy, tokens], float64."""
        loss = torch.nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")
        return torch.stack([loss.double(), (targets != -100).sum().double()])  # as cross_entropy() ignores

    def value(self, sums: torch.Tensor) -> float:
        """Return the perplexity; NaN without tokens."""
        return (sums[0] / sums[1]).exp().item()


class ConfusionMatrix:
    """The confusion matrix; its value is the mean of the classes' accuracies (balanced accuracy).

    logits [n, classes, ...], labels int64 [n, ...]; labels outside of 0..classes-1 are ignored. The log
    writes the matrix to confusion.json. With more than 1,000 classes there is no matrix, only the labels and
    the right predictions of each class.
    """

    def __init__(self, classes: int):
        self.classes = classes
        self.has_matrix = classes <= _MOST_IN_A_MATRIX
        self.size = classes**2 if self.has_matrix else 2 * classes

    def sums(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the matrix, rows by label, columns by prediction: float64 [classes * classes]; or labels and
        right predictions of each class: float64 [2 * classes]."""
        if outputs.shape[1] != self.classes:
            raise BadInput(f"ConfusionMatrix({self.classes}): the model has {outputs.shape[1]} classes")
        labels = targets.reshape(-1)
        predictions = outputs.argmax(dim=1).reshape(-1)
        counted = (labels >= 0) & (labels < self.classes)
        # the place of each sample among the sums; the one after the last takes those that do not count
        places = labels * self.classes + predictions if self.has_matrix else labels
        places = torch.where(counted, places, self.size)
        # without a matrix each sample has a second place, which counts it if its prediction is right
        if not self.has_matrix:
            is_right = counted & (labels == predictions)
            places = torch.cat([places, torch.where(is_right, labels + self.classes, self.size)])
        sums = torch.zeros(self.size + 1, dtype=torch.float64, device=places.device)
        return sums.scatter_add_(0, places, torch.ones_like(places, dtype=torch.float64))[:-1]

    def of_classes(self, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the labels and the right predictions of each class, float64 [classes] each."""
        if not self.has_matrix:
            return sums[: self.classes], sums[self.classes :]
        matrix = sums.view(self.classes, self.classes)
        return matrix.sum(dim=1), matrix.diagonal()

    def value(self, sums: torch.Tensor) -> float:
        """Return the mean accuracy of the classes that have labels; NaN without labels."""
        counts, correct = self.of_classes(sums)
        return (correct / counts)[counts > 0].mean().item()


class F1:
    """The F1 score for images with several labels, as scikit-learn's f1_score(average="macro"). A class is
    predicted if its logit is above 0. logits [n, classes], targets as for multi_hot()."""

    def __init__(self, classes: int):
        self.classes = classes
        self.size = 2 * classes

    def sums(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the right predictions of each class, then its predictions plus its labels, float64."""
        from common.compute.losses import multi_hot  # most jobs have one label for each sample

        predicted = outputs > 0
        labelled = multi_hot(targets, self.classes) > 0.5
        return torch.cat([(predicted & labelled).sum(0), predicted.sum(0) + labelled.sum(0)]).double()

    def value(self, sums: torch.Tensor) -> float:
        """Return the mean score of the classes that have labels or predictions; NaN without them."""
        right, both = sums.view(2, self.classes)
        return (2 * right / both)[both > 0].mean().item()


def _columns(outputs: torch.Tensor, targets: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both as float64 [n, columns]. Raises BadInput if their shapes differ then."""
    outputs = outputs.double().reshape(len(outputs), -1)
    targets = targets.double().reshape(len(targets), -1)
    if outputs.shape != targets.shape:
        shapes = f"outputs {list(outputs.shape)}, targets {list(targets.shape)}"
        raise BadInput(f"metric {name}: expected outputs and targets of one shape, got {shapes}")
    return outputs, targets


def count_samples(targets: Any) -> int:
    """Return the number of samples: the length of the first tensor, or of a list of dictionaries or texts."""
    if isinstance(targets, dict) and targets:
        return count_samples(next(iter(targets.values())))
    # a list of texts or of dictionaries has one sample an element
    if isinstance(targets, list | tuple) and targets and isinstance(targets[0], torch.Tensor | list | tuple):
        return count_samples(targets[0])
    return len(targets)

"""Metrics as sums of a batch: top(), absolute_error(), R2, Perplexity, ConfusionMatrix and F1.

Outside are metrics that no sums have, such as the area under a curve: torchmetrics has them.
"""

from collections.abc import Callable
from typing import Any

import torch

from bootfile.ground.errors import BadInput
from common.compute.losses import multi_hot
from common.run.evaluation import Metrics as Metrics  # jobs import it from here

_ROUNDING = 1e-15  # times the root of their number: a smaller share of a sum is the rounding of additions
_MOST_IN_A_MATRIX = 1000  # classes: of 8 MB; of 100,000 it would have 80 GB


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

    def of_classes(self, sums: torch.Tensor) -> dict[str, Any]:
        """Return `count` and `correct`, lists with the labels and the right predictions of each class, and
        `matrix`, int64 [classes, classes], or None."""
        count, correct = self._count(sums)
        matrix = sums.view(self.classes, -1).long() if self.has_matrix else None
        return {"count": count.long().tolist(), "correct": correct.long().tolist(), "matrix": matrix}

    def _count(self, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the labels and the right predictions of each class, float64 [classes] each."""
        if not self.has_matrix:
            return sums[: self.classes], sums[self.classes :]
        matrix = sums.view(self.classes, self.classes)
        return matrix.sum(dim=1), matrix.diagonal()

    def value(self, sums: torch.Tensor) -> float:
        """Return the mean accuracy of the classes that have labels; NaN without labels."""
        counts, correct = self._count(sums)
        return (correct / counts)[counts > 0].mean().item()


class F1:
    """The F1 score for images with several labels, as scikit-learn's f1_score(average="macro"). A class is
    predicted if its logit is above 0. logits [n, classes], targets as for multi_hot()."""

    def __init__(self, classes: int):
        self.classes = classes
        self.size = 2 * classes

    def sums(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the right predictions of each class, then its predictions plus its labels, float64."""
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

"""The losses of a classifier: cross entropy, or a binary one for each class."""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from bootfile.ground.errors import BadInput
from common.console.arguments import non_negative_float


def add_arguments(add: Callable[..., Any]) -> None:
    """Add the options of build(). add: add_argument of a parser or a group."""
    help = "ce (default): cross entropy; bce: binary cross entropy of each class, also for several labels"
    add("--loss", choices=["ce", "bce"], default="ce", help=help)
    add("--label_smoothing", type=non_negative_float, default=0.1, help="default: 0.1")


def build(args: argparse.Namespace, has_sets: bool) -> torch.nn.Module:
    """Return the criterion. has_sets: an image may have several labels. Raises BadInput."""
    if args.loss == "bce":
        return BinaryCrossEntropy(args.label_smoothing)
    if has_sets:
        raise BadInput("--loss ce needs one label for each image, and the list has several: add --loss bce")
    return torch.nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)


class BinaryCrossEntropy(torch.nn.Module):
    """The binary cross entropy of each class: the mean over samples and classes, as in timm's train.py.
    logits float [n, classes]; targets as for multi_hot(). Smoothing moves a target y to y (1 - s) + s /
    classes. Source: R. Wightman et al., "ResNet strikes back", arXiv:2110.00476."""

    def __init__(self, label_smoothing: float = 0.0):
        super().__init__()
        self.label_smoothing = label_smoothing
        self.reduction = "mean"

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        classes = logits.shape[1]
        logits = logits.float()  # bfloat16 would round the logarithms
        targets = multi_hot(targets, classes).to(logits.dtype)
        targets = targets * (1 - self.label_smoothing) + self.label_smoothing / classes
        return functional.binary_cross_entropy_with_logits(logits, targets, reduction=self.reduction)


def multi_hot(targets: torch.Tensor, classes: int) -> torch.Tensor:
    """Return the share of each class [n, classes]. targets: labels int64 [n], or already [n, classes]."""
    return functional.one_hot(targets, classes) if targets.ndim == 1 else targets

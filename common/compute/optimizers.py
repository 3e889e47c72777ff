"""Build the optimizer of a job from its options: SGD or AdamW, weight decay, clipped gradients."""

import argparse
from collections.abc import Callable
from typing import Any

import torch

from common.compute.models import FUSED
from common.console.arguments import FLAG, non_negative_float, positive_float

_DEFAULTS = {"sgd": {"lr": 0.256, "weight_decay": 1 / 32768}, "adamw": {"lr": 1e-3, "weight_decay": 0.05}}


def add_arguments(add: Callable[..., Any]) -> None:
    """Add the options of build() and clip(). add: add_argument of a parser or a group of one."""
    add("--optimizer", choices=list(_DEFAULTS), default="sgd", help="default: sgd")
    add("--lr", type=positive_float, help="peak learning rate (default: 0.256; adamw 0.001)")
    add("--momentum", type=non_negative_float, default=0.875, help="for sgd (default: 0.875)")
    add("--weight_decay", type=non_negative_float, help="default: 1/32768; adamw 0.05")
    add("--bn_weight_decay", **FLAG, help="true: also decay BatchNorm weights and biases")
    add(
        "--clip_grad",
        type=positive_float,
        metavar="NORM",
        help="largest norm of the gradients (default: none)",
    )


def find_defaults(args: argparse.Namespace) -> dict[str, float]:
    """Return the options that were not given and whose default depends on the optimizer."""
    defaults = _DEFAULTS[args.optimizer].items()
    return {name: value for name, value in defaults if getattr(args, name) is None}


def build(args: argparse.Namespace, model: torch.nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """Return the optimizer of the weights that are trained. Weights of one dimension decay only with
    --bn_weight_decay."""
    learned = [each for each in model.parameters() if each.requires_grad]
    decay = [each for each in learned if each.ndim > 1 or args.bn_weight_decay]
    no_decay = [each for each in learned if each.ndim <= 1 and not args.bn_weight_decay]
    groups = [{"params": decay, "weight_decay": args.weight_decay}, {"params": no_decay, "weight_decay": 0.0}]
    if args.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=args.lr, **FUSED[device.type])
    return torch.optim.SGD(groups, lr=args.lr, momentum=args.momentum, **FUSED[device.type])


def clip(args: argparse.Namespace, model: torch.nn.Module) -> None:
    """Scale the gradients to the norm --clip_grad if their norm is larger. Call it after unscale_()."""
    if args.clip_grad:
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)

"""Build the optimizer and the schedule of a job from its options."""

import argparse
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler

from bootfile.ground.errors import BadInput
from common.compute.models import FUSED
from common.console.arguments import non_negative_float, positive_float

_KINDS = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
_BLOCK = re.compile(r"(?:.*?\.)?(?:\w*_)?\d+(?=\.)")  # the beginning of a weight's name
_DEFAULTS = {"sgd": {"lr": 0.256, "weight_decay": 1 / 32768}, "adamw": {"lr": 1e-3, "weight_decay": 0.05}}


def add_arguments(add: Callable[..., Any]) -> None:
    """Add the options of build(), build_scheduler() and clip(). add: add_argument of a parser or a group."""
    add("--optimizer", choices=list(_DEFAULTS), default="sgd", help="default: sgd")
    add("--lr", type=positive_float, help="peak learning rate (default: 0.256; adamw 0.001)")
    add("--momentum", type=non_negative_float, default=0.875, help="momentum of sgd (default: 0.875)")
    add("--weight_decay", type=non_negative_float, help="weight decay (default: 1/32768; adamw 0.05)")
    help = "factor of the learning rate from each layer to the one before, for example 0.75 (default: 1)"
    add("--layer_decay", type=positive_float, default=1.0, metavar="SHARE", help=help)
    schedules = "decay to --min_lr, or step: x 0.1 after 1/3, 2/3 and 8/9 of the epochs (default: cosine)"
    add("--lr_schedule", choices=("cosine", "linear", "step"), default="cosine", help=schedules)
    add("--min_lr", type=non_negative_float, default=0.0, help="last learning rate (default: 0)")
    help = "epochs in which the rate rises to --lr (default: 8)"
    add("--warmup", type=non_negative_float, default=8.0, metavar="EPOCHS", help=help)
    help = "largest norm of the gradients (default: none)"
    add("--clip_grad", type=positive_float, metavar="NORM", help=help)


def check(args: argparse.Namespace) -> dict[str, float]:
    """Return the options that were not given and whose default depends on the optimizer. Raises BadInput."""
    completed = {
        name: default for name, default in _DEFAULTS[args.optimizer].items() if getattr(args, name) is None
    }
    lr = completed.get("lr", args.lr)
    if args.min_lr > lr:
        raise BadInput(f"--min_lr {args.min_lr} exceeds --lr {lr}")
    if args.min_lr and args.lr_schedule == "step":
        raise BadInput(f"--min_lr {args.min_lr} needs --lr_schedule cosine or linear")
    return completed


def build(
    args: argparse.Namespace,
    model: torch.nn.Module,
    device: torch.device,
    **further: Any,
) -> torch.optim.Optimizer:
    """Return the optimizer of the weights that are trained. Weights of one dimension do not decay. With
    --layer_decay, each layer has groups of its own; those of the head come first.

    further: arguments of the optimizer's class, such as betas=(0.9, 0.95), for a block in a copy of the job.
    """
    learned = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    depths = count_following(model) if args.layer_decay < 1 else dict.fromkeys(learned, 0)
    groups: list[dict[str, Any]] = []
    for depth in sorted({depths[name] for name in learned}):
        weights = [weight for name, weight in learned.items() if depths[name] == depth]
        # matrices and convolutions decay; norms and biases do not
        decay = [weight for weight in weights if weight.ndim > 1]
        no_decay = [weight for weight in weights if weight.ndim <= 1]
        lr = args.lr * args.layer_decay**depth
        groups.append({"params": decay, "weight_decay": args.weight_decay, "lr": lr})
        groups.append({"params": no_decay, "weight_decay": 0.0, "lr": lr})
    kwargs: dict[str, Any] = FUSED[device.type] | further
    if args.optimizer == "sgd":
        kwargs |= {"momentum": args.momentum}
    return _KINDS[args.optimizer](groups, lr=args.lr, **kwargs)


def count_following(model: torch.nn.Module) -> dict[str, int]:
    """Return how many layers follow that of each weight: name -> number; 0 for the head. A layer is a block:
    the weights whose names are equal up to the first numbered part (layer1.0, blocks.3). The weights before
    the first block are one layer, and so are those after the last. Source: K. Clark et al., "ELECTRA", ICLR
    2020. Raises BadInput if the model has no blocks."""
    names = [name for name, _ in model.named_parameters()]
    matches = [_BLOCK.match(name) for name in names]
    blocks = [match[0] if match else "" for match in matches]  # of each weight; "" outside of the blocks
    order = list(dict.fromkeys(filter(None, blocks)))
    if not order:
        raise BadInput("--layer_decay: the network has no numbered blocks, as blocks.3")
    # the weights are in the order of the network: one outside of the blocks belongs to the last layer begun
    begun = 0  # layers that have begun so far
    layers = []
    for block in blocks:
        if block:
            begun = order.index(block) + 1
        elif begun == len(order):  # the first weight after the last block
            begun += 1
        layers.append(begun)
    return {name: max(layers) - layer for name, layer in zip(names, layers, strict=True)}


def build_scheduler(
    args: argparse.Namespace,
    optimizer: torch.optim.Optimizer,
    steps_per_epoch: int,
    total_steps: int,
) -> lr_scheduler.LRScheduler:
    """Return a linear warm-up (arXiv:1706.02677), then cosine (arXiv:1608.03983), linear or step decay."""
    warmup = min(round(args.warmup * steps_per_epoch), total_steps)
    rise = lr_scheduler.LinearLR(optimizer, 1 / max(1, warmup), total_iters=max(1, warmup - 1))
    if args.lr_schedule == "step":
        ends = [math.ceil(share * args.epochs * steps_per_epoch) for share in (1 / 3, 2 / 3, 8 / 9)]
        milestones = [max(warmup, end) for end in ends]  # the rate rises first
        return lr_scheduler.ChainedScheduler([rise, lr_scheduler.MultiStepLR(optimizer, milestones)])
    # a trial of a few steps may end while the rate still rises
    if warmup == total_steps:
        return rise
    fall: lr_scheduler.LRScheduler
    if args.lr_schedule == "linear":
        fall = lr_scheduler.LinearLR(optimizer, 1.0, args.min_lr / args.lr, total_iters=total_steps - warmup)
    elif args.layer_decay < 1:  # CosineAnnealingLR ends all groups at one rate
        last = args.min_lr / args.lr
        steps = total_steps - warmup

        def cosine(step: int) -> float:
            """Return the factor of the rate: the scheduler calls it after each step."""
            return last + (1 - last) * (1 + math.cos(math.pi * min(step / steps, 1))) / 2

        fall = lr_scheduler.LambdaLR(optimizer, cosine)
    else:
        fall = lr_scheduler.CosineAnnealingLR(optimizer, total_steps - warmup, eta_min=args.min_lr)
    return lr_scheduler.SequentialLR(optimizer, [rise, fall], [warmup]) if warmup else fall


def clip(args: argparse.Namespace, model: torch.nn.Module) -> None:
    """Scale the gradients to the norm --clip_grad if their norm is larger. Call it after unscale_()."""
    if args.clip_grad:
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)

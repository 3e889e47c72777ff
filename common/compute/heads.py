"""The head of a classifier: find it, and train only it."""

import types
from collections.abc import Callable

import torch
from torch import nn

from common.compute import classifiers


def head(make: Callable[[int], nn.Module]) -> dict[str, int]:
    """Return the head of a network: the tensors whose shape depends on the number of classes, in order.

    make: called with the number of classes; returns the network. The result maps the name of each tensor to
    the dimension that counts the classes.
    """

    def make_both() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        return make(2).state_dict(), make(3).state_dict()

    two, three = classifiers.on_meta(make_both)  # without memory for the weights
    dimensions = {}
    for name in two:
        for dimension, (one, other) in enumerate(zip(two[name].shape, three[name].shape, strict=True)):
            if one != other:
                dimensions[name] = dimension
                break
    return dimensions


def freeze(model: nn.Module, arch: str, image_size: int, kwargs: str = classifiers.NO_KWARGS) -> None:
    """Freeze all weights of a classifier except its head. Frozen BatchNorm layers keep their statistics in
    training mode. The head is the tensors whose shape depends on the number of classes.
    """

    def make(classes: int) -> nn.Module:
        return classifiers.build(arch, classes, image_size, kwargs)

    learned = head(make)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in learned)
    for module in model.modules():
        is_frozen = not any(parameter.requires_grad for parameter in module.parameters())
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and is_frozen:
            module.eval()
            module.train = types.MethodType(_keep_mode, module)  # type: ignore[method-assign]


def _keep_mode(module: nn.Module, mode: bool = True) -> nn.Module:
    """Take the place of train() in a frozen BatchNorm: the loop calls model.train() after each evaluation."""
    return module

"""torchvision's and timm's classifiers by name (networks.arch()), and their heads."""

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained
from common.compute.networks import TIMM, import_timm
from common.console import config

NO_KWARGS = "{}"


def check(
    name: str,
    image_size: int,
    batch: int | None,
    other_size: int | None = None,
    kwargs: str = NO_KWARGS,
) -> None:
    """Raise BadInput if the network of this name (networks.arch()) cannot take images of that size.

    batch: images of one training batch; None: the network is not trained. other_size: a size on which the
    same network is also trained, or evaluated. kwargs: as for build().
    """

    def attempt() -> None:
        """Build the network, and try it on images of zeros."""
        classes = 10  # any number: only the sizes matter
        size = other_size or image_size
        model = build(name, classes, image_size, kwargs)
        if other_size:
            cannot = f"--arch {name} with --image_size {image_size} cannot take images of {size} pixels"
            _try(model.eval(), size, cannot, classes)
        if batch == 1:
            cannot = f"--arch {name} cannot be trained on 1 image of --image_size {size} at a time"
            _try(model.train(), size, f"{cannot}: raise --batch_size, or lower --accumulate", classes)

    on_meta(attempt)


def on_meta(make: Callable[[], Any]) -> Any:
    """Return make(), with tensors that take no memory and no arithmetic if its network supports them."""
    try:
        with torch.device("meta"):
            return make()
    except (BadInput, RuntimeError):
        return make()


def build(name: str, classes: int, image_size: int, kwargs: str = NO_KWARGS) -> nn.Module:
    """Return the network of this name (networks.arch()) with torch's layers, untrained. Input float [N, 3,
    image_size, image_size], output logits [N, classes]. kwargs: arguments of its class, an inline table of
    TOML. Raises BadInput if it has no such argument, or cannot take images of that size."""
    options = f"--arch {name}"
    if kwargs != NO_KWARGS:
        options += f" --model_kwargs {kwargs}"
    cannot = f"{options} cannot take images of --image_size {image_size}"
    build_network = _build_timm if name.startswith(TIMM) else _build_torchvision
    values = config.table(kwargs)
    if "num_classes" in values:
        raise BadInput(f"--model_kwargs {kwargs}: leave num_classes out: the classes are counted")
    # mostly one of the values is wrong; they have any type: the network may raise anything
    with explained(options if values else cannot, Exception):
        model = build_network(name, classes, image_size, **values)
    _try(model.eval(), image_size, cannot, classes)
    return model.train()


def _try(model: nn.Module, size: int, cannot: str, classes: int) -> None:
    """Raise BadInput if the network does not turn one image of this size into logits [1, classes]."""
    with explained(cannot, Exception), torch.no_grad():  # with unusual arguments it may raise anything
        output = model(torch.zeros(1, 3, size, size))
    shape: Any = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
    if shape != [1, classes]:
        raise BadInput(f"{cannot}: its output is {shape}, expected logits [1, {classes}]")


def _build_torchvision(name: str, classes: int, image_size: int, **kwargs: Any) -> nn.Module:
    """Return a classifier of torchvision. kwargs: of the user; they come before what its network needs."""
    import torchvision  # a job of the small ResNet does not need it

    needed: dict[str, Any] = {}
    if name in ("googlenet", "inception_v3"):
        needed["aux_logits"] = False
    if name.startswith("vit_"):
        needed["image_size"] = image_size
    if name.startswith("maxvit"):
        needed["input_size"] = (image_size, image_size)
    return torchvision.models.get_model(name, num_classes=classes, **needed | kwargs)


def _build_timm(name: str, classes: int, image_size: int, **kwargs: Any) -> nn.Module:
    """Return a classifier of timm. kwargs: of the user; they come before what its network needs."""
    create = import_timm().create_model
    name = name.removeprefix(TIMM)
    try:
        return create(name, num_classes=classes, **{"img_size": image_size} | kwargs)
    except TypeError:  # only transformers have img_size
        return create(name, num_classes=classes, **kwargs)


def head(make: Callable[[int], nn.Module]) -> dict[str, int]:
    """Return the head of a network: the tensors whose shape depends on the number of classes, in order.

    make: called with the number of classes; returns the network. The result maps the name of each tensor to
    the dimension that counts the classes.
    """

    # without memory for the weights
    two, three = on_meta(lambda: (make(2).state_dict(), make(3).state_dict()))
    dimensions = {}
    for name in two:
        sizes = zip(two[name].shape, three[name].shape, strict=True)
        for dimension, (one, other) in enumerate(sizes):
            if one != other and name not in dimensions:
                dimensions[name] = dimension
    return dimensions


def freeze(model: nn.Module, arch: str, image_size: int, kwargs: str = NO_KWARGS) -> None:
    """Freeze all weights of a classifier except its head. Frozen BatchNorm layers keep their statistics in
    training mode. The head is the tensors whose shape depends on the number of classes.
    """
    learned = head(lambda classes: build(arch, classes, image_size, kwargs))
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

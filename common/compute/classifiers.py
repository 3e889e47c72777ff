"""torchvision's and timm's classifiers by name (networks.arch())."""

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
    """Return the network of this name (networks.arch()) with torch's layers, untrained.

    Input float [N, 3, image_size, image_size], output logits [N, classes]. kwargs: arguments of its class, an
    inline table of TOML. Raises BadInput if it has no such argument, or cannot take images of that size.
    """
    given = f"--arch {name}"
    if kwargs != NO_KWARGS:
        given += f" --model_kwargs {kwargs}"
    cannot = f"{given} cannot take images of --image_size {image_size}"
    build_network = _build_timm if name.startswith(TIMM) else _build_torchvision
    values = config.table(kwargs)
    if "num_classes" in values:
        raise BadInput(f"--model_kwargs {kwargs}: leave num_classes out: the classes are counted")
    failure = cannot
    if values:  # mostly one of them is wrong
        failure = given
    with explained(failure, Exception):  # the values have any type: it may raise anything
        model = build_network(name, classes, image_size, **values)
    _try(model.eval(), image_size, cannot, classes)
    return model.train()


def _try(model: nn.Module, size: int, cannot: str, classes: int) -> None:
    """Raise BadInput if the network does not turn one image of this size into logits [1, classes]."""
    with explained(cannot, Exception), torch.no_grad():  # with unusual arguments it may raise anything
        output = model(torch.zeros(1, 3, size, size))
    shape: Any = type(output).__name__
    if isinstance(output, torch.Tensor):
        shape = list(output.shape)
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

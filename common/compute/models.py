"""Networks: the ResNet-18 of the small jobs, and torchvision's and timm's classifiers by name."""

import collections
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained
from common.console import config

# torch.optim.SGD(..., **FUSED[device.type]): on CUDA one kernel updates all weights, and the host does not
# wait for the device to check whether a step is finite. SGD has it since torch 2.3.
FUSED = collections.defaultdict[str, dict[str, Any]](dict)
FUSED["cuda"] = {"fused": True} if torch.__version__ >= "2.3" else {}
WIDTH_HELP = "channels of the first stage: 8 for a quick test (default: 64)"
NO_KWARGS = "{}"
_WIDEST = 1024  # channels of the first stage


def resnet18(channels: int = 3, classes: int = 10, width: int = 64) -> nn.Module:
    """Return a ResNet-18 for small images: a 3x3 stem without pooling, four stages of two blocks.

    width: channels of the stem and the first stage; each later stage has twice those of the one before.

    Input float [N, channels, H, W], output logits [N, classes]. 11,173,962 parameters for 3 channels and 10
    classes. Their names are those of the ModelArts sample, so --weights loads its files. Source: K. He et
    al., "Deep Residual Learning for Image Recognition", CVPR 2016, with the stem of its CIFAR networks. The
    last BatchNorm of each block begins with the weight 0 (P. Goyal et al., arXiv:1706.02677): otherwise the
    first epochs of a short training evaluate worse than chance.
    """
    if width > _WIDEST:
        raise BadInput(f"--width {width} is more than {_WIDEST} channels")
    return _ResNet(channels, classes, width)


def check(
    name: str,
    image_size: int,
    batch: int | None,
    other_size: int | None = None,
    kwargs: str = NO_KWARGS,
) -> None:
    """Raise BadInput if the network of this name (networks.arch()) cannot take images of that
    size.

    batch: images of one training batch; None: the network is not trained. other_size: a size on which the
    same network is also trained, or evaluated. kwargs: as for build().
    """

    def attempt() -> None:
        classes, size = 10, other_size or image_size
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
    from common.compute import networks  # a job with a network of its own does not need it

    given = f"--arch {name}" if kwargs == NO_KWARGS else f"--arch {name} --model_kwargs {kwargs}"
    cannot = f"{given} cannot take images of --image_size {image_size}"
    make = functools.partial(
        _build_timm if name.startswith(networks.TIMM) else _build_torchvision, name, classes, image_size
    )
    values = config.table(kwargs)
    if "num_classes" in values:
        raise BadInput(f"--model_kwargs {kwargs}: leave num_classes out: the classes are counted")
    with explained(given if values else cannot, Exception):  # the values have any type: it may raise anything
        model = make(**values)
    _try(model.eval(), image_size, cannot, classes)
    return model.train()


def _try(model: nn.Module, size: int, cannot: str, classes: int) -> None:
    """Raise BadInput if the network does not turn one image of this size into logits [1, classes]."""
    with explained(cannot, Exception), torch.no_grad():  # with unusual arguments it may raise anything
        output = model(torch.zeros(1, 3, size, size))
    shape = list(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
    if shape != [1, classes]:
        raise BadInput(f"{cannot}: its output is {shape}, expected logits [1, {classes}]")


def _build_torchvision(name: str, classes: int, image_size: int, **kwargs: Any) -> nn.Module:
    import torchvision

    extra: dict[str, Any] = {"aux_logits": False} if name in ("googlenet", "inception_v3") else {}
    extra |= {"image_size": image_size} if name.startswith("vit_") else {}
    extra |= {"input_size": (image_size, image_size)} if name.startswith("maxvit") else {}
    return torchvision.models.get_model(name, num_classes=classes, **extra | kwargs)


def _build_timm(name: str, classes: int, image_size: int, **kwargs: Any) -> nn.Module:
    from common.compute import networks  # a job with a network of its own does not need it

    create, name = networks.import_timm().create_model, name.removeprefix(networks.TIMM)
    try:
        return create(name, num_classes=classes, **{"img_size": image_size} | kwargs)  # for transformers
    except TypeError:
        return create(name, num_classes=classes, **kwargs)


def _keep_mode(module: nn.Module, mode: bool = True) -> nn.Module:
    return module


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


def checkpoint_blocks(model: Any, arch: str) -> None:
    """Compute the blocks of a classifier again in the backward pass, which then needs only their inputs: less
    memory, more time, equal results. Raises BadInput. Source: T. Chen et al., arXiv:1604.06174.
    """
    from common.compute import networks  # a job with a network of its own does not need it

    cannot = f"--grad_checkpointing: {arch} has no blocks for it: --accumulate N also needs less memory"
    if arch.startswith(networks.TIMM):
        try:
            model.set_grad_checkpointing()
        except (AssertionError, AttributeError) as error:
            raise BadInput(cannot) from error
    elif blocks := [*_blocks(model)]:
        for block in blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    else:
        raise BadInput(cannot)
    count_batches_once(model)


def count_batches_once(model: nn.Module) -> None:
    """Let BatchNorm's statistics count a batch once if layers are computed again in the backward pass."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.forward = functools.partial(_count_once, module, module.forward)  # type: ignore[method-assign]


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the members of sequences that are more than one layer."""
    for child in module.children():
        is_member = isinstance(module, nn.Sequential) and not isinstance(child, nn.Sequential)
        if is_member and next(child.children(), None):
            yield child
        else:
            yield from _blocks(child)


def _count_once(module: Any, forward: Callable, features: torch.Tensor) -> torch.Tensor:
    """Call the forward() of BatchNorm. In a backward pass its statistics do not change."""
    if torch._C._current_graph_task_id() == -1 or not (module.training and module.track_running_stats):
        return forward(features)
    momentum, module.momentum = module.momentum, 0.0
    module.num_batches_tracked.sub_(1)  # forward() adds 1
    try:
        return forward(features)
    finally:  # checkpoint() ends the second computation of a block with an exception
        module.momentum = momentum


def head(make: Callable[[int], nn.Module]) -> dict[str, int]:
    """Return the head of a network: the tensors whose shape depends on the number of classes, in order.

    make: called with the number of classes; returns the network. The result maps the name of each tensor to
    the dimension that counts the classes.
    """
    few, more = on_meta(lambda: (make(2).state_dict(), make(3).state_dict()))
    pairs = {name: list(zip(few[name].shape, more[name].shape, strict=True)) for name in few}
    return {
        name: next(place for place, (one, other) in enumerate(pair) if one != other)
        for name, pair in pairs.items()
        if any(one != other for one, other in pair)
    }


class _ResNet(nn.Module):
    def __init__(self, channels: int, classes: int, width: int):
        super().__init__()
        self.conv1 = nn.Sequential(
            _convolution(channels, width, 3), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.conv2 = _stage(width, width, stride=1)
        self.conv3 = _stage(width, 2 * width, stride=2)
        self.conv4 = _stage(2 * width, 4 * width, stride=2)
        self.conv5 = _stage(4 * width, 8 * width, stride=2)
        self.dense_layer = nn.Linear(8 * width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.conv5(self.conv4(self.conv3(self.conv2(self.conv1(images)))))
        return self.dense_layer(features.mean(dim=(2, 3)))


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        last = nn.BatchNorm2d(outputs)
        nn.init.zeros_(last.weight)  # the block begins as its shortcut
        self.residual_function = nn.Sequential(
            _convolution(inputs, outputs, 3, stride),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            _convolution(outputs, outputs, 3),
            last,
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(_convolution(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.residual_function(features) + self.shortcut(features))


def _stage(inputs: int, outputs: int, stride: int) -> nn.Module:
    return nn.Sequential(_Block(inputs, outputs, stride), _Block(outputs, outputs, stride=1))


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Module:
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)

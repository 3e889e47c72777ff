"""Load a trained network from its file of weights and the files of the run's folder."""

import importlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from common import models, starts
from common.arguments import Parser, positive_int
from common.checkpoint import weights
from common.exits import BadInput
from datasets.loaders.loader import MEAN, STD
from datasets.memory import image_set


class Trained(NamedTuple):
    """A trained network.

    model: in evaluation mode, on the CPU: float [N, channels, size, size] -> logits [N, len(classes)]
    name: the network's name
    mean, std: for the normalisation of pixels / 255
    share: the side of the centred square of an image that is used, as a share of its short side
    classes: names by label
    settings: the options of the run, {} if they are unknown
    """

    model: nn.Module
    name: str
    channels: int
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    share: float
    classes: tuple[str, ...]
    settings: dict[str, Any]


def add_arguments(parser: Parser) -> None:
    """Add the options of load()."""
    parser.add_argument(
        "weights", metavar="WEIGHTS", help="best.pth, epoch_<n>.pth, a checkpoint, or a run's folder"
    )
    parser.add_argument(
        "--arch", type=models.arch, help="network (default: that of starts.jsonl next to WEIGHTS)"
    )
    parser.add_argument("--image_size", type=positive_int, help="pixels (default: that of starts.jsonl)")


def load(path: str, arch: str | None = None, image_size: int | None = None) -> Trained:
    """Return the network of a file of weights, or of best.pth in a folder. It consists of torch's own layers.

    arch, image_size: as in imagenet.py, default those of the run. Raises BadInput if the network is unknown,
    or if the weights belong to another network.
    """
    path = os.path.join(path, "best.pth") if os.path.isdir(path) else path
    tensors = weights.read(path)
    runs = starts.read(weights.run_folder(path))
    settings = runs[-1]["settings"] if runs else {}
    arch, dataset = arch or settings.get("arch"), settings.get("dataset")
    make: Callable[[int], nn.Module]
    if isinstance(arch, str):
        name, channels, mean, std, share = arch, 3, MEAN, STD, 224 / 256
        size = image_size or settings.get("image_size") or 224
        make = lambda classes: models.build(arch, classes, size)  # noqa: E731
    elif dataset in image_set.NAMES:
        form = importlib.import_module(f"datasets.memory.{dataset}")
        name, channels, mean, std, share = (
            "ResNet-18 for small images",
            len(form.MEAN),
            form.MEAN,
            form.STD,
            1.0,
        )
        size, width = image_size or form.SIDE, settings.get("width", 64)
        make = lambda classes: models.resnet18(channels, classes, width).eval()  # noqa: E731
    else:
        raise BadInput(
            f"{path}: no starts.jsonl of imagenet.py or train.py in its folder: name the network with "
            "--arch and --image_size"
        )
    place = next(((each, dim) for each, dim in models.head(make).items() if each in tensors), None)
    if place is None:
        raise BadInput(f"{path}: no classifier weights of {name}: the file is of another network")
    count = tensors[place[0]].shape[place[1]]
    model = make(count)
    weights.fill(path, model, tensors, complete=True)
    classes = tuple(map(str, weights.read_class_names(path)))
    if len(classes) != count:
        classes = tuple(map(str, range(count)))
    return Trained(model, name, channels, size, mean, std, share, classes, settings)

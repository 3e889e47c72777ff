"""Load a trained network from its file of weights and the files of the run's folder."""

import functools
import importlib
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from bootfile.ground.errors import BadInput, in_one_line
from bootfile.records import STARTS, read_starts
from common.checkpoint import weights
from common.compute import classifiers, models, networks
from common.console.arguments import boolean, positive_int
from common.run import starts
from datasets.loaders import preprocessing
from datasets.memory import image_set


class Trained(NamedTuple):
    """A trained network.

    model: in evaluation mode, on the CPU: float [N, channels, size, size] -> logits [N, len(classes)]
    name: the network's name
    mean, std: for the normalisation of pixels / 255
    share: the side of the centred square of an image that is used, as a share of its short side
    classes: names by label
    settings: those options of the run that are in _OPTIONS and known
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


_NETWORK = ("arch", "dataset", "width", "model_kwargs")  # the options that choose one
_OPTIONS: dict[str, Callable[[str], Any]] = {  # of the run: the type of the option
    "arch": networks.arch, "image_size": networks.image_size, "val_image_size": networks.image_size,
    "dataset": str, "width": positive_int,
    "amp": boolean, "model_kwargs": str, "loss": str, **preprocessing.KINDS,
}  # fmt: skip


def load(
    path: str, arch: str | None = None, image_size: int | None = None, model: str | None = None
) -> Trained:
    """Return the network of a file of weights, or of best.pth in a folder. It consists of torch's own layers.

    arch, image_size: as in imagenet.py, default those of the run. model: FILE.py:FUNCTION, which returns
    another network. Code is never run because a file of the run names it. Raises BadInput if the network is
    unknown, or if the weights belong to another network.
    """
    if os.path.isdir(path):
        path = os.path.join(path, "best.pth")
    tensors, _ = weights.read(path)
    folder = weights.run_folder(path)
    given = {"arch": arch, "image_size": image_size, "val_image_size": image_size}
    settings = _read_settings(folder, given, bool(model))
    arch = settings.get("arch")
    dataset = settings.get("dataset")
    make: Callable[[int], nn.Module]  # builds the network for a number of classes
    if model or arch:
        settings |= preprocessing.find(arch, path) if arch else {}
        mean, std, share, settings["interpolation"] = preprocessing.values(settings)
        name = model or str(arch)
        channels = 3
        size = settings.get("image_size", 224)
        kwargs = settings.get("model_kwargs", classifiers.NO_KWARGS)
        make = functools.partial(classifiers.build, str(arch), image_size=size, kwargs=kwargs)
    elif dataset in image_set.NAMES:
        form = importlib.import_module(f"datasets.memory.{dataset}")
        name = "ResNet-18 for small images"
        channels = len(form.MEAN)
        mean, std, share = form.MEAN, form.STD, 1.0
        size = image_size or form.SIDE
        make = functools.partial(models.resnet18, channels, width=settings.get("width", 64))
    else:
        options = "--arch and --image_size, or --model FILE.py:FUNCTION"
        raise BadInput(f"{path}: {STARTS} next to it names no network: add {options}")
    shown_size = settings.get("val_image_size", size)
    if model:  # code that the user names: the number of its classes is that of its output
        network, count = _call(model, shown_size)
    else:
        count = _count_classes(path, name, make, tensors)
        network = make(count).eval()
    weights.fill(path, network, tensors, complete=True)
    names = weights.read_class_names(path)
    classes = tuple(map(str, names if len(names) == count else range(count)))  # they may not be known
    return Trained(network, name, channels, shown_size, mean, std, share, classes, settings)


def _count_classes(path: str, name: str, make: Callable[[int], nn.Module], tensors: Any) -> int:
    """Return the number of classes of a file of weights. Raises BadInput if they are of another network."""
    # the tensor of the head, whose shape has the number: networks without memory tell its name
    name_of_head, dim = next(iter(classifiers.head(make).items()), ("", 0))
    skeleton = classifiers.on_meta(functools.partial(make, 2))
    matching, *_ = weights.match(path, skeleton.state_dict(), tensors)
    shape: Sequence[int] = matching[name_of_head].shape if name_of_head in matching else ()
    if dim >= len(shape) or 0 in shape:
        raise BadInput(f"{path}: no classifier weights of {name}: the file is of another network")
    count: int = shape[dim]
    # wrong weights are refused before they take memory
    empty = classifiers.on_meta(functools.partial(make, count))
    weights.fill(path, empty, tensors, complete=True)
    return count


@torch.no_grad()
def _call(model: str, size: int) -> tuple[nn.Module, int]:
    """Return (the network of FILE.py:FUNCTION, the number of its classes). Raises BadInput."""
    file, _, function = model.rpartition(":")
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)))  # as `python FILE` does
    try:
        network = runpy.run_path(file)[function]().eval()
        _, count = network(torch.zeros(1, 3, size, size)).shape
    except (Exception, SystemExit) as error:  # code of the user may raise anything
        expected = "FILE.py:FUNCTION without arguments; its network returns logits [1, classes]"
        reason = in_one_line(error)
        raise BadInput(f"--model {model} with --image_size {size}: {reason}; expected {expected}") from error
    return network, count


def _read_settings(folder: str, given: dict[str, Any], is_own: bool) -> dict[str, Any]:
    """Return the _OPTIONS of the last start in a run's folder, without those that choose a network if it is
    the user's own. given: replaces them unless it is None. Raises BadInput."""
    starts_of_run = read_starts(folder)
    settings = dict(starts_of_run[-1]["settings"]) if starts_of_run else {}
    settings |= {name: value for name, value in given.items() if value}
    if settings.get("antialias") is False:
        raise BadInput(
            f"{folder} has a run with --antialias false, which was removed: its accuracy is met by version "
            "0.55.0 (commit 7fefafdc)"
        )
    # the folder may be another user's: each option is checked as one of a command line
    kinds = {name: kind for name, kind in _OPTIONS.items() if not (is_own and name in _NETWORK)}
    return starts.check_settings(settings, kinds, folder)

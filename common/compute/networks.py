"""The options that name a network and the size of its images. This module imports no torch, for --help."""

import argparse
import re
from typing import Any

from bootfile.console.parser import positive_int
from bootfile.ground.errors import import_optional

TIMM = "timm:"  # the name of a network of timm begins with this
_LARGEST = 8192  # pixels of a side


def arch(text: str) -> str:
    """Check an argument that names a classifier of torchvision, or timm:NAME, and no model of a hub. Raises
    ArgumentTypeError, and MissingPackage without timm."""
    if text.startswith(TIMM):
        timm = import_timm()
        name = text.removeprefix(TIMM)
        if re.fullmatch(r"[\w.-]+", name) and timm.is_model(name):
            return text
        raise argparse.ArgumentTypeError(f"{text} is not a model of timm {timm.__version__}")
    import torchvision

    if text not in torchvision.models.list_models(module=torchvision.models):
        raise argparse.ArgumentTypeError(
            f"{text} is not a torchvision classifier ({torchvision.__version__})"
        )
    return text


def image_size(text: str) -> int:
    """Parse an argument: the side of a square image, at most 8192 pixels."""
    value = positive_int(text)
    if value > _LARGEST:
        raise argparse.ArgumentTypeError(f"{text} is more than {_LARGEST} pixels")
    return value


def import_timm() -> Any:
    """Return the package timm. Raises MissingPackage."""
    return import_optional("timm", "--arch timm:NAME needs timm")

"""How a network wants its images: mean, std, centre crop and interpolation, by default those of its weights.

timm's networks and published weights carry them, and so does the run of a file of weights. Otherwise they are
those of ImageNet's ResNets. An option is None if it has this default.
"""

import argparse
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bootfile.ground.errors import BadInput
from bootfile.records import read_starts
from common.checkpoint import weights
from common.compute.networks import TIMM, import_timm
from common.console.arguments import IDENTITY, non_negative_float, positive_float
from common.run import starts
from datasets.folders.listing import fraction
from datasets.folders.resize import BICUBIC, BILINEAR
from datasets.loaders.image_loader import MEAN, STD


class Preprocessing(NamedTuple):
    """How images are prepared. mean, std: of pixels / 255, three channels. crop_share: centre crop / short
    side, in evaluations. interpolation: BILINEAR or BICUBIC."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_share: float
    interpolation: str


_DEFAULT = Preprocessing(MEAN, STD, 224 / 256, BILINEAR)


def _to_options(values: Preprocessing) -> dict[str, Any]:
    """Return the options of add_arguments() that have these values: 0.485,0.456,0.406."""
    options: dict[str, Any] = values._asdict()
    for name in ("mean", "std"):
        options[name] = ",".join(f"{number:g}" for number in options[name])
    return options


_DEFAULTS = _to_options(_DEFAULT)


def mean(text: str, number: Callable[[str], float] = non_negative_float) -> str:
    """Check an argument: three numbers in 0..1, such as 0.5,0.5,0.5. Raises ArgumentTypeError."""
    values = [number(part) for part in text.split(",")]
    if len(values) != 3 or max(values) > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not three numbers in 0..1, such as 0.5,0.5,0.5")
    return text


def std(text: str) -> str:
    """Check an argument as mean() does, but each number must be above 0."""
    return mean(text, positive_float)


def share(text: str) -> float:
    """Check an argument: "87.5%" or 0.875, above 0 and at most 1. Raises ArgumentTypeError."""
    value = fraction(text)
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share above 0")
    return value


KINDS: dict[str, Callable[[str], Any]] = {
    "mean": mean, "std": std, "crop_share": share, "interpolation": str,
}  # fmt: skip


def add_arguments(add: Callable[..., Any]) -> None:
    """Add the options. add: add_argument of a parser or of an argument group."""
    rest = "(default: the model's own)"
    add("--mean", role=IDENTITY, type=mean, metavar="R,G,B", help=f"mean of pixels / 255 {rest}")
    add("--std", role=IDENTITY, type=std, metavar="R,G,B", help=f"standard deviation of pixels / 255 {rest}")
    add("--crop_share", type=share, metavar="SHARE", help=f"evaluations: centre crop / short side {rest}")
    add("--interpolation", role=IDENTITY, choices=[BILINEAR, BICUBIC], help=f"how images are resized {rest}")


def complete(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of add_arguments(), those of the model if they are not given. args: also arch,
    weights, evaluate. Raises BadInput. A job calls it on rank 0 before it indexes its images."""
    # files of weights or a package are read here, on rank 0 only
    of_model = find(args.arch, args.weights)
    completed: dict[str, Any] = {}
    for name, default in _DEFAULTS.items():
        chosen = getattr(args, name) or of_model.get(name)
        # other values would give other results than in the training, with no error
        if args.evaluate and name in ("mean", "std"):
            trained = of_model.get(name, chosen)
            if chosen != trained:
                raise BadInput(f"--{name} {chosen}: the weights were trained with {trained}: leave it out")
        completed[name] = None if chosen == default else chosen
    return completed


def values(settings: Mapping[str, Any]) -> Preprocessing:
    """Return the values of the options of a run."""
    options = {name: settings.get(name) or default for name, default in _DEFAULTS.items()}
    numbers = {name: tuple(map(float, options[name].split(","))) for name in ("mean", "std")}
    return Preprocessing(**(options | numbers))


def find(arch: str, name: str | None) -> dict[str, Any]:
    """Return the options that timm, published weights, or the run of a file of weights define. name: of
    --weights."""
    is_name = weights.is_published(arch, name)
    if is_name:
        weights.check_published(arch, str(name))
    elif name:
        folder = weights.run_folder(name)
        runs = read_starts(folder)
        # weights of a run of ours: as its options were, whatever its network wants by default
        if runs:
            known = {"mean": _DEFAULTS["mean"], "std": _DEFAULTS["std"]}
            return known | starts.check_settings(runs[-1]["settings"], KINDS, folder)
    # no run of ours: what timm or torchvision have published with the network or its weights
    values_of_model = None
    if arch.startswith(TIMM):
        values_of_model = _read_timm(arch.removeprefix(TIMM), name if is_name else None)
    elif is_name:
        own = weights.published_of(arch)[name].transforms()
        crop_share = own.crop_size[0] / own.resize_size[0]
        values_of_model = Preprocessing(own.mean, own.std, crop_share, own.interpolation.value)
    options = _to_options(values_of_model) if values_of_model else {"interpolation": BILINEAR}
    if options["interpolation"] != BICUBIC:  # for example "random", or one that is not offered
        options["interpolation"] = BILINEAR
    return options


def _read_timm(model: str, tag: str | None) -> Preprocessing | None:
    """Return what a network of timm, or its weights of a tag, was trained with; None if timm has nothing."""
    if tag not in (None, weights.DEFAULT):
        model = f"{model.partition('.')[0]}.{tag}"
    config = import_timm().models.get_pretrained_cfg(model)
    if not config:
        return None
    return Preprocessing(config.mean, config.std, min(config.crop_pct, 1.0), config.interpolation)

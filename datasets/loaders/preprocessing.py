"""How a network wants its images: mean, std, centre crop and interpolation, by default those of its weights.

timm's networks and published weights carry them, and so does the run of a file of weights. Otherwise they are
those of ImageNet's ResNets. An option is None if it has this default.
"""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from bootfile.ground.errors import BadInput
from common.checkpoint import pretrained, weights
from common.compute.networks import TIMM, import_timm
from common.console.arguments import IDENTITY, non_negative_float, positive_float
from common.run import starts
from datasets.folders import option_types
from datasets.folders.resize import BICUBIC, BILINEAR
from datasets.loaders.image_loader import MEAN, STD


def _text(value: Any) -> Any:
    return ",".join(f"{each:g}" for each in value) if isinstance(value, list | tuple) else value


_DEFAULTS = {"mean": _text(MEAN), "std": _text(STD), "crop_share": 224 / 256, "interpolation": BILINEAR}


def mean(text: str, number: Callable[[str], float] = non_negative_float) -> str:
    """Check an argument: three numbers in 0..1, such as 0.5,0.5,0.5. Raises ArgumentTypeError."""
    values = [number(each) for each in text.split(",")]
    if len(values) != 3 or max(values) > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not three numbers in 0..1, such as 0.5,0.5,0.5")
    return text


def std(text: str) -> str:
    """Check an argument as mean() does, but each number must be above 0."""
    return mean(text, positive_float)


def share(text: str) -> float:
    """Check an argument: "87.5%" or 0.875, above 0 and at most 1. Raises ArgumentTypeError."""
    if value := option_types.fraction(text):
        return value
    raise argparse.ArgumentTypeError(f"{text!r} is not a share above 0")


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
    weights, evaluate. Raises BadInput."""
    own = find(args.arch, args.weights)
    chosen = {name: getattr(args, name) or own.get(name) for name in _DEFAULTS}
    for name in ("mean", "std") if args.evaluate else ():
        trained = own.get(name, chosen[name])
        if chosen[name] != trained:
            raise BadInput(f"--{name} {chosen[name]}: the weights were trained with {trained}: leave it out")
    return {name: None if each == _DEFAULTS[name] else each for name, each in chosen.items()}


def values(settings: Mapping[str, Any]) -> Any:
    """Return (mean, std, crop share, interpolation) of the options of a run."""
    mean, std, *rest = (settings.get(name) or each for name, each in _DEFAULTS.items())
    return *(tuple(map(float, each.split(","))) for each in (mean, std)), *rest


def find(arch: str, name: str | None) -> dict[str, Any]:
    """Return the options that timm, published weights, or the run of a file of weights define."""
    is_name = pretrained.is_name(arch, name)
    if is_name:
        pretrained.check(arch, str(name))
    elif name and (runs := starts.read(weights.run_folder(name))):
        known = {each: _DEFAULTS[each] for each in ("mean", "std")}
        return known | starts.check_settings(runs[-1]["settings"], KINDS, weights.run_folder(name))
    if arch.startswith(TIMM):
        model = arch.removeprefix(TIMM)
        if is_name and name != pretrained.DEFAULT:
            model = f"{model.partition('.')[0]}.{name}"
        own = import_timm().models.get_pretrained_cfg(model)
        found = own and (own.mean, own.std, min(own.crop_pct, 1.0), own.interpolation)
    else:
        own = pretrained.weights_of(arch)[name].transforms() if is_name else None
        found = own and (own.mean, own.std, own.crop_size[0] / own.resize_size[0], own.interpolation.value)
    options = dict(zip(_DEFAULTS, map(_text, found or ()), strict=False))
    return options | ({} if options.get("interpolation") == BICUBIC else {"interpolation": BILINEAR})

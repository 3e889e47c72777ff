"""Parameters of the pixel changes after the crop: pure functions of (seed, epoch, sample id).

Every parameter is an integer, so the receipt covers it and every device computes the same pixels from it
(datasets/loaders/pixels.py). Sources: TrivialAugment (Mueller and Hutter, ICCV 2021, arXiv:2103.10158, the
"wide" space), RandAugment (Cubuk et al., arXiv:1909.13719), Random Erasing (Zhong et al., arXiv:1708.04896),
CutMix (Yun et al., arXiv:1905.04899), mixup (Zhang et al., arXiv:1710.09412).
"""

import argparse
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from bootfile.ground.errors import BadInput
from bootfile.sampling.philox import Operation, below, draw, uniform
from common.console.arguments import FLAG, non_negative_float

ONE = 2**16  # factors and shares are multiples of 1 / ONE
STRONGEST = 30  # strengths of operations are -30..30
OPERATIONS = (
    "identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "saturation",
    "contrast", "sharpness", "posterize", "solarize", "autocontrast", "equalize",
)  # fmt: skip
NOTHING, MIXUP, CUTMIX = range(3)
# of an erased box
_ERASED = (0.02, 0.33)  # share of the area
_RATIO = (0.3, 3.3)  # height / width


class Effects(NamedTuple):
    """The effects of a training; 0 means none.

    trivial_augment: one random operation of OPERATIONS per sample.
    rand_augment: "N,M": N random operations one after the other, all of strength M or -M.
    color_jitter: X; the factors of brightness, contrast and saturation are in 1 - X..1 + X.
    random_erasing: probability.
    mixup, cutmix: alpha of the Beta distribution. If both are given, each sample gets one of them.
    """

    trivial_augment: bool = False
    color_jitter: float = 0.0
    random_erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    rand_augment: str | None = None


class Drawn(NamedTuple):
    """Parameters of n samples, int64 [n] each.

    operation, strength: see operation_at().
    brightness, contrast, saturation: factors, in 1 / ONE.
    erase_*: a box in pixels; its height is 0 if nothing is erased.
    mix: NOTHING, MIXUP or CUTMIX with the other sample of the pair.
    share: share of the sample itself in the result, in 1 / ONE.
    mix_*: the box that is copied from the other sample.
    """

    operation: np.ndarray
    strength: np.ndarray
    brightness: np.ndarray
    contrast: np.ndarray
    saturation: np.ndarray
    erase_top: np.ndarray
    erase_left: np.ndarray
    erase_height: np.ndarray
    erase_width: np.ndarray
    mix: np.ndarray
    share: np.ndarray
    mix_top: np.ndarray
    mix_left: np.ndarray
    mix_height: np.ndarray
    mix_width: np.ndarray


def operation_at(operation: Any, strength: Any, place: int) -> tuple[Any, Any]:
    """Return (index in OPERATIONS, strength -STRONGEST..STRONGEST) of the operation at a place, from 0.
    operation, strength: a number or int64 [n] of Drawn. Each digit of `operation`, base 32, is an index, with
    the first operation in the lowest digit; 16 is added to it if the operation has the strength -strength."""
    digit = operation >> 5 * place & 31
    return digit & 15, strength * (1 - 2 * (digit >> 4))


def rand_augment(text: str) -> str:
    """Check an argument: N,M such as 2,9. Raises ArgumentTypeError."""
    if re.fullmatch(r"[1-9],\d{1,2}", text) and int(text[2:]) <= STRONGEST:
        return text
    expected = f"N,M: 1 to 9 operations and a strength of 0 to {STRONGEST}, such as 2,9"
    raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")


def add_arguments(add: Callable[..., Any]) -> None:
    """Add the options of from_args(). add: add_argument of a parser or of an argument group."""
    number = {"type": non_negative_float, "default": 0.0}
    add("--trivial_augment", **FLAG, help="one random operation for each image")
    help = f"N random operations of strength M, at most {STRONGEST}, for example 2,9 (default: none)"
    add("--rand_augment", type=rand_augment, metavar="N,M", help=help)
    add("--color_jitter", **number, metavar="X", help="brightness and colours change by up to X (default: 0)")
    add("--random_erasing", **number, metavar="P", help="probability that a box is erased (default: 0)")
    add("--mixup", **number, metavar="ALPHA", help="mix pairs of images (default: 0, none)")
    add("--cutmix", **number, metavar="ALPHA", help="exchange boxes between pairs (default: 0, none)")


def from_args(args: argparse.Namespace, local_batch: int) -> Effects | None:
    """Return the effects of a training, None if it has none. local_batch: samples per step of one process.
    Raises BadInput. Every rank calls it at the start of a training."""
    effects = Effects(**{name: getattr(args, name) for name in Effects._fields})
    for name in ("color_jitter", "random_erasing"):
        if getattr(effects, name) > 1:
            raise BadInput(f"--{name} {getattr(effects, name)} is not in 0..1")
    if effects.trivial_augment and effects.rand_augment:
        raise BadInput("--trivial_augment and --rand_augment exclude each other")
    if (effects.mixup or effects.cutmix) and local_batch % 2:
        raise BadInput(
            "--mixup and --cutmix mix pairs of images: expected an even number of samples of a step for each "
            f"process, got {local_batch}"
        )
    # the loader is then an ordinary one, without parameters in its batches
    return effects if any(effects) else None


def draw_effects(effects: Effects, ids: np.ndarray, seed: int, epoch: int | np.ndarray, size: int) -> Drawn:
    """Return the parameters of samples. ids: int64 [n]. epoch: a number, or one for each id. size: side of
    the images, pixels."""
    # each effect has random words of its own: one more or less does not change the others
    nothing = np.zeros(len(ids), np.int64)
    values = dict.fromkeys(Drawn._fields, nothing)
    values |= dict.fromkeys(("brightness", "contrast", "saturation", "share"), nothing + ONE)
    if effects.trivial_augment:
        words = draw(seed, epoch, ids, Operation.TRIVIAL_AUGMENT)
        values["operation"] = below(words[0], len(OPERATIONS))
        values["strength"] = below(words[1], STRONGEST + 1) * np.where(words[2] >= 2**31, -1, 1)
    if effects.rand_augment:
        count, strength = map(int, effects.rand_augment.split(","))
        values["strength"] = nothing + strength
        for place in range(count):
            words = draw(seed, epoch, ids, Operation.RAND_AUGMENT, block=place)
            digit = below(words[0], len(OPERATIONS)) + np.where(words[1] >= 2**31, 16, 0)
            values["operation"] = values["operation"] + (digit << 5 * place)
    if effects.color_jitter:
        words = draw(seed, epoch, ids, Operation.COLOR_JITTER)
        low = 1 - effects.color_jitter
        high = 1 + effects.color_jitter
        for word, name in zip(words[:3], ("brightness", "contrast", "saturation"), strict=True):
            values[name] = _parts(uniform(word, low, high))
    if effects.random_erasing:
        words = draw(seed, epoch, ids, Operation.ERASE)
        more = draw(seed, epoch, ids, Operation.ERASE, block=1)
        area = size * size * uniform(words[1], *_ERASED)
        ratio = np.exp(uniform(words[2], math.log(_RATIO[0]), math.log(_RATIO[1])))
        height = np.minimum(np.rint(np.sqrt(area * ratio)).astype(np.int64), size)
        width = np.minimum(np.rint(np.sqrt(area / ratio)).astype(np.int64), size)
        is_erased = uniform(words[0], 0, 1) < effects.random_erasing
        values["erase_top"] = below(more[0], size - height + 1)
        values["erase_left"] = below(more[1], size - width + 1)
        values["erase_height"] = np.where(is_erased, height, 0)
        values["erase_width"] = width
    if effects.mixup or effects.cutmix:
        values |= _draw_mix(effects, ids, seed, epoch, size)
    return Drawn(**values)


def _draw_mix(
    effects: Effects, ids: np.ndarray, seed: int, epoch: int | np.ndarray, size: int
) -> dict[str, np.ndarray]:
    """Return the values of Drawn for mixup and CutMix."""
    from scipy.special import betaincinv  # only these effects need it

    words = draw(seed, epoch, ids, Operation.MIX)
    if effects.mixup and effects.cutmix:
        is_cut = words[3] >= 2**31
    else:
        is_cut = np.full(len(ids), bool(effects.cutmix))
    alpha = np.where(is_cut, effects.cutmix, effects.mixup)
    share = betaincinv(alpha, alpha, (words[0] + 0.5) / 2**32)
    side = np.rint(size * np.sqrt(1 - share)).astype(np.int64)
    # the middle of a box: its row and its column
    middle = below(words[1], size)
    centre = below(words[2], size)
    top = np.maximum(middle - side // 2, 0)
    left = np.maximum(centre - side // 2, 0)
    height = np.minimum(middle - side // 2 + side, size) - top
    width = np.minimum(centre - side // 2 + side, size) - left
    # a box at the border is cut: the labels are mixed by the pixels that are really copied
    share = np.where(is_cut, 1 - height * width / size**2, share)
    boxes = {"mix_top": top, "mix_left": left, "mix_height": height, "mix_width": width}
    boxes = {name: np.where(is_cut, box, 0) for name, box in boxes.items()}
    return {"mix": np.where(is_cut, CUTMIX, MIXUP), "share": _parts(share), **boxes}


def _parts(values: np.ndarray) -> np.ndarray:
    """Return factors or shares in 1 / ONE."""
    return np.rint(values * ONE).astype(np.int64)

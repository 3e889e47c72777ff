"""Change the pixels and labels of a batch by the parameters of datasets/sampling/effects.py. All arithmetic
on pixels uses integers, so a sample gets the same pixels on every device and in every batch."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from bootfile.ground import accelerator
from bootfile.sampling.generators import seed_all
from bootfile.sampling.philox import Operation, draw
from bootfile.sampling.plan import Batch, Plan, rows
from common.compute.losses import multi_hot
from datasets.sampling import effects as drawing
from datasets.sampling.effects import MIXUP, ONE, OPERATIONS, STRONGEST, Drawn, Effects, draw_effects

Change = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # of (images, labels)

_GREY = (19595, 38470, 7471)  # ITU-R BT.601, in 1 / ONE
_IMAGES_PER_CHUNK = 4  # an even number
_BITS = ONE.bit_length() - 1  # bits of a factor's fraction


class Space(NamedTuple):
    """The effects of the largest strength. shift: pixels. bits: those that posterize removes."""

    enhance: float
    shear: float
    shift: float
    degrees: float
    bits: int


WIDE = Space(0.99, 0.99, 32, 135, 6)  # TrivialAugment's


def narrow(size: int) -> Space:
    """Return RandAugment's space for images of this side, pixels, as in torchvision. apply() calls it for
    each batch, because the side may change from epoch to epoch."""
    return Space(0.9, 0.3, 150 / 331 * size, 30, 4)


def plan_change(
    plan: Plan, batch: Batch, effects: Effects | None, transform: Change | None, mean: tuple[float, ...]
) -> tuple[Batch, Change]:
    """Return the batch, with the parameters of its effects in `crops`, and the function that changes its
    images and labels: `transform`, then the effects. ToDevice.move() calls the function right after it has
    started the copy."""
    seed = plan.sampler.seed
    epoch = batch.epoch
    ids = batch.ids
    drawn = draw_effects(effects, ids, seed, epoch, plan.size) if effects else None

    def change(images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the changed images and labels of this batch, on their device."""
        if transform:  # it gets random numbers of its own, whatever drew before
            words = draw(seed, epoch, ids[:1], Operation.TRANSFORM)
            seed_all(int(words[0, 0]), images.device)
            images, labels = transform(images, labels)
        if effects and drawn:
            images, labels = apply(effects, drawn, images, labels, len(plan.index.classes), mean)
        return images, labels

    return batch._replace(crops=(*batch.crops, *(drawn or ()))), change


def apply(
    effects: Effects,
    drawn: Drawn,
    images: torch.Tensor,
    labels: torch.Tensor,
    classes: int,
    mean: tuple[float, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (images, labels) with the effects, in new memory.

    images: uint8 [n, C, H, W]; those of a pair, 2k and 2k + 1, are mixed with each other. labels: int64 [n],
    or bool [n, classes]; float [n, classes] if images are mixed. mean: of pixels / 255, the colour of erased
    boxes. It is called for each batch: on the device, and on the CPU for a few images at a time.
    """
    if images.device.type == "cpu" and len(images) > _IMAGES_PER_CHUNK:  # few images fit into the CPU's cache
        parts = []
        for first in range(0, len(images), _IMAGES_PER_CHUNK):
            last = first + _IMAGES_PER_CHUNK
            chunk = Drawn(*rows(drawn, first, last))
            parts.append(apply(effects, chunk, images[first:last], labels[first:last], classes, mean))
        changed, targets = map(torch.cat, zip(*parts, strict=True))
        return changed, targets
    if effects.trivial_augment:
        images = _augment(drawn, images, 1, WIDE)
    if effects.rand_augment:
        images = _augment(drawn, images, int(effects.rand_augment[0]), narrow(images.shape[2]))
    # one copy for all parameters of the batch: each copy costs the host more than its bytes
    columns = _send(torch.from_numpy(np.stack(drawn)), images.device)
    on_device = dict(zip(Drawn._fields, columns, strict=True))
    if effects.color_jitter:
        for name in ("brightness", "contrast", "saturation"):
            images = _enhance(name, images, on_device[name])
    if effects.random_erasing:
        box = (on_device[f"erase_{side}"] for side in ("top", "left", "height", "width"))
        fill = _send(torch.tensor(mean).mul(255).round().to(torch.uint8), images.device)
        images = torch.where(_inside(images, *box), fill.view(1, -1, 1, 1), images)
    if effects.mixup or effects.cutmix:
        images, labels = _mix(effects, on_device, images, labels, classes)
    return images.contiguous(memory_format=torch.channels_last), labels


def _send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from the host to the device. The host does not wait for a GPU."""
    is_gpu = accelerator.has_streams(device)
    return tensor.pin_memory().to(device, non_blocking=True) if is_gpu else tensor.to(device)


def _mix(
    effects: Effects, drawn: dict[str, torch.Tensor], images: torch.Tensor, labels: torch.Tensor, classes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and labels mixed with those of the other image of their pair. apply() calls it last, so
    the other image has its effects."""
    # 0 and 1, 2 and 3, ...: each process has an even number, or the options were refused
    other = torch.arange(len(images), device=images.device) ^ 1
    others = images[other]
    cut = _inside(images, drawn["mix_top"], drawn["mix_left"], drawn["mix_height"], drawn["mix_width"])
    if effects.mixup:
        images = _blend(images, others, torch.where(drawn["mix"] == MIXUP, drawn["share"], ONE))
    images = torch.where(cut, others, images)  # for mixup the boxes are empty
    targets = multi_hot(labels, classes).to(torch.get_default_dtype())
    share = (drawn["share"] / ONE).to(targets.dtype).view(-1, 1)
    return images, targets * share + targets[other] * (1 - share)


def _inside(
    images: torch.Tensor, top: torch.Tensor, left: torch.Tensor, height: torch.Tensor, width: torch.Tensor
) -> torch.Tensor:
    """Return which pixels are in the box of each image: bool [n, 1, H, W]."""
    rows = torch.arange(images.shape[2], device=images.device).view(1, 1, -1, 1)
    columns = torch.arange(images.shape[3], device=images.device).view(1, 1, 1, -1)
    below = rows - _column(top)  # pixels below the upper edge of the box
    right = columns - _column(left)
    return (below >= 0) & (below < _column(height)) & (right >= 0) & (right < _column(width))


def _column(values: torch.Tensor) -> torch.Tensor:
    """Return a number for each image, [n], in the shape that goes with images: [n, 1, 1, 1]."""
    return values.view(-1, 1, 1, 1)


def _blend(images: torch.Tensor, other: torch.Tensor | None, factor: torch.Tensor) -> torch.Tensor:
    """Return images * factor + other * (1 - factor), uint8. other: None: 0. factor: int64 [n], in 1 / ONE."""
    share = _column(factor.to(torch.int32))
    mixed = images * share  # int32
    if other is not None:
        mixed += other * (ONE - share)
    # half of the divisor first, so that the shift rounds
    mixed += ONE // 2
    mixed >>= _BITS
    return mixed.clamp_(0, 255).to(torch.uint8)


def _grey(images: torch.Tensor) -> torch.Tensor:
    """Return grey images: uint8 [n, 3, H, W] -> int32 [n, 1, H, W]. Without 3 channels they do not change."""
    if images.shape[1] != 3:
        return images.int()
    grey = images[:, :1].int().mul_(_GREY[0])
    for channel in (1, 2):
        grey += images[:, channel : channel + 1].int().mul_(_GREY[channel])
    grey += ONE // 2
    grey >>= _BITS
    return grey


def _mean_grey(images: torch.Tensor) -> torch.Tensor:
    """Return the mean grey of each image: int32 [n, 1, 1, 1]."""
    grey = _grey(images).flatten(1)
    return _column((grey.sum(1) + grey.shape[1] // 2) // grey.shape[1]).int()


def _smooth(images: torch.Tensor) -> torch.Tensor:
    """Return 3x3 means, whose centre counts five times, int32. Border pixels do not change."""
    wide = images.int()
    height, width = images.shape[2:]
    total = 4 * wide[:, :, 1:-1, 1:-1]
    for row in range(3):
        for column in range(3):
            total = total + wide[:, :, row : height - 2 + row, column : width - 2 + column]
    smooth = wide.clone()
    smooth[:, :, 1:-1, 1:-1] = (total + 6) // 13
    return smooth


# what an image is blended with; None: black
_OTHERS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "brightness": lambda images: None, "contrast": _mean_grey, "saturation": _grey, "sharpness": _smooth,
}  # fmt: skip


def _enhance(name: str, images: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Blend images with what lacks their brightness, contrast, saturation or sharpness."""
    return _blend(images, _OTHERS[name](images), factor)


def _augment(drawn: Drawn, images: torch.Tensor, count: int, space: Space) -> torch.Tensor:
    """Apply `count` operations to each image, one after the other. apply() calls it for a batch; the images
    with the same operation are changed together."""
    for place in range(count):
        operations, strengths = drawing.operation_at(drawn.operation, drawn.strength, place)
        result = images.clone()
        for number in np.unique(operations).tolist():
            # on the host, where the operations were drawn: the device is not asked
            members = np.flatnonzero(operations == number)
            rows = _send(torch.from_numpy(members), images.device)
            result[rows] = _operate(OPERATIONS[number], images[rows], strengths[members], space)
        images = result
    return images


def _operate(name: str, images: torch.Tensor, strength: np.ndarray, space: Space) -> torch.Tensor:
    """Apply one operation, with a strength for each image."""
    share = strength / STRONGEST  # -1..1

    def tensor(values: np.ndarray) -> torch.Tensor:
        return _send(torch.from_numpy(np.asarray(values, np.int64)), images.device)

    if name in _OTHERS:
        return _enhance(name, images, tensor(np.rint((1 + space.enhance * share) * ONE)))
    if name == "posterize":
        lost = np.rint(space.bits * np.abs(share))
        return images & _column(tensor(256 - 2**lost)).to(torch.uint8)
    if name == "solarize":
        threshold = _column(tensor(np.rint(255 * (1 - np.abs(share)))))
        return torch.where(images >= threshold, 255 - images, images)
    if name == "autocontrast":
        low = images.int().amin((2, 3), keepdim=True)
        high = images.int().amax((2, 3), keepdim=True)
        span = high - low
        scaled = ((images.int() - low) * 255 + span // 2) // span.clamp(min=1)
        return torch.where(span > 0, scaled, images.int()).to(torch.uint8)
    if name == "equalize":
        from torchvision.transforms.v2 import functional  # uses integers, and treats each image separately

        return functional.equalize(images)
    if name == "identity":
        return images
    return _move(images, *map(tensor, _matrix(name, share, space, *images.shape[2:])))


def _matrix(name: str, share: np.ndarray, space: Space, height: int, width: int) -> np.ndarray:
    """Return int64 [6, n]: the source of the pixel (x, y) of the result is (a x + b y + c, d x + e y + f), in
    1 / ONE. Shears do not move the upper or left edge, rotations do not move the centre."""
    zero = np.zeros_like(share)
    one = np.ones_like(share)
    shear = space.shear * share
    if name == "rotate":
        angle = np.radians(space.degrees * share)
        # about the centre: it is moved to 0, turned there, and moved back
        x = (width - 1) / 2  # of the centre
        y = (height - 1) / 2
        cos = np.cos(angle)
        sin = np.sin(angle)
        rows = [cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y]
    else:
        rows = {
            "shear_x": [one, shear, shear / 2, zero, one, zero],
            "shear_y": [one, zero, zero, shear, one, shear / 2],
            "translate_x": [one, zero, space.shift * share, zero, one, zero],
            "translate_y": [one, zero, zero, zero, one, space.shift * share],
        }[name]
    return np.rint(np.stack(rows) * ONE).astype(np.int64)


def _move(images: torch.Tensor, *matrix: torch.Tensor) -> torch.Tensor:
    """Return images of the nearest source pixels, black outside of the image. matrix: six rows of _matrix(),
    int64 [n] each."""
    height, width = images.shape[2:]
    a, b, c, d, e, f = (number.view(-1, 1, 1) for number in matrix)
    y = torch.arange(height, device=images.device).view(1, -1, 1)
    x = torch.arange(width, device=images.device).view(1, 1, -1)
    source_x = (a * x + b * y + c + ONE // 2) >> _BITS
    source_y = (d * x + e * y + f + ONE // 2) >> _BITS
    # a pixel from outside is taken at the border, and made black below
    is_inside = (source_x >= 0) & (source_x < width) & (source_y >= 0) & (source_y < height)
    places = source_y.clamp(0, height - 1) * width + source_x.clamp(0, width - 1)
    flat = images.reshape(*images.shape[:2], -1)
    moved = flat.gather(2, places.view(len(images), 1, -1).expand_as(flat)).view(images.shape)
    return moved * is_inside.unsqueeze(1)

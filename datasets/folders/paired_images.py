"""Pairs of images for restoration: a blurry image and the sharp image of the same name.

    <root>/{train,test}/{blurry,sharp}/<sub>/<image>    or img and gt instead of blurry and sharp

The images of a pair have the same path in their folders without the ending: blurry/a/1.jpg and
sharp/a/1.png. Both images of a pair get the same crop and the same flips.
"""

import functools
import itertools
import os
from typing import Any

import numpy as np
import torch

from bootfile.ground.again import is_folder
from bootfile.ground.errors import BadInput
from bootfile.sampling.plan import Plan
from datasets import files
from datasets.dead_links import refuse_dead_link
from datasets.folders import image_folder, images
from datasets.folders.image_folder import ImageFolderIndex, one_line, scan_listing
from datasets.folders.listing import Listing
from datasets.folders.walk import Log, shown, walk
from datasets.sampling.augment import center_square, square_crop

SIDES = (("blurry", "sharp"), ("img", "gt"))


class PairIndex:
    """The pairs of a split, numbered 0..len-1 in the order of their names.

    Of pair k, the blurry image has id k and the sharp one id len + k. By id: labels (0 blurry, 1 sharp),
    bytes, plain and path() as in an ImageFolderIndex; widths and heights int64, pixels after resizing.
    fingerprint: of names, sizes and contents.
    """

    def __init__(self, index: ImageFolderIndex, rows: int = 0):
        self.rows = rows  # height to which images are resized; 0: they keep their size
        self.stored = index
        # what stores need of an index
        self.labels = index.labels
        self.bytes = index.bytes
        self.crc32 = index.crc32
        self.mtimes = index.mtimes
        self.ctimes = index.ctimes
        self.plain = index.plain
        self.path = index.path
        self.report_change = index.report_change
        self.source = index.source
        self.fingerprint = index.fingerprint
        self.widths = index.widths.astype(np.int64)
        self.heights = index.heights.astype(np.int64)
        if rows:
            self.widths = np.maximum(np.rint(self.widths * rows / self.heights).astype(np.int64), 1)
            self.heights = np.full_like(self.widths, rows)

    def __len__(self) -> int:
        return len(self.labels) // 2

    def describe_size(self, id: int) -> str:
        """Return the size of an image in words."""
        size = f"{self.stored.widths[id]}x{self.stored.heights[id]} pixels"
        if self.rows:
            size = f"{self.widths[id]}x{self.heights[id]} pixels, resized from {size}"
        return size


def load(root: str, split: str, cache: str, rows: int = 0, log: Log = print) -> PairIndex:
    """Return the pairs of a split.

    root: folder or URL.
    split: "train" or "test".
    cache: folder of the index.
    rows: height to which the images are resized (0: they keep their size).
    log: called with one line of text.
    load_on_nodes() calls it in the first process of a node. Raises BadInput if a folder is
    missing or empty, or if a file is damaged or cannot be read. It is also raised if an image has no partner,
    or if the images of a pair differ in size.
    """
    log = one_line(log)
    listing = _look(os.path.abspath(files.local_folder(root)), split, log)
    index = scan_listing(listing, cache, log)
    if index.excluded:
        reasons = shown([f"{path}: {reason}" for path, reason in index.excluded])
        count = f"{len(index.excluded)} of {len(listing.paths)}"
        raise BadInput(f"{count} images of {listing.base} are bad: {reasons}")
    stored = PairIndex(index)
    # both get the same crop: their sizes must be equal
    shapes = np.stack([stored.widths, stored.heights]).reshape(2, 2, -1)  # [width or height, side, pair]

    def describe(id: int) -> str:
        return f"{listing.paths[id]} ({stored.describe_size(id)})"

    pairs = np.flatnonzero((shapes[:, 0] != shapes[:, 1]).any(axis=0)).tolist()
    if different := [f"{describe(pair)} and {describe(pair + len(stored))}" for pair in pairs]:
        count = f"{len(different)} of {len(stored)}"
        raise BadInput(f"{count} pairs of {listing.base} differ in size: {shown(different)}")
    return PairIndex(index, rows)


def load_on_nodes(root: str, split: str, cache: str, rows: int, log: Log) -> PairIndex:
    """Return the pairs of a split on every rank, as image_folder's. Arguments: those of load()."""
    [index] = image_folder.load_on_nodes(root, lambda: [load(root, split, cache, rows, log).stored])
    return PairIndex(index, rows)


def _look(root: str, split: str, log: Log) -> Listing:
    """Return the matched images of both sides: all blurry images, then the sharp ones in the same order.
    load() calls it at each start; no image is read. Raises BadInput."""
    base = os.path.join(root, split)
    refuse_dead_link(base)
    if not is_folder(base):
        raise BadInput(f"{root} has no folder {split}/")
    sides = _find_sides(base)
    blurry_side, sharp_side = sides
    blurry = _by_name(base, blurry_side, log)
    sharp = _by_name(base, sharp_side, log)
    # all that have no partner at once: a list for the user
    alone = [f"{blurry[name]} has no {sharp_side}/{name}.*" for name in sorted(blurry.keys() - sharp.keys())]
    alone += [f"{sharp[name]} has no {blurry_side}/{name}.*" for name in sorted(sharp.keys() - blurry.keys())]
    if alone:
        count = f"{len(alone)} of {len(blurry) + len(sharp)}"
        raise BadInput(f"{count} images of {base} have no partner: {shown(alone)}")
    # the blurry ones and then the sharp ones, in one order: their ids differ by the number of pairs
    names = sorted(blurry)
    paths = [blurry[name] for name in names]
    paths += [sharp[name] for name in names]
    labels = np.arange(2).repeat(len(names))
    return Listing(root, f"pairs-{split}", base, sides, paths, labels)


def _find_sides(base: str) -> tuple[str, ...]:
    """Return the names of the two folders of pairs below a folder. Raises BadInput unless it has exactly one
    of the SIDES."""
    sides = []
    for side in itertools.chain.from_iterable(SIDES):
        refuse_dead_link(os.path.join(base, side))
        if is_folder(os.path.join(base, side)):
            sides.append(side)
    if tuple(sides) not in SIDES:
        names = "/ and ".join(sides) + "/" if sides else "none of these folders"
        raise BadInput(f"{base} has {names}: expected blurry/ and sharp/ or img/ and gt/")
    return tuple(sides)


def _by_name(base: str, side: str, log: Log) -> dict[str, str]:
    """Return path below the side without its ending -> path below the base, of one side of the pairs. Raises
    BadInput."""
    folder = os.path.join(base, side)
    by_name: dict[str, str] = {}
    paths, others, _ = walk(folder)
    if not paths:
        raise BadInput(f"{folder} holds no image ({' '.join(images.EXTENSIONS)})")
    if others:
        log(f"{folder}: ignored {others}")
    for path in sorted(paths):
        name = os.path.splitext(path)[0]
        if name in by_name:
            raise BadInput(f"{base}: {by_name[name]} and {side}/{path} have the same name")
        by_name[name] = f"{side}/{path}"
    return by_name


def plan(index: PairIndex, sampler: Any, size: int, augment: bool = False) -> Plan:
    """Return the plan of pairs: the blurry images of a step and then, in the same order, the sharp ones.

    sampler: a batch sampler of pairs.
    size: the side of the square crops in pixels.
    augment: random crops, mirrored left to right and top to bottom with probability 1/2 each, the same for
        both images of a pair; false: the centre, not mirrored.
    Raises BadInput if an image is smaller than the crop.
    """
    if small := np.flatnonzero(np.minimum(index.widths, index.heights) < size).tolist():
        which = shown([f"{index.path(id)} has {index.describe_size(id)}" for id in small])
        raise BadInput(f"{len(small)} of {len(index.labels)} images are smaller than --crop {size}: {which}")
    crop = square_crop if augment else center_square
    window = functools.partial(crop, side=size)
    return Plan(index, sampler, window, size, views=2)


def save_sheet(path: str, blurry: torch.Tensor, sharp: torch.Tensor) -> None:
    """Write four pairs a row, the sharp image to the right of the blurry one. Raises BadInput.

    blurry, sharp: float [n, 3, rows, columns] in [-1, 1].
    """
    import torchvision  # takes longer to import than torch

    sheet = torch.stack([blurry, sharp], dim=1).flatten(0, 1)
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        torchvision.utils.save_image(sheet, path, nrow=8, normalize=True, value_range=(-1, 1))
    except (OSError, ValueError) as error:  # ValueError: no kind of image has this ending
        raise BadInput(f"cannot write --preview {path}: {error}") from error

"""Make a small folder of photographs for tests: odd sizes, some larger than in a cache, unusual formats."""

import os

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

from datasets.folders.image_folder import ImageFolderIndex
from datasets.loaders.image_loader import MEAN, STD

_SIZES = [(320, 240), (201, 333), (64, 48), (400, 300), (97, 400), (31, 31), (290, 427)]


def make(root, train: int = 40, val: int = 12, all_kinds: bool = False):
    """Make train/ and val/ below `root`, and return `root`. Some images are grey or CMYK.

    all_kinds: some are also PNG files with a palette or turned by their Exif orientation.
    """
    photographs = [Image.fromarray(image) for image in load_sample_images().images]
    draw = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for number in range(count):
            target = root / split / f"class_{number % 3}"
            target.mkdir(parents=True, exist_ok=True)
            whole, (width, height) = photographs[number % 2], _SIZES[number % len(_SIZES)]
            left = int(draw.integers(whole.width - width + 1))
            top = int(draw.integers(max(1, whole.height - height + 1)))
            image = whole.crop((left, top, left + width, top + height))
            kind = number % 10
            if all_kinds and kind == 6:
                image.convert("P").save(target / f"{number:03}.png")
                continue
            options = {"exif": Image.Exif()} if all_kinds and kind == 7 else {}
            if options:
                options["exif"][0x0112] = 6
            mode = {3: "L", 5: "CMYK"}.get(kind, "RGB")
            image.convert(mode).save(target / f"{number:03}.jpg", quality=90, **options)
    return root


def write(folder, count: int, size: tuple[int, int], ending: str) -> None:
    """Write images of random pixels to a new folder."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(len(list(folder.parent.iterdir())))  # other pixels in each folder
    for number in range(count):
        pixels = draw.integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.{ending}")


def take_ctimes(index: ImageFolderIndex) -> None:
    """Give an index the present ctimes: a file system that does not change them hides a change of a file."""
    index.ctimes = np.array([os.stat(index.path(id)).st_ctime_ns for id in range(len(index))])


def to_pixels(images: torch.Tensor) -> torch.Tensor:
    """Return the uint8 images [n, 3, H, W] that a loader has normalised with MEAN and STD."""
    mean, std = (torch.tensor(each).view(1, 3, 1, 1) for each in (MEAN, STD))
    return ((images * std + mean) * 255).round().clamp(0, 255).to(torch.uint8)

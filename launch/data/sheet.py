"""Draw the images of a step as the model got them: a contact sheet with labels."""

import math
import re

import numpy as np
from PIL import Image, ImageDraw, PngImagePlugin

from common.ground.exits import BadInput
from common.ground.files import open_atomic
from datasets.loaders.replay import Step
from launch.data import table

MARK = re.compile("made by bootfile launch data")  # in the first bytes of a sheet
MARGIN, LINE = 4, 12  # pixels around an image, and of a line of text
_LEAST = 64  # pixels of a side: smaller images are enlarged by a whole factor
_MOST = 10**8  # pixels of a sheet


def scale_of(height: int, width: int) -> int:
    """Return the factor by which images of this size are enlarged."""
    return max(1, math.ceil(_LEAST / max(1, height, width)))


def draw(step: Step) -> tuple[Image.Image, int]:
    """Return (the sheet of a step, the number of images on it, which is limited by its size).

    Each pixel of an image is a square of scale_of() pixels. Below an image there are its label and its id.
    Raises BadInput if the step has no images.
    """
    if not step.pixels:
        raise BadInput(f"step {step.step} has no images [n, C, H, W] of 1 or 3 channels to draw")
    height, width = (max(image.shape[side] for image in step.pixels) for side in (0, 1))
    scale = scale_of(height, width)
    high, wide = scale * height + 2 * LINE + MARGIN, scale * width + MARGIN
    count = min(len(step.pixels), max(1, _MOST // (high * wide)))
    columns = math.ceil(math.sqrt(count))
    sheet = Image.new("RGB", (columns * wide + MARGIN, -(-count // columns) * high + MARGIN), "white")
    pen = ImageDraw.Draw(sheet)
    for place in range(count):
        x, y = MARGIN + place % columns * wide, MARGIN + place // columns * high
        pixels = np.repeat(np.repeat(step.pixels[place].numpy(), scale, 0), scale, 1)
        pixels = np.broadcast_to(pixels, (*pixels.shape[:2], 3))
        sheet.paste(Image.fromarray(np.ascontiguousarray(pixels)), (x, y))
        for line, words in enumerate((table.label(step, place), str(int(step.ids[place])))):
            _write(pen, x, y + scale * height + line * LINE, words, wide - MARGIN)
    return sheet, count


def _write(pen: ImageDraw.ImageDraw, x: int, y: int, words: str, width: int) -> None:
    """Write words that are cut to a width in pixels."""
    words = words.encode("latin-1", "replace").decode("latin-1")  # the built-in font has no other letters
    while words and pen.textlength(words) > width:
        words = words[:-1]
    pen.text((x, y), words, "black")


def save(sheet: Image.Image, path: str) -> None:
    """Write a sheet as PNG, atomically. Raises BadInput."""
    mark = PngImagePlugin.PngInfo()
    mark.add_text("Software", MARK.pattern)
    try:
        with open_atomic(path) as file:
            sheet.save(file, "PNG", pnginfo=mark)
    except OSError as error:
        raise BadInput(f"cannot write --to {path}: {error.strerror}") from error

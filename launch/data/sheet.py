"""Draw the images of steps as the model got them: a contact sheet with labels."""

import math
import re

import numpy as np
from PIL import Image, ImageDraw, PngImagePlugin

from common.ground.exits import BadInput
from datasets.loaders.replay import Step
from launch import confirm
from launch.data import table

MARK = re.compile("made by bootfile launch data")  # in the first bytes of a sheet
MARGIN, LINE = 4, 12  # pixels around an image, and of a line of text
_LEAST = 64  # pixels of a side: smaller images are enlarged by a whole factor
_MOST = 10**8  # pixels of a sheet


def scale_of(height: int, width: int) -> int:
    """Return the factor by which images of this size are enlarged."""
    return max(1, math.ceil(_LEAST / max(1, height, width)))


def draw(steps: list[Step]) -> tuple[Image.Image, int]:
    """Return (the sheet, the number of images on it, which is limited by its size).

    Each step begins with a line of text. Each pixel of an image is a square of scale_of() pixels. Below
    an image there are its label and its id. Raises BadInput if a step has no images.
    """
    for step in steps:
        if not step.pixels:
            raise BadInput(f"step {step.step} has no images [n, C, H, W] of 1 or 3 channels to draw")
    heights, widths = zip(*(image.shape[:2] for step in steps for image in step.pixels), strict=True)
    scale = scale_of(max(heights), max(widths))
    high, wide = scale * max(heights) + 2 * LINE + MARGIN, scale * max(widths) + MARGIN
    columns = max(math.ceil(math.sqrt(len(heights))), math.ceil(300 / wide))
    most = max(1, _MOST // (high * wide))
    cells, titles, top = [], [], MARGIN
    for step in steps:
        count = min(most - len(cells), len(step.pixels))
        if count:
            titles.append((top, f"step {step.step}, epoch {step.epoch}"))
            top += LINE + MARGIN
        for place in range(count):
            cells.append((step, place, MARGIN + place % columns * wide, top + place // columns * high))
        top += -(-count // columns) * high
    sheet = Image.new("RGB", (columns * wide + MARGIN, top), "white")
    pen = ImageDraw.Draw(sheet)
    for y, title in titles:
        pen.text((MARGIN, y), title, "black")
    for step, place, x, y in cells:
        pixels = np.repeat(np.repeat(step.pixels[place].numpy(), scale, 0), scale, 1)
        pixels = np.broadcast_to(pixels, (*pixels.shape[:2], 3))
        sheet.paste(Image.fromarray(np.ascontiguousarray(pixels)), (x, y))
        for line, words in enumerate((table.label(step, place), str(int(step.ids[place])))):
            _write(pen, x, y + scale * max(heights) + line * LINE, words, wide - MARGIN)
    return sheet, len(cells)


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
    with confirm.open_result(path) as file:
        sheet.save(file, "PNG", pnginfo=mark)

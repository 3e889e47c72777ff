"""Draw the images of steps as the model got them: a contact sheet with labels and ids."""

import math
import re

import numpy as np
from PIL import Image, ImageDraw, PngImagePlugin

from bootfile.console import outputs
from bootfile.ground.errors import BadInput
from launch.data.samples import Step

MARK = re.compile("made by bootfile launch data")  # in the first bytes of a sheet
MARGIN = 4  # pixels around images
LINE = 12  # pixels of a line of text
LEAST = 64  # pixels of the side of an image; smaller ones are enlarged
_MOST = 10**8  # pixels of a sheet


def save(steps: list[Step], path: str) -> str:
    """Write a sheet as PNG, atomically, and return a line about it. Raises BadInput. `launch data --to` calls
    it once, after the steps were compared with the receipt."""
    height = 0
    width = 0
    cells = []  # (step, place of an image in it)
    for step in steps:
        if step.pixels is None:
            raise BadInput(f"--to {path}: a Dataset of your own has no images to draw here")
        height = max(height, step.pixels.shape[1])
        width = max(width, step.pixels.shape[2])
        cells.extend((step, place) for place in range(len(step.pixels)))
    total = len(cells)
    scale = math.ceil(LEAST / min(LEAST, max(height, width)))
    high = scale * height + 2 * LINE + MARGIN  # of a cell: the image and two lines of text
    wide = scale * width + MARGIN
    # larger sheets need gigabytes of memory: the rest is not drawn, as the line at the end says
    cells = cells[: _MOST // (high * wide)]
    columns = math.ceil(math.sqrt(len(cells)))
    sheet = Image.new("RGB", (columns * wide + MARGIN, -(-len(cells) // columns) * high + MARGIN), "white")
    pen = ImageDraw.Draw(sheet)
    for number, (step, place) in enumerate(cells):
        row, column = divmod(number, columns)
        x = MARGIN + column * wide
        y = MARGIN + row * high
        # whole pixels: an enlarged image shows each pixel that the model got
        image = step.pixels[place].repeat(scale, 0).repeat(scale, 1)
        sheet.paste(Image.fromarray(np.broadcast_to(image, (*image.shape[:2], 3)).copy()), (x, y))
        label = step.columns["label"][place].encode("latin-1", "replace").decode("latin-1")  # of the font
        text = f"{label[: wide // 6]}\n{step.step}: {step.columns['id'][place]}"
        pen.text((x, y + scale * height), text, "black", spacing=1)
    mark = PngImagePlugin.PngInfo()
    mark.add_text("Software", MARK.pattern)
    with outputs.open_result(path) as file:
        sheet.save(file, "PNG", pnginfo=mark)
    return f"{path}: {len(cells)} images of {total}"

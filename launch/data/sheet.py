"""Draw the images of steps as the model got them: a contact sheet with labels and ids."""

import math
import re

import numpy as np
from PIL import Image, ImageDraw, PngImagePlugin

from bootfile.console import outputs
from bootfile.ground.errors import BadInput
from launch.data.samples import Step

MARK = re.compile("made by bootfile launch data")  # in the first bytes of a sheet
MARGIN, LINE, LEAST = 4, 12, 64  # pixels: around images, of a line of text, of the side of an image
_MOST = 10**8  # pixels of a sheet


def save(steps: list[Step], path: str) -> str:
    """Write a sheet as PNG, atomically, and return a line about it. Raises BadInput."""
    if any(step.pixels is None for step in steps):
        raise BadInput(f"--to {path}: a Dataset of your own has no images to draw here")
    height, width = (max(step.pixels.shape[side] for step in steps) for side in (1, 2))
    scale = math.ceil(LEAST / min(LEAST, max(height, width)))
    high, wide = scale * height + 2 * LINE + MARGIN, scale * width + MARGIN
    cells = [(step, place) for step in steps for place in range(len(step.pixels))][: _MOST // (high * wide)]
    columns = math.ceil(math.sqrt(len(cells)))
    sheet = Image.new("RGB", (columns * wide + MARGIN, -(-len(cells) // columns) * high + MARGIN), "white")
    pen = ImageDraw.Draw(sheet)
    for number, (step, place) in enumerate(cells):
        x, y = MARGIN + number % columns * wide, MARGIN + number // columns * high
        image = step.pixels[place].repeat(scale, 0).repeat(scale, 1)
        sheet.paste(Image.fromarray(np.broadcast_to(image, (*image.shape[:2], 3)).copy()), (x, y))
        label = step.columns["label"][place].encode("latin-1", "replace").decode("latin-1")  # of the font
        text = f"{label[: wide // 6]}\n{step.step}: {step.columns['id'][place]}"
        pen.text((x, y + scale * height), text, "black", spacing=1)
    mark = PngImagePlugin.PngInfo()
    mark.add_text("Software", MARK.pattern)
    with outputs.open_result(path) as file:
        sheet.save(file, "PNG", pnginfo=mark)
    return f"{path}: {len(cells)} images of {sum(len(step.pixels) for step in steps)}"

"""The box of a decoded image that a crop needs."""

import numpy as np

Box = tuple[int, int, int, int]  # top, left, height, width; pixels


def cut_out(image: np.ndarray, planned: int, box: Box) -> np.ndarray:
    """Return the pixels of a box, a view.

    image: uint8 [H, W, 3].
    planned: H of the image for which the box was planned; a smaller image has a smaller box.
    """
    if image.shape[0] != planned:
        box = scaled(*box, image.shape[0] / planned, *image.shape[:2])
    top, left, height, width = box
    return image[top : top + height, left : left + width]


def scaled(top: int, left: int, height: int, width: int, scale: float, rows: int, columns: int) -> Box:
    """Return the box in the scaled image, which has `rows` rows and `columns` columns."""
    top, left = min(round(top * scale), rows - 1), min(round(left * scale), columns - 1)
    height, width = max(round(height * scale), 1), max(round(width * scale), 1)
    return top, left, min(height, rows - top), min(width, columns - left)

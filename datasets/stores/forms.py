"""The forms in which stores keep an image. A sample of one form has the same bits in every store.

"encoded": the bytes of the file. "decoded": its pixels, uint8 RGB [height, width, 3], scaled down so that the
short side has SHORT_SIDE pixels at most.
"""

from typing import Any, NamedTuple

import numpy as np

from common.exits import BadInput
from datasets.folders import images

FORMS = ("decoded", "encoded")
SHORT_SIDE = 256


class Sample(NamedTuple):
    """An image in one of the forms. height, width: pixels. content: bytes or uint8 [n]."""

    height: int
    width: int
    content: Any


def make(
    files: Any, id: int, form: str, short_side: int = SHORT_SIDE, scratch: np.ndarray | None = None
) -> Sample:
    """Return the sample made from its file. files: a FileStore. Raises BadInput as files.content() does."""
    return convert(files.index, id, files.content(id), form, short_side, scratch)


def convert(
    index: Any,
    id: int,
    content: bytes,
    form: str,
    short_side: int = SHORT_SIDE,
    scratch: np.ndarray | None = None,
) -> Sample:
    """Return the sample made from the bytes of its file.

    scratch: uint8 memory for the decoded image. Raises BadInput if it cannot be decoded.
    """
    height, width, _ = size(index, id, form, short_side)
    if form == "encoded":
        return Sample(height, width, content)
    try:
        image = images.decode(content, bool(index.plain[id]), scratch)
    except images.BadImage as error:
        raise BadInput(f"cannot decode {index.path(id)}: {error}") from error
    if image.shape[:2] != (height, width):
        from datasets.folders.cut import resized  # imports torch, which takes a second

        image = resized(image, height, width, "bicubic")  # sharper: crops of it are enlarged later
        return Sample(height, width, image.reshape(-1))
    return Sample(height, width, image.tobytes())  # a copy: the scratch memory is used again


def sizes(
    index: Any, ids: np.ndarray | slice, form: str, short_side: int = SHORT_SIDE
) -> tuple[np.ndarray, ...]:
    """Return the (heights, widths, bytes) of samples, int64 [n] each."""
    heights, widths = (np.asarray(column[ids], dtype=np.int64) for column in (index.heights, index.widths))
    if form == "encoded":
        return heights, widths, np.asarray(index.bytes[ids], dtype=np.int64)
    scale = np.minimum(1.0, short_side / np.minimum(heights, widths))
    heights, widths = (np.rint(side * scale).astype(np.int64) for side in (heights, widths))
    return heights, widths, 3 * heights * widths


def size(index: Any, id: int, form: str, short_side: int = SHORT_SIDE) -> tuple[int, int, int]:
    """Return the sizes() of one sample, at a tenth of the cost of an array of length 1."""
    height, width = int(index.heights[id]), int(index.widths[id])
    if form == "encoded":
        return height, width, int(index.bytes[id])
    scale = short_side / min(height, width)
    if scale < 1:
        height, width = round(height * scale), round(width * scale)
    return height, width, 3 * height * width

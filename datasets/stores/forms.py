"""What a store keeps of an image: the same bits in every store, so that it does not matter which one answers.

"encoded" are the bytes of the file. "decoded" are its pixels, uint8 RGB [height, width, 3], scaled down so
that the short side has SHORT_SIDE pixels at most.
"""

from typing import NamedTuple

import numpy as np

from common.exits import BadInput
from datasets.folders import images

FORMS = ("decoded", "encoded")
SHORT_SIDE = 256


class Sample(NamedTuple):
    """height, width: pixels. content: bytes or uint8 [n]."""

    height: int
    width: int
    content: bytes | np.ndarray


def make(
    files, id: int, form: str, short_side: int = SHORT_SIDE, scratch: np.ndarray | None = None
) -> Sample:
    """The sample made from the file. files: a FileStore. Raises BadInput as it does."""
    height, width, _ = size(files.index, id, form, short_side)
    if form == "encoded":
        return Sample(height, width, files.read(id))
    image = files.image(id, scratch)
    if image.shape[:2] != (height, width):
        from datasets.folders.cut import resized  # brings torch, and a second

        image = resized(image, height, width, "bicubic")  # sharper: it is enlarged again
        return Sample(height, width, image.reshape(-1))
    return Sample(height, width, image.tobytes())  # not a view: the scratch is used again


def sizes(index, ids: np.ndarray, form: str, short_side: int = SHORT_SIDE) -> tuple[np.ndarray, ...]:
    """(heights, widths, bytes) that the samples have, int64 [n] each."""
    heights, widths = (np.asarray(column[ids], dtype=np.int64) for column in (index.heights, index.widths))
    if form == "encoded":
        return heights, widths, np.asarray(index.bytes[ids], dtype=np.int64)
    scale = np.minimum(1.0, short_side / np.minimum(heights, widths))
    heights, widths = (np.rint(side * scale).astype(np.int64) for side in (heights, widths))
    return heights, widths, 3 * heights * widths


def size(index, id: int, form: str, short_side: int = SHORT_SIDE) -> tuple[int, int, int]:
    """sizes() of one sample, at a tenth of the cost of an array of one."""
    height, width = int(index.heights[id]), int(index.widths[id])
    if form == "encoded":
        return height, width, int(index.bytes[id])
    scale = short_side / min(height, width)
    if scale < 1:
        height, width = round(height * scale), round(width * scale)
    return height, width, 3 * height * width


def image(index, id: int, form: str, sample: Sample, scratch: np.ndarray | None, where) -> np.ndarray:
    """uint8 [height, width, 3]: without a copy where it is decoded. Raises BadInput that names the file."""
    if form == "decoded":
        return np.frombuffer(sample.content, np.uint8).reshape(sample.height, sample.width, 3)
    try:
        return images.decode(bytes(sample.content), bool(index.plain[id]), scratch)
    except images.BadImage as error:
        raise BadInput(f"cannot decode {index.path(id)} of {where}: {error}") from error


def encoded(index, id: int, sample: Sample) -> bytes:
    """What any decoder understands alike: the file, or a PNG where the file is unusual."""
    content = bytes(sample.content)
    return content if index.plain[id] else images.normalised(content)

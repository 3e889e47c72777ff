"""The forms in which stores keep an image. A sample of one form has the same bits in every store.

"encoded": the bytes of the file. "decoded": its pixels, uint8 RGB [height, width, 3], scaled down so that the
short side has SHORT_SIDE pixels at most. "jpeg": the same pixels as an RGB JPEG of QUALITY, subsampled 4:2:0.
"jpeg_crop": such a JPEG with restart markers (restart.py), which is decoded only where the crop is.
"jpeg_full": a JPEG with restart markers in the size of the file.
The bits of all but "encoded" may differ between versions of simplejpeg, Pillow and torch.
"""

from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from bootfile.ground.errors import BadInput
from datasets.folders import images
from datasets.stores import restart

FORMS: tuple[str, ...] = ("decoded", "encoded", "jpeg", "jpeg_crop", "jpeg_full")
SIZED: tuple[str, ...] = ("decoded", "encoded")  # the forms whose bytes per sample follow from the index
WHOLE: tuple[str, ...] = ("encoded", "jpeg_full")  # the forms that have all pixels of the files
CUT: tuple[str, ...] = ("jpeg_crop", "jpeg_full")  # JPEGs that are decoded by crop
JPEGS: tuple[str, ...] = ("jpeg", *CUT)
SHORT_SIDE = 256
QUALITY = 90
QUALITY_FULL = 95  # "jpeg_full" uses it for other files; a JPEG is encoded again with its own tables


class Sample(NamedTuple):
    """An image in one of the forms. height, width: pixels. content: bytes or uint8 [n]."""

    height: int
    width: int
    content: Any

    def value(self, form: str) -> bytes | np.ndarray:
        """Return the result of Store.read(): bytes, or if decoded uint8 [height, width, 3] without a copy."""
        if form == "decoded":
            return np.frombuffer(self.content, np.uint8).reshape(self.height, self.width, 3)
        return bytes(self.content)


def make(files: Any, id: int, form: str) -> Sample:
    """Return the sample made from its file. files: a FileStore. Raises BadInput as files.content() does."""
    return convert(files.index, id, files.content(id), form)


def convert(index: Any, id: int, content: bytes, form: str, scratch: np.ndarray | None = None) -> Sample:
    """Return the sample made from the bytes of its file. scratch: uint8 memory for the decoded image. Raises
    BadInput if it cannot be decoded."""
    height, width, _ = map(int, sizes(index, id, form))
    if form == "encoded":
        return Sample(height, width, content)
    # a JPEG keeps its own quality; all other files are decoded first
    if form == "jpeg_full" and index.plain[id] and content.startswith(b"\xff\xd8"):
        return Sample(height, width, restart.encode_again(content))
    try:
        image = images.decode(content, bool(index.plain[id]), scratch)
    except images.BadImage as error:
        raise cannot_decode(index, id, error) from error
    if image.shape[:2] != (height, width):
        from datasets.folders.resize import resized  # imports torch, which takes a second

        image = resized(image, height, width, "bicubic")  # sharper: crops of it are enlarged later
    elif form == "decoded":
        image = image.copy()  # the scratch memory is used again
    if form == "decoded":
        return Sample(height, width, image.reshape(-1))
    try:
        # without markers, as packs have it: simplejpeg writes none, and other encoders give other pixels
        if form == "jpeg":
            return Sample(height, width, images.simplejpeg.encode_jpeg(image, QUALITY, "RGB", "420"))
        subsampling, quality = ("4:2:0", QUALITY) if form == "jpeg_crop" else ("4:4:4", QUALITY_FULL)
        return Sample(height, width, restart.encode(Image.fromarray(image), subsampling, quality=quality))
    except (ValueError, OSError) as error:  # a side is too long: 65,500 pixels
        raise BadInput(f"cannot make a JPEG of {index.path(id)}: {error}") from error


def cannot_decode(index: Any, id: int, error: Exception) -> BadInput:
    """Return the error for an image of an index that cannot be decoded."""
    return BadInput(f"cannot decode {index.path(id)}: {error}")


def label(form: str) -> str:
    """Return the name of a form with its short side, for example "decoded256"."""
    return form if form in WHOLE else f"{form}{SHORT_SIDE}"


def sizes(index: Any, ids: np.ndarray | slice | int, form: str) -> tuple[np.ndarray, ...]:
    """Return the (heights, widths, bytes) of samples, int64 [n] each, or [] of one sample. The bytes of a
    JPEG are 0: unknown. They follow from the index: stores compare them with what they have read."""
    heights = np.asarray(index.heights[ids], dtype=np.int64)
    widths = np.asarray(index.widths[ids], dtype=np.int64)
    if form == "encoded":
        return heights, widths, np.asarray(index.bytes[ids], dtype=np.int64)
    if form in WHOLE:
        return heights, widths, np.zeros_like(heights)
    # as convert() scales the short side: smaller images stay as they are
    scale = np.minimum(1.0, SHORT_SIDE / np.minimum(heights, widths))
    heights = np.rint(heights * scale).astype(np.int64)
    widths = np.rint(widths * scale).astype(np.int64)
    return heights, widths, 3 * heights * widths if form in SIZED else np.zeros_like(heights)

"""The box of an image that a crop needs. nvImageCodec (DALI installs it) decodes it alone from a JPEG.

The pixels are those of the whole image, in 0.8 of the time: it skips the rows below the box, and of
the other blocks reconstructs only those of the box. Without nvImageCodec the whole image is decoded.
"""

import os
import threading
from typing import Any

import numpy as np

Box = tuple[int, int, int, int]  # top, left, height, width; pixels

_NARROWEST = 16  # pixels. libjpeg interpolates the colours of fewer than 5 columns in another way
_own = threading.local()  # `decoder`: of this thread, or None. `image`: its memory for pixels, or None


def of(image: np.ndarray, planned: int, box: Box) -> np.ndarray:
    """Return the pixels of a box, a view. image: uint8 [H, W, 3]. planned: H of the image for which the box
    was planned; a smaller image has a smaller box."""
    if image.shape[0] != planned:
        box = scaled(*box, image.shape[0] / planned, *image.shape[:2])
    top, left, height, width = box
    return image[top : top + height, left : left + width]


def scaled(top: int, left: int, height: int, width: int, scale: float, rows: int, columns: int) -> Box:
    """Return the box in the scaled image, which has `rows` rows and `columns` columns."""
    top, left = min(round(top * scale), rows - 1), min(round(left * scale), columns - 1)
    height, width = max(round(height * scale), 1), max(round(width * scale), 1)
    return top, left, min(height, rows - top), min(width, columns - left)


def decode(content: bytes, planned: int, box: Box) -> np.ndarray | None:
    """Return of() of the pixels of a plain JPEG (images.Header.plain), decoded without the GIL.

    The pixels are valid until the next call in this thread. Return None without nvImageCodec, if the file is
    not a JPEG, if the box is narrow, or if a part of it is missing. Damage that libjpeg can repair is
    accepted, as Pillow does.
    """
    if not hasattr(_own, "decoder"):
        _own.decoder, _own.image = _decoder(), None
    if _own.decoder is None or not content.startswith(b"\xff\xd8"):
        return None
    import nvidia.nvimgcodec as nvimgcodec

    try:
        stream = nvimgcodec.CodeStream(content)
        rows, columns = stream.height, stream.width
        if rows != planned:
            box = scaled(*box, rows / planned, rows, columns)
        top, left, height, width = box
        if width < _NARROWEST or top + height > rows or left + width > columns:
            return None
        region = nvimgcodec.Region(top, left, top + height, left + width)
        _own.image = _own.decoder.decode(stream.get_sub_code_stream(region=region), image=_own.image)
    except Exception:  # of its C++ code; the whole image is decoded instead, which names the reason
        return None
    return None if _own.image is None else np.asarray(_own.image)


def _decoder() -> Any:
    """Return a decoder that uses the CPU and the calling thread, or None."""
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")  # the whole image's error says more
    try:
        import nvidia.nvimgcodec as nvimgcodec

        cpu = [nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)]
        return nvimgcodec.Decoder(
            device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY, max_num_cpu_threads=1, backends=cpu
        )
    except Exception:  # it is not installed, too old, or lacks a library
        return None

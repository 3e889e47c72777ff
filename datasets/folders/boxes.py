"""The box of an image that a crop needs. nvImageCodec 0.9 (DALI installs it) decodes it alone from a JPEG.

The pixels are those of the whole image, in 0.8 of the time: nvImageCodec skips the rows below the box. Of the
rest it reconstructs only the blocks of the box. Without nvImageCodec the whole image is decoded.
"""

import os
import threading
from typing import Any

import numpy as np

from datasets.folders import images

Box = tuple[int, int, int, int]  # top, left, height, width; pixels

_NARROWEST = 16  # pixels, a block of colours: libjpeg interpolates very few columns in another way
# for each thread `decoder` or None, `parameters` and `image`: memory for pixels, or None
_own = threading.local()


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


def decode(content: bytes, planned: int, box: Box) -> np.ndarray | None:
    """Return what cut_out() returns for a plain JPEG (images.Header.plain), decoded without the GIL.

    The pixels are valid until the next call in this thread, which may free them. Return None without
    nvImageCodec, if the box is narrow, or if the file is progressive, has no end marker or is not a JPEG.
    Other damage may go unnoticed: such a part may be grey.
    """
    if not hasattr(_own, "decoder"):
        _own.decoder, _own.parameters = _decoder()
        _own.image = None
    if _own.decoder is None or not images.is_sequential_jpeg(content):
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
        part = stream.get_sub_code_stream(region=nvimgcodec.Region(top, left, top + height, left + width))
        _own.image = _own.decoder.decode(part, image=_own.image, params=_own.parameters)
    except RuntimeError:  # the whole image's error names the reason
        return None
    pixels = None if _own.image is None else np.asarray(_own.image)
    return pixels if pixels is not None and pixels.shape == (height, width, 3) else None


def _decoder() -> tuple[Any, Any]:
    """Return (a decoder that uses the CPU and the calling thread, its parameters), or (None, None)."""
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")  # the whole image's error says more
    try:
        import nvidia.nvimgcodec as nvimgcodec

        cpu, device = nvimgcodec.BackendKind.CPU_ONLY, nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY
        decoder = nvimgcodec.Decoder(
            device_id=device, max_num_cpu_threads=1, backends=[nvimgcodec.Backend(cpu)],
            options=":fancy_upsampling=1",  # as simplejpeg does; the default of some versions is 0
        )  # fmt: skip
        # the index decides whether an image is turned; nvImageCodec finds orientations that Pillow does not
        return decoder, nvimgcodec.DecodeParams(apply_exif_orientation=False)
    except Exception:  # it is not installed, older than 0.9, or lacks a library
        return None, None

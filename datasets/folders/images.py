"""Inspect and decode encoded images of any kind. All become upright RGB pixels.

Complete JPEG and PNG files are inspected segment by segment, without decoding. Pillow decodes all other
files. It also defines the pixels of an image: RGB, turned by its Exif orientation. An image is `plain` if
every decoder returns these pixels. Engines with their own decoder get other images through normalised().

All images of a data set get the same scale: 16 bits lose the lower 8, floats are 0..255. judge() refuses a
data set that would become dark by it.
"""

import contextlib
import io
import re
import zlib
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from bootfile.ground.errors import MissingPackage, import_optional


class _Missing:
    """Stands for a package that cannot be imported. Its first use raises the error of the import: images of
    other kinds do not need it."""

    def __init__(self, error: MissingPackage):
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise self._error


try:
    simplejpeg: Any = import_optional("simplejpeg", "JPEG images need simplejpeg")
except MissingPackage as error:
    simplejpeg = _Missing(error)

MAX_PIXELS = 178_956_970  # Pillow's own limit against decompression bombs
MAX_BYTES = 3 * MAX_PIXELS + 2**20  # of a file: as many pixels without compression, and a header
_MOST_SEGMENTS = 512  # segments of a JPEG's header, with its fill bytes
_STARTS = {  # kind of content, as Pillow calls it -> its first bytes
    "JPEG": rb"\xff\xd8\xff", "PNG": rb"\x89PNG\r\n\x1a\n", "TIFF": rb"II[*+]\0|MM\0[*+]",
    "WEBP": rb"RIFF....WEBP", "PPM": rb"P[1-6]\s", "BMP": rb"BM", "GIF": rb"GIF8[79]a",
}  # fmt: skip
KINDS = tuple(_STARTS)
# the same as torchvision's ImageFolder; compare names in lower case. Images are decoded by their content
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
_JPEG_COLOURS = ("Gray", "YCbCr", "RGB")
_PNG_TAGS = (b"Raw profile type", b"XML:com.adobe.xmp")  # begins of texts: ImageMagick's Exif, XMP
_JPEG_FRAMES = {0xC0, 0xC1, 0xC2}  # start of frame: Huffman-coded, baseline, extended or progressive
_ORIENTATION = 0x0112  # Exif tag
_DARK = 63  # highest of the upper 8 bits: a quarter of the range
# The traits of an image are one number of 16 bits, as the index stores them: in the lower 8 bits these flags,
# and in the upper 8 bits, of an image with DEEP or FLOAT, its highest value as one of 0..255.
TURNED, GREY, ALPHA, OTHER, DEEP, FLOAT, DARK, LOST = (1 << bit for bit in range(8))
_FLAG_BITS = 8
_TRAITS = {
    GREY: "grey (made three equal channels)",
    OTHER: "with a palette, CMYK, 1 bit or other colours (made RGB)",
    ALPHA: "with alpha (dropped)",
    DEEP: "with 16 bits (the upper 8 are used)",
    FLOAT: "with floats (taken as 0..255)",
    DARK: "of these dark (no value above a quarter of the range)",
    LOST: "of one colour after that, unlike the file",
    TURNED: "turned upright by Exif (torchvision's ImageFolder does not turn them)",
}
_CONVERT = (
    "python -c \"import cv2, sys; [cv2.imwrite(p, (cv2.imread(p, -1) * (255 / {})).astype('uint8')) for p in "
    'sys.argv[1:]]" FILES'
)
_MAXIMUM = re.compile(rb"P[2356](?:\s+(?:#[^\n]*\s+)*(\d+)){3}")  # the third number of a PPM
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class BadImage(ValueError):
    """The bytes are not a complete image. The message is the reason with its values, without the name."""


class Header(NamedTuple):
    """The properties of an image that inspect() returns."""

    width: int  # pixels, after the image was turned by its orientation
    height: int
    plain: bool  # an upright 8-bit JPEG or PNG, grey or RGB: every decoder gives the same pixels
    traits: int = 0  # what decode() changes, for judge()


def inspect(content: bytes) -> Header:
    """Inspect a file. A JPEG or PNG takes microseconds. The scan calls it once for each file, in its threads.
    A JPEG that ends in the end marker counts as complete; others are decoded. Raises BadImage if the file is
    empty, truncated, not an image, or larger than MAX_PIXELS."""
    kind = _kind(content)
    if kind == "JPEG":
        return _inspect_jpeg(content)
    return _inspect_png(content) if kind == "PNG" else _inspect_decoded(content, kind)


def check_bytes(size: int) -> None:
    """Raise BadImage if a file of this many bytes is too large to be read. The scan asks before it reads."""
    if size > MAX_BYTES:
        raise BadImage(f"has {size} bytes, more than {MAX_BYTES}")


def judge(traits: np.ndarray) -> str:
    """Return what decode() changes in the images of a data set, with counts; "" if nothing. traits: of all
    images. Raises BadImage if it would make most of the images that it changes dark, or of one colour.

    Each start of a job calls it, after the scan. decode() calls it for an image alone."""
    for flag, name, range in ((DEEP, "more than 8 bits", 65535), (FLOAT, "floats", 255)):
        # for example 12 bits in files of 16: their upper 8 bits have only 16 values
        of_kind = traits[traits & flag > 0]
        if len(of_kind) and (of_kind & DARK > 0).all():
            lower = 8 if flag == DEEP else 0  # bits that the highest value does not have
            bits = int((of_kind >> _FLAG_BITS).max()).bit_length() + lower
            most = 2 ** max(bits, 1) - 1  # of the range that the values seem to have, such as 4095 of 12 bits
            raise BadImage(
                f"{len(of_kind)} images with {name} have no value above {most} of {range}: all would be "
                "dark. Give them 8 bits, with one factor for the whole data set, in a copy: "
                f"{_CONVERT.format(most)}"
            )
    changed = np.count_nonzero(traits & (OTHER | ALPHA | DEEP | FLOAT))
    lost = np.count_nonzero(traits & LOST)
    if 2 * lost > changed:
        raise BadImage(
            f"{lost} images would be of one colour: their content is in alpha or in the lower bits. Put them "
            "on a background, or give them 8 bits"
        )
    counts = {text: np.count_nonzero(traits & flag) for flag, text in _TRAITS.items()}
    return ", ".join(f"{count} {text}" for text, count in counts.items() if count)


def decode(content: bytes, plain: bool | None = None, out: np.ndarray | None = None) -> np.ndarray:
    """Return the pixels, uint8 RGB [height, width, 3], C-contiguous and upright. Raises BadImage.

    Grey becomes three equal channels, 16 bits lose the lower 8, alpha is dropped. plain: Header.plain of an
    image whose data set was judged; None: it is judged alone. A plain JPEG is decoded without the GIL, into
    the beginning of `out` (flat uint8) if that is large enough. The threads and worker processes that read
    batches call it for each sample.
    """
    # most images: these pixels are the same with every decoder, and threads decode them in parallel
    if plain and content.startswith(b"\xff\xd8"):
        read_header = simplejpeg.decode_jpeg_header  # without the package Pillow must not decide
        try:
            height, width, _, _ = read_header(content)
            _check_size(width, height)
            buffer = out if out is not None and out.size >= height * width * 3 else None
            return simplejpeg.decode_jpeg(content, "RGB", buffer=buffer)
        except Exception:
            pass  # it is too large, or libjpeg warns: Pillow can repair some files, so it decides below
    kind = _kind(content)
    image, orientation = _decode_pixels(content, kind)
    rgb = _rgb(image)
    if plain is None:
        judge(np.array([_traits(image, content, kind)]))
    if orientation in _TURNS:
        rgb = rgb.transpose(_TURNS[orientation])
    return np.array(rgb)


def _rgb(image: Image.Image) -> Image.Image:
    """Return a loaded image as 8-bit RGB, not yet turned. Raises BadImage.

    decode() calls it for the pixels that it returns, and _traits() to see what is lost in them."""
    try:
        if image.mode[0] in "IF":  # integers or floats with more than 8 bits: Pillow would clip at 255
            values = np.asarray(image)
            most = 255 if image.mode == "F" else 65535
            low = values.min()
            high = values.max()
            if not (low >= 0 and high <= most):  # also NaN
                raise BadImage(f"has values {low:g}..{high:g}, expected 0..{most}")
            if most == 65535:
                values = values.astype(np.int32) >> 8
            image = Image.fromarray(values.astype(np.uint8))
        elif "transparency" in image.info:
            image = image.copy()
            del image.info["transparency"]  # drops a palette's alpha without a warning
        return image.convert("RGB")
    except BadImage:
        raise
    except Exception as error:
        raise BadImage(f"cannot be made RGB from mode {image.mode}: {_text(error)}") from error


def _traits(image: Image.Image, content: bytes, kind: str) -> int:
    """Return the traits of a loaded image, without TURNED: what _rgb() changes in it. Raises BadImage. They
    are found once for each image, in the scan, and judge() counts them over the data set. content, kind: of
    the file: Pillow gives some images with more than 8 bits the mode of one with 8 bits."""
    mode = image.mode
    has_alpha = mode[-1] in "Aa" or "transparency" in image.info
    is_float = mode == "F"
    is_deep = not is_float and (mode[0] == "I" or _count_bits(image, content, kind) > 8)
    traits = 0
    if mode in ("L", "LA") or mode[0] in "IF":
        traits = GREY
    elif mode[:3] != "RGB":
        traits = OTHER
    if has_alpha:
        traits |= ALPHA
    # the pixels are looked at only if something in them may be lost
    if not has_alpha and not is_deep and not is_float:
        return traits
    values = np.asarray(image)
    rgb = np.asarray(_rgb(image)).reshape(-1, 3)
    highest = 0
    if is_float:
        traits |= FLOAT
        highest = int(values.max())
    elif is_deep:
        traits |= DEEP
        highest = int(rgb.max())
        if kind == "PPM" and mode == "RGB" and highest > 0:
            highest -= 1  # Pillow rounds the values of such a PPM to 8 bits, and cuts those of others
    if is_float or is_deep:
        traits |= highest << _FLAG_BITS
        if highest <= _DARK:
            traits |= DARK
    # an image that was drawn in alpha or in the lower bits becomes one colour
    pixels = values.reshape(len(rgb), -1)
    if (rgb == rgb[0]).all() and not (pixels == pixels[0]).all():
        traits |= LOST
    return traits


def _count_bits(image: Image.Image, content: bytes, kind: str) -> int:
    """Return the bits of a value in the file of an image, as far as its mode does not tell them; else 8."""
    if kind == "PNG":
        return content[24]
    if kind == "TIFF":
        return max(getattr(image, "tag_v2", {}).get(258, (8,)))  # BitsPerSample
    maximum = _MAXIMUM.match(content)  # the header of a PPM: no other kind begins so
    return int(maximum[1]).bit_length() if maximum else 8


def normalised(content: bytes) -> bytes:
    """Return a plain PNG of the pixels of decode(), for engines whose own decoder returns other pixels.
    Raises BadImage. Store.portable() calls it for each sample that is not plain, in a thread or a worker."""
    buffer = io.BytesIO()
    Image.fromarray(decode(content, plain=False)).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def _kind(content: bytes) -> str:
    """Return the kind of an image, a key of _STARTS, from its first bytes. Raises BadImage if the kind is not
    known. inspect() and decode() call it first: the ending of a name may be wrong."""
    for kind, start in _STARTS.items():
        if re.match(start, content, re.DOTALL):
            return kind
    if not content:
        raise BadImage("is empty (0 bytes)")
    raise BadImage(f"is not a known image format ({_tail(content)}): it starts with {content[:40]!r}")


def _check_size(width: int, height: int) -> None:
    """Raise BadImage if an image has too many pixels. It is called before memory for them is taken; Pillow
    checks what it decodes itself."""
    if width * height > MAX_PIXELS:
        raise BadImage(
            f"has {width * height / 1e6:.1f} megapixels ({width}x{height}), more than {MAX_PIXELS / 1e6:.1f}"
        )


def _inspect_jpeg(content: bytes) -> Header:
    """Return the Header of a JPEG, if possible without decoding it. inspect() calls it. Raises BadImage."""
    read_header = simplejpeg.decode_jpeg_header
    try:
        height, width, space, _ = read_header(content)
    except Exception:  # it knows fewer subsamplings than libjpeg
        return _inspect_decoded(content, "JPEG")
    _check_size(width, height)
    frame, bits, may_be_turned = _walk_jpeg(content)
    # not every decoder knows such a file: it is decoded, and counts as not plain
    if frame not in _JPEG_FRAMES or bits != 8 or space not in _JPEG_COLOURS:
        return _inspect_decoded(content, "JPEG")
    if not content.endswith(b"\xff\xd9"):  # cut, or other bytes follow the end marker
        try:  # libjpeg raises if the end marker is missing
            simplejpeg.decode_jpeg(content)
        except Exception as error:
            raise BadImage(f"is cut or damaged ({_tail(content)}): {_text(error)}") from error
    orientation = _orientation(_open(content, "JPEG")) if may_be_turned else 1
    traits = GREY if space == "Gray" else 0
    return _header(width, height, orientation, True, traits)


def _header(width: int, height: int, orientation: int, plain: bool, traits: int) -> Header:
    """Return the Header of an image of this size before it is turned. plain: whether it is if upright."""
    if orientation >= 5:  # a quarter turn: width and height change places
        width, height = height, width
    if orientation > 1:
        return Header(width, height, False, traits | TURNED)
    return Header(width, height, plain, traits)


def _walk_jpeg(content: bytes) -> tuple[int, int, bool]:
    """Return (start of frame marker, bits per sample, whether a segment may contain an orientation). The
    marker is 0 if the segments before the pixels are not valid. Raises BadImage if there are too many: Pillow
    copies all segments of Exif for each one. It is called before Pillow opens a JPEG."""
    position = 2  # after the start of the file
    frame = 0
    bits = 0
    may_be_turned = False
    for _ in range(_MOST_SEGMENTS):
        if position + 5 >= len(content) or content[position] != 0xFF:
            return 0, 0, may_be_turned
        marker = content[position + 1]
        if marker == 0xDA:  # start of scan
            return frame, bits, may_be_turned
        if marker == 0xFF:  # a fill byte
            position += 1
            continue
        end = position + 2 + (content[position + 2] << 8 | content[position + 3])
        if marker == 0xE1:  # Exif or XMP
            segment = content[position + 4 : end]
            has_tag = segment.startswith(b"Exif\0\0") or b"tiff:Orientation" in segment
            may_be_turned = may_be_turned or has_tag
        # a frame: of these sixteen markers two are tables, and one is reserved
        elif 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            frame = marker
            bits = content[position + 4]
        position = end
    raise BadImage(f"has more than {_MOST_SEGMENTS} segments and fill bytes before its pixels")


def _inspect_png(content: bytes) -> Header:
    """Return the Header of a PNG, if possible without decoding it. inspect() calls it. Raises BadImage."""
    image = _open(content, "PNG")
    plain = content[24] == 8 and content[25] in (0, 2)  # bits; colour type: grey or RGB without alpha
    may_be_turned = False
    view = memoryview(content)
    position = 8  # after the signature
    chunk = b""
    while chunk != b"IEND":
        end = position + 8 + int.from_bytes(content[position : position + 4], "big")
        if end + 4 > len(content):
            raise BadImage(f"is cut or damaged ({_tail(content)}): a PNG without its end chunk")
        chunk = content[position + 4 : position + 8]
        # decoders check the same CRC: a file that is accepted here does not fail during training
        if zlib.crc32(view[position + 4 : end]) != int.from_bytes(content[end : end + 4], "big"):
            raise BadImage(f"is damaged ({_tail(content)}): the PNG chunk at byte {position} has a wrong CRC")
        plain = plain and chunk != b"tRNS"  # alpha
        may_be_turned = may_be_turned or chunk == b"eXIf" or content.startswith(_PNG_TAGS, position + 8)
        position = end + 4
    # a text or Exif may hold an orientation: Pillow decides, as in decode()
    if may_be_turned or not plain:
        return _inspect_decoded(content, "PNG", plain)
    traits = GREY if image.mode == "L" else 0
    return Header(*image.size, plain, traits)


def _inspect_decoded(content: bytes, kind: str, plain: bool = False) -> Header:
    """Return the Header of an image that is decoded. plain: whether it is plain if it is upright.

    The scan decodes the images whose segments it cannot check. Raises BadImage."""
    image, orientation = _decode_pixels(content, kind)
    return _header(*image.size, orientation, plain, _traits(image, content, kind))


def _open(content: bytes, kind: str) -> Image.Image:
    """Return the image of a file, of which Pillow has read only the header. Raises BadImage."""
    if kind == "JPEG":
        _walk_jpeg(content)
    with _reasons(content, kind):
        return Image.open(io.BytesIO(content), formats=[kind])  # checks MAX_PIXELS


def _decode_pixels(content: bytes, kind: str) -> tuple[Image.Image, int]:
    """Decode all pixels of a file with Pillow. Return (image in its own mode and not turned, orientation).

    In the training, decode() calls it for each sample that simplejpeg cannot decode, in a thread or a worker.
    In the scan, _inspect_decoded() calls it.

    kind: of _kind().
    orientation: how the caller has to turn the image: a key of _TURNS, or 1 if it is upright.
    Raises BadImage if the file is cut or damaged.
    """
    image = _open(content, kind)
    with _reasons(content, kind):
        image.load()  # _open() has read only the header: a damaged file is noticed here
    # Read the orientation only now. Pillow turns a TIFF while it loads the pixels, and then has no
    # orientation. In a PNG, the Exif may follow the pixels.
    orientation = _orientation(image)
    return image, orientation


@contextlib.contextmanager
def _reasons(content: bytes, kind: str):
    """Turn all exceptions into BadImage: Pillow raises many types for a damaged file."""
    try:
        yield
    except Exception as error:
        raise BadImage(f"is not a complete {kind} ({_tail(content)}): {_text(error)}") from error


def _orientation(image: Image.Image) -> int:
    """Return the orientation that the Exif of an opened image has: a key of _TURNS, or 1."""
    try:
        orientation = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # the pixels are usable if only the Exif is damaged
        return 1
    return orientation if orientation in _TURNS else 1


def _tail(content: bytes) -> str:
    """Return the size of a file for a message, and whether it ends in zeros, as after a copy that was cut."""
    zeros = len(content) - len(content.rstrip(b"\0"))
    text = f"{len(content)} bytes"
    if zeros > 8:
        text += f", the last {zeros} of them zeros"
    return text


def _text(error: Exception) -> str:
    """Return the reason of another library for a message."""
    # Pillow puts the address of its buffer into some messages, and some errors have no text
    return str(error).partition(" <_io")[0] or type(error).__name__

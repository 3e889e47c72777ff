"""JPEGs of which only the part is decoded that a crop needs, with the pixels of the whole decode.

A JPEG codes its pixels in MCUs (minimum coded units) of 8 or 16 pixels a side, row after row. After a restart
marker, the code does not depend on what came before. So the segments between markers can be cut out and
joined to a smaller JPEG: the header with another height and width, the segments that cover the crop, and
the markers numbered from 0 again. One pixel more on each side keeps the colours the same: a decoder
interpolates subsampled colours from one neighbour.
"""

import functools
import io
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, JpegImagePlugin

Box = tuple[int, int, int, int]  # top, left, height, width; pixels

_MOST = 65535  # the largest number in a JPEG
MOST_PIXELS = 65500  # the longest side: libjpeg's limit
_SAMPLINGS = ("4:4:4", "4:2:2", "4:2:0")  # in the order of Pillow's numbers
_MARGIN = 1  # pixels on each side of a crop
_SEGMENT = 32  # pixels, about the width of a segment: narrower ones decode less, and cost more bytes
_NARROWEST = 16
_WIDEST = 128
_START_OF_FRAME = (0xC0, 0xC1)  # Huffman-coded and sequential
_OTHER_FRAMES = frozenset(range(0xC2, 0xD0)) - {0xC4, 0xC8, 0xCC}
_RESTART_INTERVAL = 0xDD
_START_OF_SCAN = 0xDA
_FIRST_RESTART = 0xD0
_END = 0xD9
_KINDS = 8  # restart markers are numbered 0..7, in turns
_LENGTHS = 0xEF  # an application segment after the start of the file: _NAME and the bytes of each segment
_NAME = b"bootfile\0\0"
_WHOLE_SCAN = b"\0\x3f\0"  # all coefficients, at their full precision
_LENGTH_OF_FRAME = 6  # bytes before the components: precision, height, width, number of components


class Header(NamedTuple):
    """What cut() needs of a JPEG's header.

    end: bytes of the header. size_at: where its height begins, which the width follows. height, width:
    pixels. mcu_height, mcu_width: pixels of an MCU. interval: MCUs between two restart markers.
    lengths_end: bytes until the end of the lengths of the segments, which encode() writes; 0 without them.
    """

    end: int
    size_at: int
    height: int
    width: int
    mcu_height: int
    mcu_width: int
    interval: int
    lengths_end: int


class Part(NamedTuple):
    """A JPEG that holds a part of another one. top, left: of the part, in pixels of the other one."""

    content: bytes | bytearray
    top: int
    left: int
    height: int
    width: int


def read_header(content: bytes) -> Header | None:
    """Return the header of a JPEG; None if its parts cannot be decoded alone: it has no restart markers, it
    is progressive, or something in it is not known here."""
    size_at = interval = components = lengths_end = 0
    mcu = 0, 0
    position = 2  # after the start of the file
    while position + 4 <= len(content) and content[position] == 0xFF:
        marker = content[position + 1]
        body = position + 4
        end = position + 2 + _number(content, position + 2)
        if end > len(content) or marker in _OTHER_FRAMES:
            return None
        if marker in _START_OF_FRAME:
            components = content[body + 5]
            size_at = body + 1
            factors = content[body + _LENGTH_OF_FRAME + 1 : end : 3]
            if content[body] != 8 or components not in (1, 3) or len(factors) != components:
                return None
            # one component alone has MCUs of 8 pixels, whatever its factors
            high = max(factor & 15 for factor in factors) if components == 3 else 1
            wide = max(factor >> 4 for factor in factors) if components == 3 else 1
            mcu = 8 * high, 8 * wide
        elif marker == _LENGTHS and position == 2 and content.startswith(_NAME, body):
            lengths_end = end
        elif marker == _RESTART_INTERVAL:
            interval = _number(content, body)
        elif marker == _START_OF_SCAN:
            # a progressive file has several scans, of parts of the coefficients: none can be cut
            is_whole = content[body] == components and content[end - 3 : end] == _WHOLE_SCAN
            height = _number(content, size_at)
            width = _number(content, size_at + 2)
            is_usable = interval and size_at and is_whole and height and width
            return Header(end, size_at, height, width, *mcu, interval, lengths_end) if is_usable else None
        position = end
    return None


def cut(content: bytes, header: Header, box: Box) -> Part | None:
    """Return a JPEG that holds the box and at least _MARGIN pixels around it; None if the markers of the
    JPEG are not those that its header announces. header: of read_header()."""
    columns = -(-header.width // header.mcu_width)  # MCUs of a row
    rows = -(-header.height // header.mcu_height)
    if columns % header.interval and header.interval % columns:
        return None
    # several segments in a row of MCUs, or several rows in a segment
    across = max(1, columns // header.interval)
    step_x = min(header.interval, columns) * header.mcu_width
    rows_of_segment = max(1, header.interval // columns)
    step_y = rows_of_segment * header.mcu_height
    down = -(-rows // rows_of_segment)
    # the header of our own JPEGs has the lengths; in others the markers are searched for
    ends = _read_ends(content, header, across * down) if header.lengths_end else None
    if ends is None:
        ends = _find_ends(content, header.end, across * down)
    if ends is None:
        return None
    top, left, height, width = box
    first_row, last_row = _cover(top, height, step_y, down)
    first, last = _cover(left, width, step_x, across)
    # at the right edge: libjpeg does not interpolate the colours of an image of fewer than 5 columns
    if first > 0 and header.width - first * step_x < header.mcu_width:
        first -= 1
    part_height = min(last_row * step_y, header.height) - first_row * step_y
    part_width = min(last * step_x, header.width) - first * step_x
    if (part_height, part_width) == (header.height, header.width):
        return Part(content, 0, 0, header.height, header.width)
    begins = np.append(header.end, ends[:-1])  # a segment ends with the two bytes of its marker
    kept_ends = ends.reshape(down, across)[first_row:last_row, first:last]
    kept_begins = begins.reshape(down, across)[first_row:last_row, first]
    skipped = max(0, header.lengths_end - 2)  # bytes of the lengths, which the part does not need
    part = bytearray(content[:2])
    part += content[2 + skipped : header.end]
    size_at = header.size_at - skipped
    # the header of the file, with the size of the part
    part[size_at : size_at + 4] = (part_height << 16 | part_width).to_bytes(4, "big")
    # the segments of a row are neighbours in the file: one slice for each row
    moved = np.empty(len(kept_begins), np.int64)
    for row, (begin, end) in enumerate(zip(kept_begins.tolist(), kept_ends[:, -1].tolist(), strict=True)):
        moved[row] = len(part) - begin
        part += content[begin:end]
    # a decoder expects the numbers of the markers in order: they begin again with 0
    markers = (kept_ends + moved[:, None]).reshape(-1) - 1
    np.frombuffer(part, np.uint8)[markers] = _list_markers(len(markers))
    return Part(part, first_row * step_y, first * step_x, part_height, part_width)


def encode(image: Image.Image, subsampling: str, **options: Any) -> bytes:
    """Return a JPEG with restart markers. image: of mode RGB or L. subsampling: one of "4:4:4", "4:2:2" and
    "4:2:0"; L has none. options: of Pillow: quality, or qtables. Raises ValueError if a side is too long."""
    if max(image.size) > MOST_PIXELS:
        raise ValueError(f"{image.width}x{image.height} pixels, a side may have {MOST_PIXELS}")
    mcu_width = 8 if image.mode == "L" or subsampling == "4:4:4" else 16
    interval = _choose_interval(-(-image.width // mcu_width), mcu_width)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", subsampling=subsampling, restart_marker_blocks=interval, **options)
    return _with_lengths(buffer.getvalue())


def encode_again(content: bytes) -> bytes:
    """Return a JPEG with restart markers of a file that is one: its own bytes if they have markers already,
    else it is encoded again with its own tables of quantisation and its own subsampling. If that fails, for
    example because a side is too long, return its own bytes: they are decoded as a whole."""
    header = read_header(content)
    if header and cut(content, header, (0, 0, 1, 1)):
        return content
    try:
        image = JpegImagePlugin.JpegImageFile(io.BytesIO(content))
        if image.mode not in ("RGB", "L"):
            return content
        number = JpegImagePlugin.get_sampling(image)
        subsampling = _SAMPLINGS[number] if 0 <= number < len(_SAMPLINGS) else "4:4:4"
        # its own tables: the loss is that of rounding once more, not that of another quality
        tables = image.quantization
        image.load()
        plain = Image.fromarray(np.asarray(image))  # without Exif, profiles and comments
        return encode(plain, subsampling, qtables=tables)
    except (OSError, ValueError, SyntaxError):
        return content


def _number(content: bytes, position: int) -> int:
    """Return the two bytes at this position as a number."""
    return content[position] << 8 | content[position + 1]


def _with_lengths(content: bytes) -> bytes:
    """Return a JPEG with the bytes of each segment after its first marker: finding them costs a tenth of the
    decode. encode() calls it. A JPEG with too many or too long segments is returned as it is."""
    header = read_header(content)
    if not header:
        return content
    coded = np.frombuffer(content, np.uint8, offset=header.end)
    segments = int(np.count_nonzero((coded[:-1] == 0xFF) & (coded[1:] != 0)))
    ends = _find_ends(content, header.end, segments)
    if ends is None:
        return content
    lengths = np.diff(ends, prepend=header.end)
    size = 2 + len(_NAME) + 2 * len(lengths)
    if lengths.max() > _MOST or size > _MOST:
        return content
    # an application segment: decoders that do not know it skip it
    start = bytes((0xFF, _LENGTHS)) + size.to_bytes(2, "big") + _NAME
    return content[:2] + start + lengths.astype(">u2").tobytes() + content[2:]


def _read_ends(content: bytes, header: Header, segments: int) -> np.ndarray | None:
    """Return _find_ends() from the lengths in the header; None if a marker is not where they end."""
    begin = 2 + 4 + len(_NAME)
    if header.lengths_end - begin != 2 * segments:
        return None
    lengths = np.frombuffer(content, ">u2", segments, begin)
    ends = header.end + np.cumsum(lengths, dtype=np.int64)
    if ends[-1] != len(content):
        return None
    coded = np.frombuffer(content, np.uint8)
    # the lengths count only if each of them ends at its marker
    is_marker = (coded[ends - 2] == 0xFF) & (coded[ends - 1] == _list_markers(segments))
    return ends if is_marker.all() else None


@functools.lru_cache(maxsize=4096)
def _list_markers(segments: int) -> np.ndarray:
    """Return the second bytes of the markers at the ends of the segments, uint8 [segments]; read-only."""
    markers = (_FIRST_RESTART + np.arange(segments) % _KINDS).astype(np.uint8)
    markers[-1] = _END
    markers.flags.writeable = False
    return markers


def _find_ends(content: bytes, start: int, segments: int) -> np.ndarray | None:
    """Return where each segment ends, after its marker, int64 [segments]; None unless the coded pixels,
    which begin at `start`, are this number of segments, with markers in order and nothing after them."""
    coded = np.frombuffer(content, np.uint8, offset=start)
    places = np.flatnonzero(coded[:-1] == 0xFF)
    kinds = coded[places + 1]
    is_marker = kinds != 0  # an 0xFF of the code is followed by 0
    markers = kinds[is_marker]
    if len(markers) != segments or not np.array_equal(markers, _list_markers(segments)):
        return None
    ends = places[is_marker] + start + 2
    return ends if ends[-1] == len(content) else None


def _cover(begin: int, length: int, step: int, count: int) -> tuple[int, int]:
    """Return the range of the `count` segments of `step` pixels that covers these pixels and a margin."""
    first = max(0, begin - _MARGIN) // step
    last = -(-(begin + length + _MARGIN) // step)
    return first, min(count, last)


def _choose_interval(columns: int, mcu_width: int) -> int:
    """Return after how many MCUs a marker follows: the segments divide a row, and are about _SEGMENT pixels
    wide. If only narrower or wider ones divide it, a segment is a row. columns: MCUs of a row."""
    widths = {interval: interval * mcu_width for interval in range(1, columns) if columns % interval == 0}
    ratios = {
        interval: max(width / _SEGMENT, _SEGMENT / width)
        for interval, width in widths.items()
        if _NARROWEST <= width <= _WIDEST
    }
    return min(ratios, key=ratios.__getitem__, default=columns)

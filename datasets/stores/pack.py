"""Packs: a data set in memory-mapped files that all processes of a node share, in one of the forms.

A pack is a folder of Arrow IPC files of 512 samples each and meta.json. A file has record batches of 64
samples. The columns are height and width (uint32, pixels), crc32 (uint32, of the content) and content
(large_binary): the pixels uint8 [height, width, 3] or encoded bytes of any length.
"""

import concurrent.futures
import contextlib
import functools
import itertools
import json
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from bootfile.ground.again import is_temporary
from bootfile.ground.errors import BadInput, Unavailable, import_optional
from bootfile.ground.files import explained, open_atomic, read_again, read_file, sweep, write_atomic
from bootfile.machine.cores import available_cores
from common.ground.shared_folders import locked
from datasets.folders import images
from datasets.folders.walk import progress
from datasets.stores import forms, restart
from datasets.stores.files import Box, FileStore, Store, fitted, work_ahead
from datasets.stores.forms import QUALITY, Sample

META = "meta.json"
_VERSION = 2
SAMPLES_PER_FILE = 512  # samples per file: a kill loses at most one file
_BATCH = 64  # samples per record batch, which are in memory at the same time
_AHEAD = 3  # batches that are made while one is written
_THREADS_PER_CORE = 2  # some threads read while others decode


class PackStore(Store):
    """The images of a whole pack, as build() returns it. index: of the same data set. Each process verifies a
    sample when it first reads it. (On every read this would cost a quarter of the time of cropping: 243 us
    instead of 186, n=5, 2026-11-21.) A damaged sample is made from its file."""

    def __init__(self, path: str, index: Any, form: str):
        self.path = path
        self.index = index
        self.form = form
        self._parts: dict[int, list[tuple[np.ndarray, ...]]] = {}  # number of a file -> _mapped()
        self._checked = bytearray(len(index))  # 1: this process has verified the sample
        self._has_warned = False

    def read(self, ids: np.ndarray) -> list[bytes | np.ndarray]:
        """Return the samples; pixels without a copy."""
        return [self._intact(id).value(self.form) for id in np.asarray(ids).tolist()]

    def decode_box(
        self, id: int, content: Any, planned: int, box: Box, scratch: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the pixels of a box, as Store.decode_box() does. Of a JPEG with restart markers only the
        part around the box is decoded; one whose markers are not as expected is decoded as a whole."""
        header = restart.read_header(content) if self.form in forms.CUT else None
        if header:
            own_box = fitted(box, planned, header.height, header.width)
            pixels = _decode_part(content, header, own_box, scratch)
            if pixels is not None:
                return pixels
        return super().decode_box(id, content, planned, box, scratch)

    def close(self) -> None:
        self._parts = {}

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_parts": {}}

    def _intact(self, id: int) -> Sample:
        """Return the sample, from its file if it is damaged. Raises BadInput if the file is also bad."""
        fault = "is damaged"
        try:
            sample, checksum = self.stored(id)
            if self._checked[id]:
                return sample
            # the first read of a sample in this process: compare it with the index
            height, width, length = map(int, forms.sizes(self.index, id, self.form))
            length = length or max(1, len(sample.content))  # the length of a JPEG is not known
            actual = (sample.height, sample.width, len(sample.content))
            if actual == (height, width, length) and zlib.crc32(sample.content) == checksum:
                self._checked[id] = 1
                return sample
        except Unavailable:
            fault = "cannot be read"
        except (BadInput, LookupError, ValueError):
            pass
        # one line for each process: a damaged part has many samples
        if not self._has_warned:
            self._has_warned = True
            print(
                f"warning: the pack {self.path} {fault}: {self.index.path(id)} is read from its file "
                "(`python -m launch cache check` names all damaged samples)",
                file=sys.stderr,
                flush=True,
            )
        return forms.make(FileStore(self.index, verified=True), id, self.form)

    def stored(self, id: int) -> tuple[Sample, int]:
        """Return (the stored sample without a copy or a check, its crc32). Raises BadInput, LookupError and
        ValueError if the pack is damaged. Each process maps a file when it first needs one of its samples."""
        number = id // SAMPLES_PER_FILE
        part = self._parts.get(number)
        if part is None:  # two threads may do this, with the same result
            part = self._parts[number] = _open_part(self.path, number)
        batch, row = divmod(id % SAMPLES_PER_FILE, len(part[0][0]))
        heights, widths, checksums, offsets, contents = part[batch]
        return Sample(heights[row], widths[row], contents[offsets[row] : offsets[row + 1]]), checksums[row]


def _decode_part(
    content: bytes, header: restart.Header, box: Box, scratch: np.ndarray | None
) -> np.ndarray | None:
    """Return the pixels of a box of a JPEG; None if it has to be decoded as a whole."""
    part = restart.cut(content, header, box)
    if part is None:
        return None
    has_room = scratch is not None and scratch.size >= part.height * part.width * 3
    try:
        pixels = images.simplejpeg.decode_jpeg(part.content, "RGB", buffer=scratch if has_room else None)
    except ValueError:  # libjpeg warns: the whole decode tells what is wrong
        return None
    top, left, height, width = box
    top -= part.top
    left -= part.left
    return pixels[top : top + height, left : left + width]


def build(index: Any, path: str, form: str = "decoded", threads: int | None = None) -> PackStore:
    """Return the pack in the folder `path`. Build it if it is missing or holds another data set or form.

    form: of datasets/stores/forms.py. threads: that read and decode (default: 2 per core).
    An interrupted build is continued, and damaged parts are built again. Every rank calls it when it opens
    its stores: of the processes of a node one builds, and the others wait for the lock. Raises BadInput with
    the sizes if there is not enough room.
    """
    with explained(f"cannot write the pack {path}"):
        if not is_whole(index, path, form):
            os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
            with locked(f"{path}.lock"):
                if not is_whole(index, path, form):  # no other process has built it meanwhile
                    _fill(index, path, form, threads or _THREADS_PER_CORE * available_cores())
    return PackStore(path, index, form)


def is_whole(index: Any, path: str, form: str) -> bool:
    """Return whether the pack exists and all its parts have their sizes. build() and tools ask; the contents
    are not read."""
    try:
        wanted = _description(index, form) | {"whole": True, "sizes": _sizes(path, len(index))}
    except OSError as error:
        _raise_if_temporary(error, path)
        return False
    return wanted.items() <= described(path).items()


def _description(index: Any, form: str) -> dict[str, Any]:
    """Return what the meta.json of a pack has from its first part on."""
    description: dict[str, Any] = {
        "version": _VERSION,
        "fingerprint": index.fingerprint,
        "form": form,
        "count": len(index),
        "short_side": 0 if form in forms.WHOLE else forms.SHORT_SIDE,  # 0: the images have their own sizes
    }
    if form in forms.JPEGS:
        description["quality"] = forms.QUALITY_FULL if form in forms.WHOLE else QUALITY
    return description


def _sizes(path: str, count: int) -> list[int]:
    """Return the bytes of each part of a pack of `count` samples. Raises OSError if one is missing."""
    parts = [_part(path, number) for number in range(-(-count // SAMPLES_PER_FILE))]
    return [read_again(functools.partial(os.path.getsize, part), part) for part in parts]


def place(folder: str, index: Any, form: str = "decoded") -> str:
    """Return the path of a pack in a folder of packs. It differs for each data set and form."""
    kind = "" if form == "decoded" else f"-{forms.label(form)}"
    return os.path.join(folder, f"{index.split}-{index.fingerprint[:12]}{kind}.pack")


def size_of(index: Any, form: str) -> int:
    """Return the approximate size of a pack in bytes. JPEGs are taken to have 3 bits per pixel, those in the
    size of the files a tenth more than these."""
    heights, widths, lengths = forms.sizes(index, slice(None), form)
    if form in forms.WHOLE:
        return int(index.bytes.sum() * (10 if form in forms.SIZED else 11) // 10)
    return int((lengths if form in forms.SIZED else heights * widths * 3 // 8).sum())


def _fill(index: Any, path: str, form: str, threads: int) -> None:
    """Build the parts of a pack that are missing or damaged, and all if it is of another data set or form."""
    count = -(-len(index) // SAMPLES_PER_FILE)
    wanted = _description(index, form)
    is_same = wanted.items() <= described(path).items()
    missing = [part for part in range(count) if not is_same or not _is_part(path, part, len(index))]
    size = size_of(index, form) / max(1, count)  # bytes of a part

    def check_room(parts: int) -> None:
        """Raise BadInput unless the disk has room for this number of parts."""
        free = shutil.disk_usage(os.path.dirname(os.path.abspath(path))).free
        if size * parts > free:
            raise BadInput(
                f"a pack of {len(index)} images needs {size * parts / 1e9:.2f} GB at {path}, "
                f"{free / 1e9:.2f} GB are free"
            )

    # before the old pack is deleted
    check_room(len(missing))
    if not is_same:
        shutil.rmtree(path, ignore_errors=True)
        os.makedirs(path)
    # what a killed build has left behind: files without their names
    sweep(path)
    # before the first part: a build that is killed from here on is continued by the next start
    write_atomic(os.path.join(path, META), json.dumps(wanted | {"whole": False}))
    packed = min(len(index), (count - len(missing)) * SAMPLES_PER_FILE)
    bar = progress(len(index), f"packing {index.split}", packed)
    files = FileStore(index, verified=True)

    def make(id: int) -> tuple[Sample, int]:
        """Read a sample and return it with its CRC-32; in a thread of the pool."""
        sample = forms.make(files, id, form)
        return sample, zlib.crc32(sample.content)

    # threads make the samples of the next batches while this one writes
    with concurrent.futures.ThreadPoolExecutor(threads, "pack") as pool, bar:
        batches = [batch for part in missing for batch in _batches(part, len(index))]
        tasks = work_ahead(batches, lambda ids: [pool.submit(make, id) for id in ids], _AHEAD)
        with contextlib.closing(tasks) as made:
            for written, part in enumerate(missing):
                check_room(len(missing) - written)  # other processes may fill the disk or memory
                of_part = itertools.islice(made, len(_batches(part, len(index))))
                _write_part(_part(path, part), (samples for _, samples in of_part), bar.update)
    meta = wanted | {"whole": True, "sizes": _sizes(path, len(index))}
    write_atomic(os.path.join(path, META), json.dumps(meta))


def _batches(part: int, count: int) -> list[range]:
    """Return the ids of each record batch of a part. count: samples of the pack."""
    last = min((part + 1) * SAMPLES_PER_FILE, count)
    return [range(first, min(first + _BATCH, last)) for first in range(part * SAMPLES_PER_FILE, last, _BATCH)]


def _is_part(path: str, number: int, count: int) -> bool:
    """Return whether a part can be read and has all its samples. count: samples of the pack."""
    try:
        batches = _open_part(path, number)
    except Unavailable:  # it would be built again, although nothing is wrong with it
        raise
    except BadInput:
        return False
    expected = min(SAMPLES_PER_FILE, count - number * SAMPLES_PER_FILE)
    return sum(len(heights) for heights, *_ in batches) == expected


def _part(path: str, number: int) -> str:
    """Return the path of a file of a pack."""
    return os.path.join(path, f"{number:06}.arrow")


def _write_part(path: str, batches: Iterable[list[tuple[Sample, int]]], log: Callable[[int], object]) -> None:
    """Write one file of a pack, an Arrow IPC file. It gets its name when it is complete. batches: the samples
    of a record batch, each with its CRC-32. The iteration over them waits until threads have made the
    samples. log: called with the number of samples after each batch."""
    arrow = _arrow()
    numbers = {name: arrow.uint32() for name in ("height", "width", "crc32")}
    schema = arrow.schema(numbers | {"content": arrow.large_binary()})
    with open_atomic(path) as file, arrow.ipc.new_file(file, schema) as writer:
        for batch in batches:
            rows = [(sample.height, sample.width, checksum) for sample, checksum in batch]
            contents = [sample.content for sample, _ in batch]
            # Arrow's form of the contents: where each begins and the last ends, and all of them in one buffer
            offsets = np.cumsum([0, *map(len, contents)])
            no_nulls = None
            buffers = [no_nulls, arrow.py_buffer(offsets), arrow.py_buffer(b"".join(contents))]
            content = arrow.LargeBinaryArray.from_buffers(schema.field("content").type, len(batch), buffers)
            columns = [arrow.array(column) for column in np.array(rows, np.uint32).T]
            writer.write_batch(arrow.record_batch([*columns, content], schema=schema))
            log(len(batch))


def _open_part(path: str, number: int) -> list[tuple[np.ndarray, ...]]:
    """Return _mapped() of a part of a pack. Raises BadInput."""
    part = _part(path, number)
    return read_again(functools.partial(_mapped, part), part)


def _raise_if_temporary(error: Exception, path: str) -> None:
    """Raise Unavailable if the file system of a pack may answer later: the pack must not be built again."""
    if is_temporary(error):
        with explained(f"cannot read the pack {path}"):
            raise error


def _mapped(path: str) -> list[tuple[np.ndarray, ...]]:
    """Return (heights, widths, checksums, offsets, contents) of each batch of a file, without a copy of the
    contents. All batches but the last have the same length. Raises BadInput."""
    arrow = _arrow()
    batches: list[tuple[np.ndarray, ...]] = []
    failure = f"{path} is not a part of a pack"
    with explained(failure, ValueError, LookupError, TypeError, arrow.ArrowException):
        with arrow.ipc.open_file(arrow.memory_map(path)) as file:
            for number in range(file.num_record_batches):
                batch = file.get_batch(number)
                _, offsets, contents = batch.column("content").buffers()
                columns = [batch.column(name).to_numpy() for name in ("height", "width", "crc32")]
                content = np.frombuffer(offsets, np.int64), np.frombuffer(contents, np.uint8)
                batches.append((*columns, *content))
        lengths = [len(heights) for heights, *_ in batches]
        # the place of a sample follows from its id only if all batches but the last have one length
        if not any(lengths) or set(lengths[:-1]) - {lengths[0]}:
            raise ValueError(f"its record batches have {lengths} samples")
        return batches


def described(path: str) -> dict:
    """Return meta.json of a pack: version, fingerprint, form, count, short_side, quality (of JPEGs), whole,
    and sizes (bytes of each part) if it is complete; {} if the file is missing or not JSON."""
    try:
        meta = json.loads(read_file(os.path.join(path, META), 2**26))
    except (OSError, ValueError, RecursionError) as error:
        _raise_if_temporary(error, path)
        return {}
    return meta if isinstance(meta, dict) else {}


def _arrow():
    """Return pyarrow. Raises BadInput, at the first use: jobs without packs do not need it."""
    import_optional("pyarrow.ipc", "packs need Arrow", "pyarrow")
    return import_optional("pyarrow", "packs need Arrow")

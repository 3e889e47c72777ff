"""A data set in memory-mapped files, which all processes of a node share: decoded once, or as it was.

A pack is a folder of Arrow IPC files of 512 samples each and meta.json. The columns are height and width
(uint32, pixels), crc32 (uint32, of the content) and content (large_binary): the pixels uint8 [height, width,
3] or the encoded bytes. Arrow's files are mapped without a copy, and unlike LMDB's they may be open twice and
survive a fork; tests/benchmarks/containers.py has the figures of both against a plain mapped file.
"""

import concurrent.futures
import contextlib
import functools
import json
import os
import shutil
import socket
import zlib

import numpy as np
from tqdm import tqdm

from common import cores
from common.exits import BadInput
from datasets import files
from datasets.stores import forms
from datasets.stores.files import origin
from datasets.stores.forms import FORMS, SHORT_SIDE, Sample

META = "meta.json"
_VERSION = 1
TOGETHER = 512  # samples a file: what a kill may cost, and 100 MB of memory while building
_THREADS_PER_CORE = 2  # while some read, others decode


class PackStore:
    """The images of a pack that build() made. index: of the same data set.

    Raises BadInput where there is none, it is not whole, or it holds another data set.
    """

    def __init__(self, path: str, index):
        self.path, self.index, self._parts = path, index, {}
        self.meta = described(path)
        if not self.meta.get("whole"):
            raise BadInput(f"{path} is no finished pack of version {_VERSION}: build it again")
        self.form = self.meta["form"]
        if self.meta["fingerprint"] != index.fingerprint:
            raise BadInput(
                f"the pack {path} holds another data set: its fingerprint is {self.meta['fingerprint']}, "
                f"that of {index.root} is {index.fingerprint}"
            )

    def image(self, id: int, scratch: np.ndarray | None = None) -> np.ndarray:
        """Without a copy where the form is "decoded": it cannot be written to."""
        return forms.image(self.index, id, self.form, self.sample(id), scratch, self.path)

    def encoded(self, id: int) -> bytes:
        return forms.encoded(self.index, id, self.sample(id))

    def sample(self, id: int) -> Sample:
        """As it is kept, without a copy."""
        height, width, _, content = self._sample(id)
        return Sample(height, width, content)

    def verify(self) -> None:
        """Read everything. Raises BadInput that names what is not as it was written."""
        bad = []
        for id in tqdm(range(len(self.index)), desc=f"checking {self.path}", unit="image", mininterval=1):
            _, _, checksum, content = self._sample(id)
            if zlib.crc32(content) != checksum:
                bad.append(self.index.path(id))
        if bad:
            raise BadInput(f"{len(bad)} of {len(self.index)} images in {self.path} are damaged: {bad[:10]}")

    def close(self) -> None:
        self._parts = {}

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_parts": {}}

    def _sample(self, id: int) -> tuple[int, int, int, np.ndarray]:
        """(height, width, crc32, content: uint8 [bytes])."""
        part = self._parts.get(id // TOGETHER)
        if part is None:  # threads may do this twice: the same is put there
            part = self._parts[id // TOGETHER] = _mapped(_part(self.path, id // TOGETHER))
        heights, widths, checksums, offsets, contents = part
        row = id % TOGETHER
        return heights[row], widths[row], checksums[row], contents[offsets[row] : offsets[row + 1]]


def build(
    index,
    path: str,
    form: str = "decoded",
    short_side: int = SHORT_SIDE,
    threads: int | None = None,
    source=None,
) -> PackStore:
    """The pack at the folder `path`, made from the files where it is not there or holds something else.

    form: "decoded" scales images whose short side is longer down to short_side pixels; "encoded" keeps the
    files' bytes. source: a Tiers of this form to take samples from, else the files. One that was interrupted
    goes on where it stopped, and what is not whole is never read. Of several processes one builds and the
    others wait. Raises BadInput where there is no room, with the sizes.
    """
    if form not in FORMS:
        raise BadInput(f"form {form!r} is none of {', '.join(FORMS)}")
    wanted = {"version": _VERSION, "fingerprint": index.fingerprint, "form": form, "count": len(index)}
    wanted["short_side"] = short_side if form == "decoded" else 0
    parent = os.path.dirname(os.path.abspath(path))
    try:
        os.makedirs(parent, exist_ok=True)
        with files.locked(f"{path}.lock"):
            if described(path) != wanted | {"whole": True}:
                _fill(index, path, wanted, threads or _THREADS_PER_CORE * cores.available(), source)
    except OSError as error:
        raise BadInput(f"cannot write the pack {path}: {error.strerror or error}") from error
    return PackStore(path, index)


def place(folder: str, index, form: str = "decoded", short_side: int = SHORT_SIDE) -> str:
    """Where the pack of a data set lies in a folder of packs: other data or forms never take its place."""
    kind = "-encoded" if form == "encoded" else "" if short_side == SHORT_SIDE else f"-{form}{short_side}"
    return os.path.join(folder, f"{index.split}-{index.fingerprint[:12]}{kind}.pack")


def size_of(index, form: str, short_side: int) -> int:
    """Bytes of a pack, about."""
    if form == "encoded":
        return int(index.bytes.sum(dtype=np.int64))
    return int(forms.sizes(index, slice(None), form, short_side)[2].sum())


def _fill(index, path: str, wanted: dict, threads: int, source) -> None:
    if described(path) != wanted | {"whole": False}:
        shutil.rmtree(path, ignore_errors=True)
        os.makedirs(path)
        _write_meta(path, wanted | {"whole": False})
    count = -(-len(index) // TOGETHER)
    missing = [part for part in range(count) if not os.path.exists(_part(path, part))]
    size = size_of(index, wanted["form"], wanted["short_side"]) * len(missing) / max(1, count)
    free = shutil.disk_usage(path).free
    if size > free:
        raise BadInput(
            f"a pack of {len(index)} images needs {size / 1e9:.2f} GB at {path}, {free / 1e9:.2f} GB are free"
        )
    bar = tqdm(
        total=len(index), initial=min(len(index), (count - len(missing)) * TOGETHER), unit="image",
        desc=f"packing {index.split}", mininterval=10 * (not os.isatty(2)) or 0.1,
    )  # fmt: skip
    make = functools.partial(
        forms.make, origin(index, verified=True), form=wanted["form"], short_side=wanted["short_side"]
    )
    if source:
        make = source.sample
    with concurrent.futures.ThreadPoolExecutor(threads, "pack") as pool, bar:
        for part in missing:
            ids = range(part * TOGETHER, min((part + 1) * TOGETHER, len(index)))
            rows, fetched = [], [source.fetch(ids)] if source else []
            for height, width, content in pool.map(make, ids, *fetched):
                rows.append((height, width, zlib.crc32(content), bytes(content)))
                bar.update()
            _write(_part(path, part), rows)
    _write_meta(path, wanted | {"whole": True})


def _part(path: str, number: int) -> str:
    return os.path.join(path, f"{number:06}.arrow")


def _write(path: str, rows: list[tuple[int, int, int, bytes]]) -> None:
    arrow = _arrow()
    types = arrow.uint32(), arrow.uint32(), arrow.uint32(), arrow.large_binary()
    columns = [arrow.array(column, kind) for column, kind in zip(zip(*rows, strict=True), types, strict=True)]
    batch = arrow.record_batch(columns, names=["height", "width", "crc32", "content"])
    with _whole(path) as file, arrow.ipc.new_file(file, batch.schema) as writer:
        writer.write_batch(batch)


def _mapped(path: str) -> tuple[np.ndarray, ...]:
    """(heights, widths, checksums, offsets, contents) of one file, none of them copied."""
    arrow = _arrow()
    try:
        batch = arrow.ipc.open_file(arrow.memory_map(path)).get_batch(0)
    except (OSError, arrow.ArrowInvalid) as error:
        raise BadInput(f"{path} is no part of a pack: {error}") from error
    _, offsets, contents = batch.column("content").buffers()
    columns = (batch.column(name).to_numpy() for name in ("height", "width", "crc32"))
    return *columns, np.frombuffer(offsets, np.int64), np.frombuffer(contents, np.uint8)


def described(path: str) -> dict:
    """meta.json of a pack: version, fingerprint, form, count, short_side, whole; {} where there is none."""
    try:
        with open(os.path.join(path, META), encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return {}


def _write_meta(path: str, meta: dict) -> None:
    with _whole(os.path.join(path, META)) as file:
        file.write(json.dumps(meta).encode())


@contextlib.contextmanager
def _whole(path: str):
    """Open for writing a file that appears under its name when it is whole and on the disk."""
    partial = f"{path}.{socket.gethostname()}.{os.getpid()}.partial"
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def _arrow():
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError as error:
        raise BadInput("packs need Arrow: pip install pyarrow") from error
    return pyarrow

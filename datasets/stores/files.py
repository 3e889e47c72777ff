"""The image files themselves."""

import functools
import os
import zlib
from typing import Any

import numpy as np

from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained, read_again
from bootfile.loaders.reading import reading
from datasets.folders import tar_files
from datasets.stores.store import Store


class FileStore(Store):
    """The files of a folder, or of its tar files. A start compares only a part of a large data set with its
    index, so each read compares size and times, and if only a time differs, the CRC-32. verified: compare
    the CRC-32 in any case. This is needed for copies that are stored under the index's fingerprint."""

    def __init__(self, index: Any, verified: bool = False):
        self.index = index
        self.verified = verified

    def read(self, ids: np.ndarray) -> list[bytes | np.ndarray]:
        """Return the bytes of files, one after the other: engines call it in several threads or processes."""
        return [self.content(id) for id in np.asarray(ids).tolist()]

    def content(self, id: int) -> bytes:
        """Return the bytes of a file. Raises BadInput, also if the file was changed since it was scanned."""
        path = self.index.path(id)
        with reading(path), explained(f"cannot read {path}"):
            content, times = read_again(functools.partial(self._read, path, id), path)
        # the times of a tar file are not those of its members: only the size is compared
        is_same = True
        if times:
            mtime, ctime = times
            is_same = mtime == self.index.mtimes[id]
            if len(self.index.ctimes):
                is_same = is_same and ctime == self.index.ctimes[id]
        reason = ""
        size = self.index.bytes[id]
        if len(content) != size:
            reason = f"has {len(content)} bytes, but had {size} when it was scanned"
        elif (self.verified or not is_same) and not is_scanned(self.index, id, content):
            reason = "was changed since it was scanned"
        if reason:  # the next start scans again
            self.index.report_change()
            raise BadInput(f"{path} {reason}")
        return content

    def _read(self, path: str, id: int) -> tuple[bytes, tuple[int, int] | None]:
        """Return the bytes of a file, and its mtime and ctime (ns); None for a member of a tar file, whose
        times are those of the whole file. Raises OSError."""
        member = tar_files.split_path(path)
        if member:
            return tar_files.read_member(*member, int(self.index.bytes[id])), None
        with open(path, "rb", buffering=0) as file:
            content = file.read()
            status = os.fstat(file.fileno())
        return content, (status.st_mtime_ns, status.st_ctime_ns)


class PairFiles(FileStore):
    """The files of a paired_images.PairIndex, decoded to the number of rows that the index asks for."""

    def decode(self, id: int, content: bytes | np.ndarray, scratch: np.ndarray | None = None) -> np.ndarray:
        """Return the pixels of a sample. An engine calls it for each sample, in a thread or a worker."""
        image = super().decode(id, content, scratch)
        height = int(self.index.heights[id])
        width = int(self.index.widths[id])
        if image.shape[:2] == (height, width):
            return image
        from datasets.folders.resize import resized  # imports torch, which takes a second

        return resized(image, height, width)


def is_scanned(index: Any, id: int, content: bytes) -> bool:
    """Return whether the content is the one that was scanned for the index. Readers call it for each sample
    that is copied, or whose file has another time."""
    return zlib.crc32(content) == index.crc32[id]

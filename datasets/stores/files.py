"""The image files themselves."""

import zlib
from typing import Any

import numpy as np

from common.ground.exits import BadInput
from common.ground.files import explained
from datasets.folders import tar_files
from datasets.stores.reading import reading
from datasets.stores.store import Store


class FileStore(Store):
    """The files of a folder, or of its tar files. verified: refuse a file whose content differs from the
    scan. This is needed for copies that are stored under the fingerprint of the index."""

    def __init__(self, index: Any, verified: bool = False):
        self.index, self.verified = index, verified

    def read(self, ids: np.ndarray) -> list[bytes | np.ndarray]:
        return [self.content(id) for id in np.asarray(ids).tolist()]

    def content(self, id: int) -> bytes:
        """Return the bytes of a file. Raises BadInput, also if the file was changed since it was scanned."""
        path = self.index.path(id)
        with reading(path), explained(f"cannot read {path}"):
            if member := tar_files.split_path(path):
                content = tar_files.read_member(*member, int(self.index.bytes[id]))
            else:
                with open(path, "rb", buffering=0) as file:
                    content = file.read()
        if len(content) != self.index.bytes[id]:
            raise BadInput(
                f"{path} has {len(content)} bytes, but had {self.index.bytes[id]} when it was scanned"
            )
        if self.verified and not is_scanned(self.index, id, content):
            raise BadInput(f"{path} was changed since it was scanned")
        return content


class PairFiles(FileStore):
    """The files of a paired_images.PairIndex, decoded to the number of rows that the index asks for."""

    def decode(self, id: int, content: bytes | np.ndarray, scratch: np.ndarray | None = None) -> np.ndarray:
        image = super().decode(id, content, scratch)
        height, width = int(self.index.heights[id]), int(self.index.widths[id])
        if image.shape[:2] == (height, width):
            return image
        from datasets.folders.resize import resized  # imports torch, which takes a second

        return resized(image, height, width)


def is_scanned(index: Any, id: int, content: bytes) -> bool:
    """Return whether the content is the one that was scanned for the index."""
    return zlib.crc32(content) == index.crc32[id]

"""The files themselves."""

import zlib

import numpy as np

from common.exits import BadInput
from common.files import is_url
from datasets.folders import images


class FileStore:
    """Encoded images as they lie in the folders. index: an image_folder.Index. verified: refuse contents that
    are not those of the index: for what is kept under its fingerprint, and read by others."""

    form = "encoded"

    def __init__(self, index, verified: bool = False):
        self.index, self.verified = index, verified

    def read(self, id: int) -> bytes:
        """The file's bytes. Raises BadInput, also where they are not those that were scanned."""
        path = self.index.path(id)
        content = self._content(path)
        if len(content) != self.index.bytes[id]:
            raise BadInput(
                f"{path} has {len(content)} bytes, but had {self.index.bytes[id]} when it was scanned"
            )
        if self.verified and zlib.crc32(content) != self.index.crc32[id]:
            raise BadInput(f"{path} was changed since it was scanned")
        return content

    def encoded(self, id: int) -> bytes:
        """What any decoder understands alike: the file, or a PNG where the file is unusual."""
        content = self.read(id)
        return content if self.index.plain[id] else images.normalised(content)

    def image(self, id: int, scratch: np.ndarray | None = None) -> np.ndarray:
        try:
            return images.decode(self.read(id), bool(self.index.plain[id]), scratch)
        except images.BadImage as error:
            raise BadInput(f"cannot decode {self.index.path(id)}: {error}") from error

    def close(self) -> None:
        pass

    def _content(self, path: str) -> bytes:
        try:
            with open(path, "rb", buffering=0) as file:
                return file.read()
        except OSError as error:
            raise BadInput(f"cannot read {path}: {error.strerror}") from error


class PairFiles(FileStore):
    """The images of a paired_images.PairIndex, with the number of rows that the index asks for."""

    def image(self, id: int, scratch: np.ndarray | None = None) -> np.ndarray:
        image = super().image(id, scratch)
        height, width = int(self.index.heights[id]), int(self.index.widths[id])
        if image.shape[:2] == (height, width):
            return image
        from datasets.folders.cut import resized  # brings torch, and a second

        return resized(image, height, width)


def origin(index, verified: bool = False) -> FileStore:
    """What an index was made of: files, or what is below a URL."""
    if is_url(getattr(index, "root", None)):
        from datasets.stores.object_store import ObjectFiles

        return ObjectFiles(index)
    return FileStore(index, verified)

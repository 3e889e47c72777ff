"""The files themselves."""

import numpy as np

from common.exits import BadInput
from datasets import images


class FileStore:
    """Encoded images as they lie in the folders. index: an image_folder.Index."""

    form = "encoded"

    def __init__(self, index):
        self.index = index

    def read(self, id: int) -> bytes:
        """The file's bytes. Raises BadInput, also where its size is not that of the index."""
        path = self.index.path(id)
        try:
            with open(path, "rb", buffering=0) as file:
                content = file.read()
        except OSError as error:
            raise BadInput(f"cannot read {path}: {error.strerror}") from error
        if len(content) != self.index.bytes[id]:
            raise BadInput(
                f"{path} has {len(content)} bytes, but had {self.index.bytes[id]} when it was scanned"
            )
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

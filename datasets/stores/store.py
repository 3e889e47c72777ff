"""The interface of a store of samples, which the engines use."""

from typing import Any

import numpy as np

from datasets.folders import images
from datasets.stores import forms

Box = tuple[int, int, int, int]  # top, left, height, width of the part that a crop needs; pixels


class Store:
    """The samples of a data set, by id. Threads may share it; it can be pickled and survives a fork.

    index: an ImageFolderIndex. form: of the samples that read() returns, see forms.py. is_remote: reading
    waits for a network, so engines request a whole batch in advance.
    """

    index: Any
    form = "encoded"
    is_remote = False

    def read(self, ids: np.ndarray) -> list[bytes | np.ndarray]:
        """Return the samples: bytes of a file or a JPEG, or read-only pixels uint8 [height, width, 3].

        Pixels may be fewer than in the index. ids: int64 [n]. Raises BadInput if a sample cannot be read.
        """
        raise NotImplementedError

    def decode(self, id: int, content: bytes | np.ndarray, scratch: np.ndarray | None = None) -> np.ndarray:
        """Return the pixels of a sample, uint8 [height, width, 3]. content: as returned by read().

        scratch: uint8 memory, which the result may use. An engine calls it for each sample, in a thread or a
        worker process. Raises BadInput if the content cannot be decoded.
        """
        if isinstance(content, np.ndarray):
            return content
        try:
            return images.decode(content, self._is_plain(id), scratch)
        except images.BadImage as error:
            raise forms.cannot_decode(self.index, id, error) from error

    def decode_box(
        self,
        id: int,
        content: bytes | np.ndarray,
        planned: int,
        box: Box,
        scratch: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return the pixels of the box of a sample, uint8 [height, width, 3], perhaps a view of the scratch
        memory. If the image is smaller than the one for which the box was planned, so is the box.

        planned: rows of that image. content, scratch: as for decode(). An engine calls it for each sample, in
        a thread or a worker process. Raises BadInput if the content cannot be decoded.
        """
        image = self.decode(id, content, scratch)
        top, left, height, width = fitted(box, planned, *image.shape[:2])
        return image[top : top + height, left : left + width]

    def portable(self, id: int, content: bytes) -> bytes:
        """Return encoded bytes for another decoder (Pillow, DALI), as a plain PNG if the image is not plain.
        Raises BadInput if it cannot be decoded."""
        if self._is_plain(id):
            return content
        try:
            return images.normalised(content)
        except images.BadImage as error:
            raise forms.cannot_decode(self.index, id, error) from error

    def image(self, id: int) -> np.ndarray:
        """Read and decode one sample. Tools and explanations of errors call it, engines do not."""
        return self.decode(id, self.read(np.array([id]))[0])

    def close(self) -> None:
        """Release the resources of the store."""

    def _is_plain(self, id: int) -> bool:
        """Return whether each decoder makes the same pixels of the stored bytes."""
        return self.form in forms.JPEGS or bool(self.index.plain[id])


def fitted(box: Box, planned: int, rows: int, columns: int) -> Box:
    """Return the box in an image of `rows` rows and `columns` columns: packs and caches keep smaller images.
    planned: rows of the image for which the box was planned. decode_box() calls it for each sample."""
    return box if rows == planned else scaled(*box, rows / planned, rows, columns)


def scaled(top: int, left: int, height: int, width: int, scale: float, rows: int, columns: int) -> Box:
    """Return the box in the scaled image, which has `rows` rows and `columns` columns.

    Engines call it for a sample that is stored smaller than planned."""
    top = min(round(top * scale), rows - 1)
    left = min(round(left * scale), columns - 1)
    height = max(round(height * scale), 1)
    width = max(round(width * scale), 1)
    return top, left, min(height, rows - top), min(width, columns - left)

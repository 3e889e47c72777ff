"""Make and read the packs in a folder of this node."""

import contextlib
import os
from collections.abc import Callable, Iterator

import numpy as np

from bootfile.ground.errors import BadInput
from datasets.folders.image_index import ImageFolderIndex
from datasets.stores import forms, pack
from launch.cache.check import DAMAGED, MISSING, Read


class Packs:
    """A folder of packs, for one run of `launch cache`. log: called with one line to print.

    form: of the samples if none is named. forms: those that it can hold.
    """

    form = "decoded"
    forms = forms.FORMS

    def __init__(self, folder: str, log: Callable[[str], object]):
        self.folder = os.path.abspath(folder)
        self._log = log

    def close(self) -> None:
        """Do nothing: the verbs close a place at their end, and only a server has a connection."""

    def preload(self, index: ImageFolderIndex, form: str, workers: int) -> int:
        """Make the pack if it is missing, and return the number of samples. Raises BadInput, also if there is
        not enough space."""
        pack.build(index, pack.place(self.folder, index, form), form, threads=workers).close()
        return len(index)

    @contextlib.contextmanager
    def reader(self, index: ImageFolderIndex, form: str) -> Iterator[Read]:
        """Yield read(ids) -> list of bytes (encoded), uint8 [height, width, 3], MISSING or DAMAGED."""
        path = pack.place(self.folder, index, form)
        is_whole = pack.is_whole(index, path, form)
        store = pack.PackStore(path, index, form)
        if not is_whole:
            self._log(f"{index.split}: no whole pack at {path}; `preload` makes its missing parts")

        def read_one(id: int) -> bytes | np.ndarray | str:
            if not is_whole:
                return MISSING
            try:
                return store.stored(id)[0].value(form)
            except (BadInput, LookupError, ValueError):
                return DAMAGED

        def read(ids: np.ndarray) -> list:
            """Return the samples: the threads of check() call it."""
            return [read_one(id) for id in ids.tolist()]

        yield read

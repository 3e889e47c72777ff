"""Notice that tensors have changed. torch's version counter misses some writes: those through `.data`, and of
kernels that get a raw pointer. So a mark also has a few elements of each tensor.
"""

from collections.abc import Sequence
from typing import Any

import torch

from bootfile.exact.tensor_mark import view


class Marks:
    """The marks of some tensors. A change is missed if it changes neither the elements that are read (none on
    a GPU) nor the version counter. read() takes about 1 microsecond a tensor."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._tensors = tensors
        self._pointers: list[int] = []
        self._views: list[list[torch.Tensor]] = []  # elements in the memory of the tensors, by their type
        self._others: list[torch.Tensor] = []  # tensors whose elements have to be copied first

    def read(self) -> tuple[Any, ...]:
        """Return the present mark: two are equal if no change was noticed between them."""
        pointers = [tensor.data_ptr() for tensor in self._tensors]
        # `p.data = other` gives a tensor other memory
        if pointers != self._pointers:
            self._pointers = pointers
            self._find_views()
        versions = [tensor._version for tensor in self._tensors]
        # copies: an array of NumPy in the memory of a tensor would forbid to resize that
        elements = [torch.cat(views).numpy().tobytes() for views in self._views]
        elements += [view(tensor).clone().numpy().tobytes() for tensor in self._others]
        return versions, pointers, elements

    def _find_views(self) -> None:
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        self._others = []
        for tensor in self._tensors:
            if tensor.device.type != "cpu":
                continue
            part = view(tensor)
            if part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                by_type.setdefault(part.dtype, []).append(part)
            else:
                self._others.append(tensor)
        self._views = list(by_type.values())

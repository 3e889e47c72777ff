"""The inputs and the targets of a batch of any data set."""

from typing import Any

import numpy as np

from bootfile.ground.errors import BadInput

TARGETS = ("label", "labels", "target", "targets", "y")  # the first of these keys in a dictionary is used


class Index:
    """The index of a Plan for any Dataset. All labels are 0, because they are known only after reading.
    further: name -> digest of what else identifies the data."""

    def __init__(
        self,
        size: int,
        fingerprint: str = "",
        class_names: tuple[str, ...] = (),
        further: dict[str, str] | None = None,
    ):
        self.labels = np.broadcast_to(np.int64(0), size)
        self.fingerprint = fingerprint
        self.class_names = class_names
        self.further = further or {}

    def __len__(self) -> int:
        return len(self.labels)


def pair_of(batch: Any) -> tuple[Any, Any]:
    """Return (inputs, targets) of a collated batch. Raises BadInput."""
    pair = split(batch)
    if pair is not None:
        return pair
    kind = type(batch).__name__
    if isinstance(batch, dict):
        kind = f"a dictionary of {', '.join(map(str, batch))}"
    elif hasattr(batch, "__len__"):
        kind = f"{kind} of {len(batch)}"
    raise BadInput(
        f"a batch of this dataset is {kind}: let an item be (input, target), or a dictionary with one of "
        f"{', '.join(TARGETS)}, or give the loader a collate_fn that returns (inputs, targets)"
    )


def split(value: Any) -> tuple[Any, Any] | None:
    """Return (inputs, targets) of an item or a batch; None if it has no separate target."""
    if isinstance(value, dict):
        for key in TARGETS:
            if key in value:
                inputs = {name: part for name, part in value.items() if name != key}
                return inputs, value[key]
    elif isinstance(value, list | tuple) and len(value) == 2:
        return value[0], value[1]
    return None

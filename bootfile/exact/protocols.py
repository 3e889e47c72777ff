"""What the loop needs of others: of its loader, the loader's receipt, and the program around it. These are
types: no run loads this file, except with a loader that inherits from TrainingLoader."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch


class StepReceipt(Protocol):
    """The record of the samples that each step was given.

    step: the last step that it covers. fingerprint: a text that changes if a sample of the training data
    does; "" if it is not known. shared: sums of all ranks of steps that it does not cover yet, or None.
    expects_same: whether samples that are read again have to be the same. leaves_out: whether the batches
    that are handed out now belong to a step that a fork leaves out.
    """

    step: int
    expects_same: bool
    leaves_out: bool
    fingerprint: str
    shared: list[torch.Tensor] | None

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def find_last_step(self, folder: str) -> int:
        """Return the last step that an earlier start has written to the file in a folder; 0 if none has."""

    def finish(self, folder: str) -> str:
        """Complete the file in a folder. Return why it is not whole, or ""."""


class TrainingLoader(Protocol):
    """What the loop needs of a loader: its batches are a function of (seed, step). len: steps of an epoch. A
    Loader of this package has it (bootfile/loaders/loader.py).

    step: the number of the step whose batch was handed out last, from 1; 0 before the first. is_whole: all
    parts of its batch were handed out.
    """

    step: int
    is_whole: bool

    # read only, so that a class may have an attribute, a property or a narrower type
    @property
    def receipt(self) -> StepReceipt:
        """The record of the samples that its steps were given."""

    @property
    def total_steps(self) -> int | None:
        """The steps of the whole training; None if it has no limit."""

    @property
    def sampling(self) -> dict[str, Any]:
        """The values that determine the samples of each step, name -> plain value."""

    @property
    def collate_fn(self) -> Any:
        """The function of the user that makes batches, or None: its generators are looked for."""

    def __len__(self) -> int: ...

    def lead(self, step: int, part: int = 0) -> None:
        """Begin the training after `step` steps: this loader seeds the process. part: steps between two
        evaluations within an epoch; 0: none."""

    def add_generator(self, value: Any) -> bool:
        """Seed a generator for each step. Return whether the value is a generator."""

    def find_unknown_generators(self, parts: dict[str, Any], saved: dict[str, Any]) -> list[str]:
        """Return the paths of generators that parts hold, and that are neither seeded nor saved."""

    def commit(self, step: int, folder: str) -> None:
        """Extend the receipt up to a step, on all ranks. Rank 0 writes it into the folder."""

    def share(self) -> None:
        """Send what the receipt has of this step to all ranks, if processes may be lost."""

    def example(self, count: int) -> Any:
        """Return the inputs of `count` samples as a step gets them."""


class LoopAttributes(Protocol):
    """What a loop changes in its data set (bootfile/loaders/loop_attributes.py)."""

    def state(self) -> dict[str, Any]: ...

    def restore(self, values: dict[str, Any]) -> None: ...

    def end_epoch(self) -> None: ...


class Extras(Protocol):
    """Plain values of the program around a loop, such as its best score, which a state has in addition."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values from a whole SavedState."""


class Watcher(Protocol):
    """One question to all ranks: a Plugin (plugins.py)."""

    def numbers(self) -> list[float] | torch.Tensor: ...

    def judge(self, maxima: list[float]) -> None: ...

"""The position of a training: its epochs, their steps, and the steps that remain."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

from bootfile.ground.errors import BadInput


class Positions:
    """The position of a training, which is a number of completed steps.

    A class that inherits it has the steps of an epoch as its length.

    epochs, max_steps: limits of the training.
    `epoch`: of the position, counted from 1.
    `total_steps`: of the training; None without epochs and max_steps.
    `part`: an epoch also stops after each global step that is a multiple of it; 0 (default): never.
    """

    def __init__(self, epochs: int | None = None, max_steps: int | None = None):
        limits = [None if epochs is None else epochs * len(self), max_steps]
        # Any: jobs with a limit need no check for None
        self.total_steps: int | Any = min((limit for limit in limits if limit is not None), default=None)
        self.part = 0
        self.seek(0)

    def __len__(self) -> int:
        """Return the number of steps of a whole epoch. It does not depend on the position."""
        raise NotImplementedError

    def seek(self, step: int) -> None:
        """Set the position: the next batch is that of global step `step`, counted from 0. Raises BadInput if
        it is not in 0..total_steps."""
        if step < 0 or (self.total_steps is not None and step > self.total_steps):
            raise BadInput(f"step {step} is not in 0..{self.total_steps}, the steps of the training")
        self.epoch = step // len(self) + 1
        self._first = step % len(self)
        # to the end of the epoch, over the ends of its parts: only epochs_from() stops at these
        self._last = self._ends(self.epoch)[-1]

    @property
    def step(self) -> int:
        """Return the global step of the next batch, from 0."""
        return (self.epoch - 1) * len(self) + self._first

    @property
    def remaining(self) -> int:
        """Return the number of batches that iterating yields: to the end of the epoch, of its part, or of the
        training."""
        return self._last - self._first

    def _ends(self, epoch: int) -> list[int]:
        """Return the steps of an epoch, counted from its begin, after which its parts end."""
        begin = (epoch - 1) * len(self)
        last = len(self) if self.total_steps is None else min(len(self), self.total_steps - begin)
        part = self.part or len(self)
        return [*range(part - begin % part, last, part), last]

    def epochs_from(self, step: int) -> Iterator[int]:
        """Yield the numbers of the remaining epochs, from 1, each with the position set to its next batch. An
        epoch that has parts comes once for each of them.

        step: the number of completed steps. If it ends an epoch or a part, that comes first, without batches,
        because its evaluation may be missing. Without total_steps the epochs never end. Raises BadInput as
        seek() does.
        """
        self.seek(step)
        last_epoch = -(-self.total_steps // len(self)) if self.total_steps is not None else math.inf
        for epoch in itertools.count(max(1, -(-step // len(self)))):
            if epoch > last_epoch:
                return
            first = max(0, step - (epoch - 1) * len(self))
            for end in self._ends(epoch):
                if end < first:  # a part that was completed before `step`
                    continue
                # the caller iterates the loader from here to `end` before it takes the next epoch
                self.epoch = epoch
                self._first = first
                self._last = end
                yield epoch
                first = end

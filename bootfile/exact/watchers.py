"""What all ranks agree on once a step: each watcher sends numbers, and learns the largest of all ranks.

The numbers of all watchers travel in one all_reduce with MAX, together with whether the loss and the
gradients are finite (nonfinite.py). So a step has one collective, however many questions there are.
"""

from typing import Protocol

import torch


class Watcher(Protocol):
    """One question to all ranks."""

    def numbers(self) -> list[float] | torch.Tensor:
        """Return the numbers of this rank: float32 [n]. Called on every rank after each backward().

        n is the same on every rank and in every step. The host must not wait for the device here.
        """

    def judge(self, maxima: list[float]) -> None:
        """Learn the largest of each number over all ranks. Called once a step, on every rank.

        If the device decides about a step, this is one step later. maxima: n numbers; if a step had several
        losses, the largest of all of them. It may raise BadInput.
        """

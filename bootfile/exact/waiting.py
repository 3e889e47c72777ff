"""Say where a rank begins and ends to wait for the others: what measures a step (pace.py) takes it out."""

import contextlib
from collections.abc import Iterator
from typing import Protocol

OWN = 0  # a part of a step: this rank computes
WAITING = 1  # it waits for others


class Clock(Protocol):
    """What measures the parts of a step."""

    def cut(self, part: int) -> None:
        """End a part, which began at the last cut."""


current: Clock | None = None  # of the training in this process


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """Wait for other ranks in this block. A module that calls a collective in its forward or backward pass
    uses it on each rank: else the seconds would count as computing."""
    clock = current
    if clock is None:
        yield
        return
    # what came before the block was computing; what the block takes is a wait
    clock.cut(OWN)
    try:
        yield
    finally:
        clock.cut(WAITING)

"""Where a run is: which of its counters may differ, and when.

In one step, from left to right; each name is the number of the last step that has come so far:

    loader.step >= ended >= receipt.step       the batch is handed out; end_step() has counted the step; the
                                               receipt holds its samples
    ended >= saved >= submitted >= durable     the state was taken; it is being written; it is on the disk

    between two steps    loader.step == ended                    only here a state can be saved
    in a step            loader.step == ended + 1
    after a report       receipt.step == ended                   a save commits it first, too
    save() is missing    asked == ended > saved                  end_step() has said that one is due
    a write has failed   submitted == durable < saved            the next planned save tries again
    a fused optimizer    the verdict on the step `ended` is not known to the host before the next one ends; a
                         save waits for it (Guard.settle)
    accumulation         `waits`: no state of this step can be saved, so a save that is due is late

`save_is_late`, `is_stopping` and `waits` are the same on all ranks after each end_step(). Unless
the model is in parts, `submitted` and `durable` of other ranks than rank 0 stay 0 (saver.py): only rank 0
writes.
"""

import dataclasses
from typing import Any

import torch


@dataclasses.dataclass
class Position:
    """The counters of a run, and what its next end_step() has to do."""

    first: int = 0  # the first step of this start
    ended: int = 0  # steps that end_step() has counted
    asked: int = 0  # the step after which a save is due that the loop has not done; 0: none
    saved: int = 0  # the step of the last save; at first that before the first step
    is_stopping: bool = False  # any rank was asked to stop
    stops_planned: bool = False  # the run ends after its next save as planned, not because of a signal
    waits: bool = False  # gradients wait for an optimizer step
    leaves_out: bool = False  # the present step is left out: accepts() returns False
    save_is_late: bool = False  # a save by time is due, or a save waits for an optimizer step
    rate: Any = None  # the learning rate of the first parameter group in the last step
    running: torch.Tensor | None = None  # sums since the last report, the same on all ranks

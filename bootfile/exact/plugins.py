"""What joins a run: a Plugin asks all ranks in each step, or does something when a step or the run ends.

    class Norm(Plugin):
        def begin(self, parts, step):
            self.parts = parts

        def ended(self, step, due):
            if due.report:
                self.parts.say(f"norm of the first weight: {next(self.parts.model.parameters()).norm():.4f}")

    Exact(..., plugins=[*usual(), Norm()])

Exact counts the steps, votes, saves and restores, and names no plugin. usual() (usual.py) has those of a run
that says nothing else; plugins=[] leaves them out, and such a run continues exactly all the same.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch

from bootfile.exact.due import Due, ReportTimes, SaveTimes
from bootfile.exact.events import Events
from bootfile.exact.machines import Machines
from bootfile.exact.nonfinite import Guard
from bootfile.exact.optimizer_steps import OptimizerSteps
from bootfile.exact.position import Position
from bootfile.exact.protocols import TrainingLoader
from bootfile.exact.saver import Saver
from bootfile.exact.state import RunState
from bootfile.ground.folder_lock import FolderLock


@dataclasses.dataclass
class Parts:
    """What a plugin may read of its run. Each part is the same object from begin() to close().

    forward: the module that the loop calls. criterion: of a job; None in a loop that gives none.
    state: what a checkpoint holds. position: the counters. machines: what the bits depend on.
    guard, steps: the vote and the optimizers' steps; from begin() on.
    saves, reports: when they are due. lock: of the folder of a loop of one's own; a job has its own.
    say, say_once: print a line on rank 0; the first line of a subject.
    writes: whether results are written. may_change: processes may leave and come.
    settle: wait for the verdict on the last step, and count it. Call it on every rank.
    close: end all plugins of the run, because its process leaves it.
    at_loss: called when this rank has lost another one, before the process ends. before_save: called on every
    rank with the step whose state is taken next; what raises prevents the save. after_evaluation: the same
    with the step after which an evaluation has ended.
    """

    loader: TrainingLoader
    model: torch.nn.Module
    forward: Any
    criterion: Any
    state: RunState
    saver: Saver
    machines: Machines
    position: Position
    saves: SaveTimes
    reports: ReportTimes
    lock: FolderLock | None
    events: Events
    say: Callable[[str], object]
    say_once: Callable[..., object]
    writes: bool
    may_change: bool
    settle: Callable[[], object]
    close: Callable[[BaseException | None], object]
    evaluate_every: int = 0
    at_loss: list[Callable[[], object]] = dataclasses.field(default_factory=list)
    before_save: list[Callable[[int], object]] = dataclasses.field(default_factory=list)
    after_evaluation: list[Callable[[int], object]] = dataclasses.field(default_factory=list)
    guard: Guard = dataclasses.field(init=False)
    steps: OptimizerSteps = dataclasses.field(init=False)

    @property
    def shards(self) -> Any:
        """The exact shards in which the model computes; None without them."""
        return getattr(self.forward, "exact_shards", None)

    @property
    def most_steps(self) -> int:
        """The steps of the whole run, or a number that no run reaches."""
        return self.loader.total_steps or sys.maxsize

    def keep_machines(self, history: list[dict[str, Any]]) -> None:
        """Write these machines, which have computed the run, into each checkpoint and each digest."""
        self.machines.history = history
        self.state.machines = history
        self.saver.machines = history

    def ends_part(self, step: int) -> bool:
        """Return whether an evaluation may follow a step: the epoch ends, or one is due within it."""
        is_inside = self.evaluate_every > 0 and step % self.evaluate_every == 0
        return is_inside or step % len(self.loader) == 0

    def undo_step(self, finished: int) -> None:
        """Undo what the present step has changed, because it cannot end. finished: the last step that has."""
        if self.shards is None:
            return
        # the batch of the next step was handed out: its shards have added to gradients and sums
        if self.loader.step != finished:
            self.shards.undo()
        self.shards.detach()


class Plugin:
    """One thing that joins a run. All methods are called on every rank, in the thread of the loop."""

    def begin(self, parts: Parts, step: int) -> None:
        """Begin, when the weights are loaded. step: the steps before the first."""

    def numbers(self) -> list[float] | torch.Tensor:
        """Return the question of this rank, after each backward(): float32 [n], n the same on every rank and
        in every step. One all_reduce sends those of all plugins. The host must not wait for the device."""
        return []

    def judge(self, maxima: list[float]) -> None:
        """Learn the largest of each number over all ranks, once a step; if the device decides about a step,
        one step later. maxima: n numbers; of several losses in a step the largest. It may raise BadInput."""

    def ended(self, step: int, due: Due) -> None:
        """Note the end of a step. due: what the loop does next."""

    def saved(self, step: int) -> None:
        """Note that the state after a step was taken; it is written in the background."""

    def close(self, error: BaseException | None) -> None:
        """End: the run is over, or ends with an error."""


class Agreement(Plugin):
    """A question that is answered with yes as soon as any rank says yes.

    asks: returns the answer of this rank. agreed: called on every rank when a step was answered with yes.
    """

    def __init__(self, asks: Callable[[], bool], agreed: Callable[[], object]):
        self._asks = asks
        self._agreed = agreed

    def numbers(self) -> list[float]:
        return [float(self._asks())]

    def judge(self, maxima: list[float]) -> None:
        if maxima[0] > 0:
            self._agreed()


def having(plugins: Iterable[Plugin], method: str) -> list[Plugin]:
    """Return the plugins that define a method: a step asks no other one."""
    return [plugin for plugin in plugins if getattr(type(plugin), method) is not getattr(Plugin, method)]

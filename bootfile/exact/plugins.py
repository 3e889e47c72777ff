"""What a run consists of (Parts), and what joins it: a Plugin asks all ranks in each step, or does something
when a step or the run ends.

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
from typing import TYPE_CHECKING, Any

import torch

from bootfile.exact.due import Due, ReportTimes, SaveTimes
from bootfile.exact.nonfinite import Guard
from bootfile.exact.optimizer_steps import OptimizerSteps
from bootfile.exact.saver import Saver
from bootfile.exact.state import RunState
from bootfile.ground.errors import BadInput, print_line
from bootfile.processes import ranks, signals

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # a build of torch may have no torch.distributed

    from bootfile.exact.machines import Machines
    from bootfile.exact.protocols import TrainingLoader
    from bootfile.ground.folder_lock import FolderLock


class Events:
    """What a program around an Exact adds to a run: where it continues from, and what it says when it stops.
    Exact calls these methods. A job has a subclass (common/checkpoint/checkpointer.py)."""

    def choose_checkpoint(self) -> str:
        """Return what the run continues from: "auto" for its own newest checkpoint, "never", or a path.
        Called on rank 0; the other ranks wait in wait_for_first(). Raises BadInput."""
        return "auto"

    def wait_for_first(self, error: BadInput | None) -> None:
        """Wait, on every rank, until rank 0 has read the checkpoint. error: that of rank 0, which every rank
        raises before it changes its objects."""
        ranks.raise_on_all(error)

    def repeat_report(self) -> None:
        """Report what the last step of an elastic job had still to report. Called on every rank, before the
        first step of the processes that continue."""

    def leaving(self) -> None:
        """Release what the process holds: it exits at once. Called on every rank, after stopping()."""

    def stopping(self, step: int, saved: int) -> None:
        """Say that the run stops after a step, because it was asked to. Called on every rank, when the
        newest checkpoint, that of the step `saved`, is on the disk."""
        if ranks.is_first():
            print_line(stopped_line(step, saved))


def stopped_line(step: int, saved: int) -> str:
    """Return the line of a run that stops after a step. saved: the step of its newest checkpoint."""
    return f"stopped as asked after step {step}; the newest checkpoint is that of step {saved}"


@dataclasses.dataclass
class Position:
    """Where a run is: its counters, and what its next end_step() has to do.

        loader.step >= ended >= receipt.step       the batch is handed out; end_step() has counted the step;
                                                   the receipt holds its samples
        ended >= saved >= submitted >= durable     the state was taken; it is being written; it is on the disk
                                                   (the last two: of the Saver, 0 on other ranks than rank 0)

    A state can be saved only between two steps (loader.step == ended). `save_is_late`, `is_stopping` and
    `waits` are the same on all ranks after each end_step(). With a fused optimizer the host learns the
    verdict on the step `ended` when the next one ends; a save waits for it (Guard.settle).
    """

    first: int = 0  # the first step of this start
    ended: int = 0  # steps that end_step() has counted
    asked: int = 0  # the step after which a save is due that the loop has not done; 0: none
    saved: int = 0  # the step of the last save; at first that before the first step
    is_stopping: bool = False  # any rank was asked to stop
    stops_planned: bool = False  # the run ends after its next save as planned, not because of a signal
    waits: bool = False  # gradients wait for an optimizer step: no state of this step can be saved
    leaves_out: bool = False  # the present step is left out: accepts() returns False
    save_is_late: bool = False  # a save by time is due, or a save waits for an optimizer step
    rate: Any = None  # the learning rate of the first parameter group in the last step
    running: torch.Tensor | None = None  # sums since the last report, the same on all ranks


@dataclasses.dataclass
class Parts:
    """What a plugin may read of its run. Each part is the same object from begin() to close().

    forward: the module that the loop calls. criterion: of a job; None in a loop that gives none.
    state: what a checkpoint holds. position: the counters. machines: what the bits depend on.
    guard, steps: the vote and the optimizers' steps; from begin() on.
    saves, reports: when they are due. lock: of the folder of a loop of one's own; None in a job, which holds
    its output itself.
    say, say_once: print a line on rank 0; the first line of a subject.
    writes: whether results are written. may_change: processes may leave and come.
    save: Exact.save(). settle: wait for the verdict on the last step, and count it; on every rank.
    close: end all plugins of the run, because its process leaves it.
    at_loss: called when this rank has lost another one, before the process ends. before_save: called on every
    rank with the step whose state is taken next; what raises prevents the save. after_evaluation: the same
    with the step after which an evaluation has ended.
    """

    loader: "TrainingLoader"
    model: torch.nn.Module
    forward: Any
    criterion: Any
    state: RunState
    saver: Saver
    machines: "Machines"
    saves: SaveTimes
    reports: ReportTimes
    lock: "FolderLock | None"
    events: Events
    say: Callable[[str], object]
    say_once: Callable[..., object]
    writes: bool
    may_change: bool
    save: Callable[[], object]
    settle: Callable[[], object]
    close: Callable[[BaseException | None], object]
    evaluate_every: int = 0
    position: Position = dataclasses.field(default_factory=Position)
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

    @property
    def has_left_epoch(self) -> bool:
        """Whether a loop of one's own has run its code after the last epoch, to its end."""
        return self.lock is not None and getattr(self.loader, "has_left_epoch", False)

    @property
    def is_between_epochs(self) -> bool:
        """Whether a loop of one's own runs its code after the batches of an epoch, or has left the loop
        there. That of a job only evaluates: a restart may do it again."""
        is_over = not getattr(self.loader, "is_in_epoch", True)  # a loader of one's own may not know it
        has_begun = self.position.ended >= self.position.first
        return self.lock is not None and has_begun and is_over and not self.has_left_epoch

    def keep_machines(self, history: list[dict[str, Any]]) -> None:
        """Write these machines, which have computed the run, into each checkpoint and each digest."""
        self.machines.history = self.state.machines = self.saver.machines = history

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
    """Agrees in each step on a stop, a late save and a late report: yes as soon as any rank asks for it. Only
    the clock of rank 0 counts."""

    def begin(self, parts: Parts, step: int) -> None:
        self._parts = parts

    def numbers(self) -> list[float]:
        parts = self._parts
        is_stopping = signals.asked() or bool(parts.saver.hopeless)
        is_late = [parts.saves.is_late(), parts.reports.ask()] if ranks.is_first() else [False, False]
        return [*map(float, (is_stopping, *is_late))]

    def judge(self, maxima: list[float]) -> None:
        stops, saves, reports = (maximum > 0 for maximum in maxima)
        self._parts.position.is_stopping |= stops
        self._parts.position.save_is_late |= saves
        self._parts.reports.is_late |= reports


class Processes(Plugin):
    """The processes of a run, which stay the same until it ends. A loop of your own needs none.

    An elastic job has a subclass, whose processes leave and come between two steps
    (common/elastic/memory.py). The loop calls the methods on every rank.

    `may_change`: whether processes may leave and come.
    `has_restored`: whether restore() has restored a state.
    `is_changing`: whether all ranks have agreed that others come or leave after this step.
    `due`: what the last step had still to do when this process joined.
    """

    may_change = False
    has_restored = False
    is_changing = False
    due = Due(False, False)

    def restore(self, parts: Parts) -> int | None:
        """Restore the state of processes that are alive, and return its step. None: there are none, and the
        run continues from a checkpoint."""
        return None

    def announce(self, step: int) -> None:
        """Print which processes continue after `step` steps."""

    def check(self) -> None:
        """Stop a step that cannot end, because a process is lost. Called between the parts of a step."""

    def signal_store(self) -> "Store | None":
        """Return the store in which a process tells others that it was asked to stop; None without one."""
        return ranks.store()


def having(plugins: Iterable[Plugin], method: str) -> list[Plugin]:
    """Return the plugins that define a method: a step asks no other one."""
    return [plugin for plugin in plugins if getattr(type(plugin), method) is not getattr(Plugin, method)]

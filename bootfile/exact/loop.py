"""Save and continue a training loop exactly; skip steps that are not finite; stop on a signal.

    run = Exact("OUT", loader, model=model, optimizer=optimizer, scheduler=scheduler, save_every=100)
    for epoch in loader.epochs_from(run.resume()):
        for inputs, targets in loader:
            ...                              # loss.backward()
            if run.accepts(loss):               # finite on all ranks
                optimizer.step()
            scheduler.step()
            if run.end_step().save:
                run.save()                   # and exit, if the process was asked to stop
    run.close()

Checkpoints are in OUT/checkpoints (files.py), digests of the states in OUT/state.jsonl. Rank 0 reads and
writes. Before every optimizer step one all_reduce of a few numbers makes all ranks skip, report, save and
stop at the same step.
"""

import functools
import os
import sys
import time
import weakref
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch

from bootfile.exact import start
from bootfile.exact.due import ReportTimes, SaveTimes
from bootfile.exact.events import Events
from bootfile.exact.machines import Machines
from bootfile.exact.nonfinite import Diverged, Guard, Verdict
from bootfile.exact.optimizer_steps import OptimizerSteps
from bootfile.exact.processes import Due, Processes
from bootfile.exact.protocols import TrainingLoader
from bootfile.exact.saver import Saver, find_infinite, size_of
from bootfile.exact.state import RunState, SavedState
from bootfile.exact.watchers import Agreement, Watcher
from bootfile.ground import accelerator, errors
from bootfile.ground.errors import BadInput
from bootfile.ground.folder_lock import FolderLock
from bootfile.ground.intervals import Interval
from bootfile.ground.numbers import count_in
from bootfile.machine import convolution, instructions
from bootfile.processes import ranks, signals, waits

if TYPE_CHECKING:
    from bootfile.exact.loss_means import LabelMeanWatcher
    from bootfile.exact.pace import Pace
    from bootfile.exact.replicas import Replicas
    from bootfile.exact.survivor import Survivor
    from bootfile.processes.stuck import Watch

_EPOCH = Interval(1, "epoch")
_LAST_WRITE = 4.0  # seconds to wait for a write in flight when the job ends with an error


class NotSaved(BadInput):
    """Results could not be written."""

    code = errors.NOT_SAVED


class Exact:
    """Saves, continues and stops a training loop.

    folder: for the results.
    loader: the training loader, such as a Loader (see TrainingLoader); its receipt is saved too.
    model: the raw module.
    optimizer, scheduler: those of the model. scheduler: any schedule of torch, or None.
    forward: the module that the loop calls: the model (default), or a wrapper of it.
    criterion: the loss; its parameters and buffers are saved too, if it has any.
    save_every: a number of steps, or an Interval (default: each epoch). Also the last step is saved, and
        within long epochs some steps by time (due.py).
    report_every: when end_step() says that a report is due (default: never, only before each save).
    report_after: the only steps after which a report is due, in place of report_every.
    evaluate_every: the steps between two evaluations within an epoch, before which a report is due; 0: none.
    keep: the number of newest checkpoints to keep.
    keep_every: the distance of older checkpoints that stay, in steps or an Interval; a save is also due at
        each (ladder.py). 0: none. None: those of the checkpoint stay, new ones are not due.
    max_bad_steps: the run ends after as many steps in a row that are not finite.
    slow_rank: the share of the time from which on a line names the rank that costs it, with a report.
    grace: seconds from a signal to the end of the process.
    survivors: "first": rank 0 saves the last step when another rank is lost (survivor.py). "any": another
        one does if rank 0 is lost; it needs a folder that all nodes see, and rank 0 sends the buffers of the
        model to the others at the end of each step.
    stuck_after: seconds without the end of a step after which a line says where each rank is (stuck.py); 0:
        never. stuck_exit: end the run then.
    same_instructions: whether a restart on another instruction set is refused (default: only with exact
        shards; otherwise a line names it).
    threads: of an operator on the CPU in each process (default: those of the checkpoint; in a first start
        torch.set_num_threads(), OMP_NUM_THREADS, or the cores of the node divided by its processes).
    processes: those of the run (default: the same ones from its start to its end).
    events: what the program around the loop adds (default: nothing).
    say: prints a line; called on every rank (default: rank 0 prints it).
    writes: False for a run that saves nothing, and that a signal ends at once.
    by_rank: each rank writes its part of a sharded model.
    identity, settings, learned: see RunState.
    objects: further objects, as for add().
    Raises BadInput if the optimizer or the scheduler cannot be resumed exactly.
    """

    _newest: Any = None  # weak reference to the Exact of this process that has begun last

    def __init__(
        self,
        folder: str,
        loader: TrainingLoader,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        forward: torch.nn.Module | None = None,
        criterion: Any = None,
        save_every: int | Interval = _EPOCH,
        report_every: Interval | None = None,
        report_after: Collection[int | None] | None = None,
        evaluate_every: int = 0,
        keep: int = 3,
        keep_every: int | Interval | None = None,
        max_bad_steps: int = 20,
        slow_rank: float = 0.1,
        grace: float = 25.0,
        survivors: str = "first",
        stuck_after: float = 60.0,
        stuck_exit: bool = False,
        same_instructions: bool | None = None,
        threads: int | None = None,
        processes: Processes | None = None,
        events: Events | None = None,
        say: Callable[[str], object] | None = None,
        writes: bool = True,
        by_rank: bool = False,
        identity: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
        learned: dict[str, Any] | None = None,
        **objects: Any,
    ):
        if "://" in folder:
            raise BadInput(f"{folder} is a URL: Exact writes to a folder (jobs upload to URLs)")
        self.loader = loader
        self.model = model
        self.criterion = criterion
        # a compiled module has no truth value
        self.forward = model if forward is None else forward
        self.saves = SaveTimes(Interval(save_every) if isinstance(save_every, int) else save_every)
        self.reports = ReportTimes(report_every, report_after, evaluate_every)
        self.evaluate_every = evaluate_every
        self.grace = grace
        if survivors not in ("first", "any"):
            raise BadInput(f'survivors is "first" or "any", not {survivors!r}')
        self._survivors = survivors
        self._stuck_options = (stuck_after, stuck_exit)
        self.processes = processes or Processes()
        self.say = say or _say
        self.say_once = errors.Once(self.say)  # a line, or the first line of a subject
        self._max_bad_steps = max_bad_steps
        self._slow_rank = slow_rank
        self.events = events or Events()
        self.writes = writes
        # whether a change of the state between a save and the next batch is looked for (after_save.py)
        self.compares_saved = writes and events is None
        self.lock: FolderLock | None = None  # a job holds the folder of its output itself
        if self.compares_saved:
            folder = os.path.abspath(folder)  # the loop may change the working directory
            advice = "give each run a folder of its own"
            if ranks.world_size() == 1 and (count_in(os.environ, "WORLD_SIZE") or 1) > 1:
                said = " ".join(f"{name}={os.environ.get(name)}" for name in ("RANK", "WORLD_SIZE"))
                advice = (
                    f"{said}: a launcher started several processes that do not know each other: call "
                    "torch.distributed.init_process_group() before Exact(...)"
                )
            self.lock = FolderLock(folder, f"{folder} belongs to another run that is running: {advice}")

        # what a checkpoint holds; add() may add to it until resume()
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "receipt": loader.receipt}
        if isinstance(criterion, torch.nn.Module) and criterion.state_dict():
            state["criterion"] = criterion
        self.state = RunState(state, identity, settings, learned, loader.sampling)
        self.state.attributes = getattr(loader, "loop_attributes", None)
        if isinstance(keep_every, Interval):
            keep_every = keep_every.steps(len(loader))
        self._keep_every = keep_every or 0  # the same on all ranks; the saver of rank 0 may know another
        self.saver = Saver(folder, keep, self.say, self.state.is_sharded, by_rank, keep_every)
        if same_instructions is None:
            same_instructions = self.has_shards
        self.machines = Machines(same_instructions, threads, self._device(), self.say)
        # before the first forward pass, and in each process: an operator is replaced from here on
        convolution.protect()
        if instructions.level_in_use():
            from bootfile.machine import vector_math  # only a run with a level needs it

            vector_math.protect()

        # from _watch() on
        self._guard: Guard
        self._progress: Watch | None = None  # whether the run moves (stuck.py)
        self._steps: OptimizerSteps | None = None
        self._replicas: Replicas | None = None  # if there are several ranks
        self.pace: Pace | None = None  # as well
        self.may_survive = True  # False: a rank keeps more than the state, which is lost with it
        self._survivor: Survivor | None = None  # if a rank can save without the others
        self._label_mean: LabelMeanWatcher | None = None  # if gradients are averaged
        self._first = 0  # the first step of this process
        self._asked = 0  # the step after which a save is due that the loop has not done; 0 without one
        self._ended = 0  # steps that end_step() has counted
        self._saved = 0  # the step of the last save, and at first that before the first step
        self.add(**objects)

        # what the next end_step() has to do; the same on every rank
        self.is_stopping = False  # any rank was asked to stop
        self._waits = False  # gradients wait for an optimizer step
        self._save_is_late = False  # a save by time is due, or a save waits for an optimizer step
        self.rate: Any = None  # the learning rate of the last step: that of the first parameter group
        # sums since the last report, the same on all ranks: a process that joins gets them
        self.running: torch.Tensor | None = None

    @property
    def total_steps(self) -> int | None:
        """Return the steps of the whole run; None if it has no limit."""
        return self.loader.total_steps

    @property
    def most_steps(self) -> int:
        """Return the steps of the whole run, or a number that no run reaches."""
        return self.total_steps or sys.maxsize

    @property
    def has_shards(self) -> bool:
        """Return whether the model computes in exact shards."""
        return hasattr(self.forward, "exact_shards")

    def add(self, **objects: Any) -> None:
        """Save further objects with a state_dict(), for example a gradient scaler, or seed your own generator
        of random numbers for each step. Call it before resume(). Raises BadInput."""
        if self._steps:
            raise BadInput(f"add({', '.join(objects)}) comes after resume(): call it before")
        for name, value in objects.items():
            if self.loader.add_generator(value):
                self.state.generators.append(name)
                continue
            if not hasattr(value, "state_dict") or not hasattr(value, "load_state_dict"):
                raise BadInput(
                    f"add({name}=...) needs an object with state_dict() and load_state_dict(), and got "
                    f"{type(value).__name__}: give each object of a list or a dictionary a name of its own"
                )
            self.state.objects[name] = value

    def resume(self) -> int:
        """Load the newest checkpoint on every rank, and return its step; 0 without one.

        Call it on every rank, before the first step. From then on a signal stops the loop at its next step.
        Raises BadInput if there are checkpoints and none can be used.
        """
        step = self.restore()
        self.begin(step)
        self.announce(step)
        return step

    def restore(self) -> int:
        """Restore the state to continue from, on every rank, and return its step: the first part of resume().

        Rank 0 reads the checkpoint; the others wait for it.
        """
        # of an elastic job: the state of processes that are alive is newer than any checkpoint
        living = self.processes.restore(self)
        if living is not None:
            return living
        start.compare_data(self)
        step = start.restore(self)
        self.keep_machines(self.machines.history)
        return step

    def begin(self, step: int, is_saved_here: bool = True) -> None:
        """Watch the loop from its first step on: the second part of resume(). Call it on every rank.

        step: the steps before it. is_saved_here: whether the checkpoint of this step is in the run's folder.
        """
        if self.writes and ranks.is_first():
            self.saver.resume_at(step if is_saved_here else 0, self.processes.may_change)
        waits.before_next.clear()  # an exception may have ended another run, as in a notebook
        # the weights are loaded by now: what watches the step may look at them and run backward passes
        self._watch(step)
        if self.saver.keep_every and self.writes and ranks.is_first():
            from bootfile.exact import ladder  # most runs keep only the newest ones

            size = size_of(self.state.capture(0))
            self.say(ladder.describe(self.saver, self.total_steps, size, self.state.objects.values()))
        # from here on this loader seeds the process at each batch; that of an evaluation does not
        self.loader.lead(step, self.evaluate_every)
        if self.state.attributes:
            self.state.attributes.end_epoch()  # what the program has set before the training is its own
        self._first = step + 1
        self.reports.first = self._first
        self._ended = step
        self._saved = step
        # the time of the set-up does not count: a save by time is measured from the first step on
        self.saves.begin()
        if not self.processes.has_restored:  # otherwise these processes have warned before
            start.warn_of_generators(self)
            start.warn_of_schedule(self)
            if ranks.is_first():  # an object may have a state there only
                start.warn_of_empty_states(self)
        Exact._newest = weakref.ref(self)
        if self.writes:
            # otherwise a signal ends the process at once
            signals.watch(self.grace, self.processes.signal_store())
            if ranks.world_size() == 1 and not self.processes.may_change:
                # several processes would have to agree on a step
                waits.serve_when_stopped(
                    self._save_while_waiting, self._save_before_end, only_evaluates=self.lock is None
                )
        self.processes.begin(self, step)
        from bootfile.processes import stuck  # it is loaded before a run hangs

        self._progress = stuck.start(
            self.saver.folder, step, *self._stuck_options, tells_ends=not self.processes.may_change
        )
        self._progress.model = self.model
        if self._survivor and self._survivor.may_save:
            self._progress.at_loss = self._survivor.save

    def announce(self, step: int) -> None:
        """Say which processes continue, and do what their last step had still to do, because rank 0 may have
        been lost before: the last part of resume(). Call it on every rank."""
        self.processes.announce(self, step)
        if self.processes.due.report:
            self.events.repeat_report()
        if self.processes.due.save:
            self.save()

    def accepts(self, loss: torch.Tensor) -> bool:
        """Return whether to take the optimizer step: whether the loss and the gradients are finite on every
        rank. Call it after each backward(), on every rank; a step may have several losses.

        If not, the step is counted, and BatchNorm's statistics are restored. If all optimizers are
        fused, the answer is always True: the device skips the step, and the host learns of it one step later.
        loss: scalar. Costs a pass over the gradients and, if an optimizer is not fused, one synchronisation
        with the device (nonfinite.py).
        """
        if self._replicas:
            # raises BadInput if DistributedDataParallel still waits for gradients: the ranks would hang below
            self._replicas.check_backward()
        return self._vote(loss)

    @property
    def found_inf(self) -> torch.Tensor | None:
        """Return, after accepts(), a float [] on the device: 1 if the device skips the step, else 0. None if
        an optimizer is not fused: then the answer of accepts() is final."""
        return self._guard.found_inf

    def end_step(self) -> Due:
        """End a step, on every rank, and return what is due. Call it once for each batch of the loader.

        After a step that was skipped nothing is saved: the run may be diverging, and good checkpoints stay.
        If gradients are accumulated over several batches, a save waits for the optimizer step. Raises
        Diverged, and BadInput if the loop and the loader count other steps.
        """
        steps = self._get_steps()
        # raises at once if a step was not ended exactly once: the receipt would be one of other steps
        step = self._count()
        # a loop that never asks accepts(): all ranks still have to agree on a signal, a save and a report
        if not self._guard.has_voted:
            self._vote(None)
        if self._replicas:
            self._replicas.end_step()
        # if the device decides about steps, this is the verdict on the step before
        self._apply(self._guard.end_step())
        if self.processes.may_change:
            self._apply(self._guard.settle())  # nothing about this step may be known later
        if self._replicas and self._guard.has_more:  # the first step, or a layer that was frozen until now
            self._replicas.note(step)
        self._guard.has_more = False
        # only after the first step: by then the loop has frozen what it freezes
        if warning := self.state.take_change_of_frozen():
            self.say(warning)
        for note in self.state.take_notes():  # about groups that the loop has added after the restart
            self.say(note)
        has_gradients = steps.end_batch()  # that no optimizer step has taken
        self._waits = has_gradients and not self.state.bad_in_a_row
        if self._survivor:  # a collective below may fail
            self._survivor.end_step(step, not self._waits and not self.state.bad_in_a_row)
        due = self._find_due(step)
        # of an elastic job: it raises here if processes come or leave, and the step has ended on every rank
        self.processes.end_step(self, step, due)
        # one more collective, so only in steps that report or save; the others go without
        if self._replicas and (due.report or due.save or self.is_stopping):
            self._replicas.compare_steps(step, self._waits)
        if self.pace:
            self.pace.end_step(self.loader, due.report)
        # an evaluation or a save may follow: the threads that look for a stuck run then wait longer
        ends_part = step % len(self.loader) == 0
        if self.evaluate_every and step % self.evaluate_every == 0:
            ends_part = True
        if self._survivor:
            self._survivor.record(step, ends_part)
        if self._progress:
            self._progress.note(step, is_longer=due.save or ends_part)
        if due.save:
            self._asked = step
        return due

    def save(self) -> None:
        """Save, and exit if the process was asked to stop. Call it on every rank after a step, if end_step()
        says that it is due."""
        self._asked = 0
        step = self.loader.step
        is_last = step == self.total_steps
        # the next end_step() whose gradients were taken by an optimizer asks for this save again
        if self._waits and not is_last:
            return
        if self._waits:
            self.say(
                f"warning: step {step} is the last one, and its gradients wait for an optimizer step: a "
                "longer run will not continue exactly from its checkpoint"
            )
        if self._is_between_epochs() and not is_last:
            raise BadInput(
                f"save() after the batches of an epoch (step {step}): the code there would run again after a "
                "restart; call save() in the loop over the batches, after end_step()"
            )
        # the host waits for the device here: a checkpoint must not hold a step whose verdict is not known
        self._apply(self._guard.settle())
        # the run may diverge: a state that is written now would push a good checkpoint out
        if self.state.bad_in_a_row and not self.is_stopping:
            return
        if self._replicas and (self.is_stopping or is_last):  # no step follows
            self._replicas.compare_now(step)
        # the votes of the next step carry the digests: a save needs no collective of its own
        elif self._replicas:
            self._replicas.note(step)
        if self.loader.receipt.step != step:  # the loop has not done it with a report
            self.loader.commit(step, self.saver.folder)
        # rank 0 copies the state to host memory here, and a thread writes it; the others do not wait
        if ranks.is_first() or self.state.is_sharded:
            if self.is_stopping:
                self.saver.collect(wait=True)  # a write that failed is tried again

            def capture() -> SavedState:
                state = self.state.capture(step)
                if self._has_left_epoch():
                    state["epoch_ended"] = True
                return state

            self.saver.save_checkpoint(step, self.state.run, capture, self._is_planned(step))
        # also if the write fails later: the saver reports it then, and the next planned save tries again
        self._save_is_late = False
        self._saved = step
        self.saves.saved_at = time.monotonic()
        if self._progress:
            self._progress.touch()
        if self.is_stopping:
            self._exit(step)
        self._watch_saved(step)

    def _watch_saved(self, step: int) -> None:
        """Look for changes of the state since its save when the loop asks for the next batch."""
        # that of a job has nothing after its save, but evaluations
        if self.compares_saved and ranks.is_first() and not self.state.is_sharded:
            waits.before_next[:] = [functools.partial(self._compare_saved, step, self._outline())]

    def _compare_saved(self, step: int, before: list[tuple[str, str]]) -> None:
        if self._outline() != before and self.compares_saved:
            from bootfile.exact import after_save  # most loops save at the end of a step

            after_save.warn(self, step, before)

    def _outline(self) -> list[tuple[str, str]]:
        try:
            return self.state.outline()
        except Exception:  # a state_dict() may work only around a save
            self.compares_saved = False
            return []

    def save_unplanned(self) -> None:
        """Save after this step as save() does, also if no save is due. Call it on every rank."""
        if not self._is_planned(self.loader.step):
            self._save_is_late = True
            self.save()

    def end_evaluation(self) -> bool:
        """Compare the ranks after an evaluation, and return whether one of them was asked to stop: then call
        stop(). Call it on every rank."""
        is_asked = signals.asked()
        if self._replicas:
            is_asked = self._replicas.compare_now(self.loader.step, is_asked)
        elif ranks.world_size() > 1:  # nothing is trained
            is_asked = ranks.maximum(float(is_asked), self._device()) > 0
        # an evaluation has no votes: this is the first moment since its start at which all ranks agree
        self.is_stopping = is_asked
        self.reports.reported_at = time.monotonic()
        return is_asked

    def stop(self, saves: bool = True) -> None:
        """Save, if no gradients wait for an optimizer step, and exit. Call it on every rank."""
        if saves:
            self.save()  # it exits, too
        self._exit(self.loader.step)

    def close(self) -> None:
        """Save the last step, and wait for the last write. A signal is not noticed any more. Raises
        NotSaved."""
        step = self.loader.step
        is_unsaved = self._saved != step and not self._waits
        reason = ""
        if self._ended != step:
            reason = f"the loop has called end_step() {self._ended} times"
        elif self._is_between_epochs() and step != self.total_steps:
            reason = "the code after its epoch may have changed the state"
        if is_unsaved and reason:
            self.say(f"step {step} is not saved: {reason}. A restart continues from step {self._saved}")
        elif is_unsaved:
            self._save_is_late = True
            self.save()
        # a process must not end while this thread reads the store: the wait for it is here
        signals.unfollow()
        self._end_watch()
        # rank 0 waits for its last write; the other ranks have none
        lost = self.saver.finish()
        if self.pace and self.pace.lost >= self._slow_rank:
            self.say(f"{self.pace.lost:.0%} of the time was lost to the slowest rank")
        if ranks.is_first():
            lost.append(self.loader.receipt.finish(self.saver.folder))
        # last: from here on another run may take the folder
        self._release()
        if any(lost):
            raise NotSaved("; ".join(filter(None, lost)))

    def give_up(self) -> None:
        """End the writes of a run that ends with an error: wait some seconds for those in flight."""
        self._end_watch()
        self.saver.wait(_LAST_WRITE)
        self.saver.stop()

    must_stop = staticmethod(signals.asked)  # whether this process, or another one of the job, must stop

    def keep_machines(self, history: list[dict[str, Any]]) -> None:
        """Write these machines, which have computed the run, into each checkpoint and each digest."""
        self.machines.history = history
        self.state.machines = history
        self.saver.machines = history

    def abandon_step(self, finished: int) -> None:
        """Undo what the present step has changed, because it cannot end. finished: the last step that has."""
        if self._label_mean:
            self._label_mean.end()
        if self.pace:
            self.pace.detach()
        shards = getattr(self.forward, "exact_shards", None)
        if shards is None:
            return
        # the batch of the next step was handed out: its shards have added to gradients and sums
        if self.loader.step != finished:
            shards.undo()
        shards.detach()

    # What a Survivor asks, when another rank is lost.

    def ended_unasked(self) -> bool:
        """Return whether only the vote of the present step is missing: the loop has not called accepts()."""
        return self._ended == self.loader.step and not self._guard.has_voted

    def end_batch(self) -> bool:
        """Return whether gradients wait for an optimizer step, once at the end of a step."""
        return self._get_steps().end_batch()

    def was_skipped(self) -> bool:
        """Return whether the last finished step was skipped, which may be known only now."""
        verdict = self._guard.settle()
        return self.state.bad_in_a_row > 0 or (verdict is not None and verdict.bad)

    def _is_between_epochs(self) -> bool:
        """Return whether a loop of one's own runs its code after the batches of an epoch, or has left the
        loop there. That of a job only evaluates: a restart may do it again."""
        # a loader of one's own may not know it
        is_over = not getattr(self.loader, "is_in_epoch", True)
        return self.lock is not None and self._ended >= self._first and is_over and not self._has_left_epoch()

    def _has_left_epoch(self) -> bool:
        """Return whether a loop of one's own has run its code after the last epoch, to its end."""
        return self.lock is not None and getattr(self.loader, "has_left_epoch", False)

    def _device(self) -> torch.device:
        return accelerator.device_of(self.model)

    def _end_watch(self) -> None:
        """End the thread that looks whether the run moves, and compare no save with what follows."""
        waits.before_next.clear()
        if self._progress:
            from bootfile.processes import stuck

            stuck.stop()

    def _release(self) -> None:
        """Release the folder of a loop of one's own, on the rank that holds it."""
        if self.lock:
            self.lock.release()

    def _watch(self, step: int) -> None:
        """Make what watches each step, after the weights were loaded. step: the steps before the first."""
        objects = self.state.objects
        several = ranks.world_size() > 1
        shards = getattr(self.forward, "exact_shards", None)
        # The numbers of all watchers travel in one tensor: each rank needs the same list in the same order.
        watchers: list[Watcher] = []
        if several:
            from bootfile.exact.pace import Pace
            from bootfile.exact.replicas import Replicas  # a job of one process has none

            self.pace = Pace(self.forward, self.state.is_sharded, self._slow_rank, self.say)
            self._replicas = Replicas(objects, self.forward, self.say_once)
            watchers += [self.pace, self._replicas]
        if shards:  # they have no buckets
            shards.watch(objects | {"criterion": self.criterion}, self.loader, self.processes)
        elif ranks.world_size() > 2 and isinstance(self.forward, torch.nn.parallel.DistributedDataParallel):
            from bootfile.exact.buckets import settle_buckets

            settle_buckets(self.forward, self.loader.example(2))  # otherwise a restart rounds differently
        if shards or several:
            from bootfile.exact.loss_means import LabelMeanWatcher  # one process divides as the loss does

            self._label_mean = LabelMeanWatcher(self.model, self.has_shards, self.say_once)
            self._label_mean.watch(self.forward)
            watchers.append(self._label_mean)
        watchers += [
            Agreement(self._is_asked_to_stop, self._stop_at_next_save),
            Agreement(self._is_save_late, self._note_late_save),
            Agreement(self._is_report_late, self.reports.note_late),
            Agreement(self._wants_change, self._note_change),
        ]
        if several and self.writes:
            from bootfile.exact import survivor  # a job of one process has no other ranks

            if survivor.can_survive(self):
                self._survivor = survivor.Survivor(self, self._survivors)
                late = Agreement(self._survivor.is_record_late, self._survivor.note_late_record)
                watchers.append(late)
        # torch calls it at each optimizer step of the process from here on
        self._steps = OptimizerSteps(objects, self.state.before_step, self.say_once)
        if self.pace:
            self.pace.watch(self._steps.optimizers)
        self._guard = Guard(self.model, *self._steps.optimizers, watchers=watchers)
        # a mask of an attention is infinite from the start: a save refuses only what became so in training
        self.saver.infinite = find_infinite(self.model.state_dict())

    # The questions to all ranks, and what their answers change (watchers.py).

    def _is_asked_to_stop(self) -> bool:
        return signals.asked() or bool(self.saver.hopeless)

    def _stop_at_next_save(self) -> None:
        self.is_stopping = True

    def _is_save_late(self) -> bool:
        return ranks.is_first() and self.saves.is_late()

    def _note_late_save(self) -> None:
        self._save_is_late = True

    def _is_report_late(self) -> bool:
        return ranks.is_first() and self.reports.ask()

    def _wants_change(self) -> bool:
        return self.processes.wants_change(self)

    def _note_change(self) -> None:
        self.processes.is_changing = True

    def _get_steps(self) -> OptimizerSteps:
        """Return what counts the optimizer steps. Raises BadInput before resume(), and if another Exact has
        begun since: both would write checkpoints of a part of the program."""
        if self._steps is None:
            raise BadInput("call resume() before the first step")
        if Exact._newest() is not self:
            raise BadInput(
                "another Exact of this process has begun: a process has one run at a time. Give further "
                "models and optimizers to this one by their names: Exact(..., discriminator=D), or add()"
            )
        return self._steps

    def _count(self) -> int:
        """Return the number of steps, which end_step() and the loader count."""
        if self._asked:
            self.say_once(
                f"warning: end_step() said that a save is due after step {self._asked}, and save() was not "
                "called: call run.save() if end_step().save"
            )
            self._asked = 0
        self._ended += 1
        if self._ended != self.loader.step:
            raise BadInput(
                f"the loop has ended {self._ended} steps after {self.loader.step} batches: call end_step() "
                "once for each batch of the loader of Exact, also if gradients are accumulated over several"
            )
        return self._ended

    def _vote(self, loss: torch.Tensor | None) -> bool:
        steps = self._get_steps()
        # once a step: a write that has failed since is reported now, in the thread of the loop
        self.saver.collect()
        # groups that the loop has added since the restart get their state before a step uses them
        self.state.before_step()
        if steps.optimizers:
            rate = steps.optimizers[0].param_groups[0].get("lr")
            if isinstance(rate, torch.Tensor):
                rate = rate.clone()  # scheduler.step() changes it
            self.rate = rate
        # all ranks meet here: this is the collective of a step, besides that of the gradients
        takes_step = self._guard.vote(loss)
        if self.pace:
            self.pace.end_vote()
        return takes_step

    def _find_due(self, step: int) -> Due:
        """Return what is due after a step; the same on every rank."""
        reports = self.reports.is_due(step, len(self.loader))
        saves = self._is_planned(step)
        # the gradients of several batches are added up: a checkpoint would lose them
        if self._waits and step != self.total_steps:
            self._save_is_late = saves
            saves = False
        # the receipt and the metrics then end with the step of the checkpoint
        elif self.is_stopping or saves:
            reports = True
            saves = True
        if reports:
            self.reports.end()
        return Due(reports, saves)

    def _is_planned(self, step: int) -> bool:
        """Return whether save_every asks for a save after this step, or one is late."""
        if not self.writes:
            return False
        is_last = step == self.total_steps
        is_kept = self._keep_every > 0 and step % self._keep_every == 0
        return self._save_is_late or is_last or is_kept or self.saves.every.ends_at(step, len(self.loader))

    def _apply(self, verdict: Verdict | None) -> None:
        """Count a step by the verdict of all ranks on it. Raises Diverged."""
        if verdict is None:
            return
        state = self.state
        if not verdict.bad:
            state.bad_in_a_row = 0
            return
        state.bad_steps += 1
        state.bad_in_a_row += 1
        self.say(
            f"skipped a step: loss {verdict.loss:g}, gradient norm {verdict.norm:g} on rank 0; "
            f"{state.bad_in_a_row} in a row, {state.bad_steps} in all"
        )
        if state.bad_in_a_row >= self._max_bad_steps:
            self.saver.collect(wait=True)
            durable = ranks.broadcast_object(self.saver.durable)  # all ranks end after rank 0 has saved
            kept = f"the checkpoint of step {durable} is kept" if durable else "there is no checkpoint"
            raise Diverged(
                f"{state.bad_in_a_row} steps in a row without a finite loss and gradient "
                f"(max_bad_steps): {kept}; a restart meets them again: lower the rate, or check the data"
            )

    def _save_while_waiting(self) -> None:
        """Save and exit. Called in the loop's thread while it waits for data that may never come, after the
        process was asked to stop (bootfile/processes/waits.py)."""
        if not self.loader.is_whole or self._ended != self.loader.step:  # the loop has a part of a step
            return
        self.is_stopping = True
        began = self._first - 1
        # no step of this start has ended: the checkpoint that it began with is the newest state
        if self.loader.step == began:
            self._exit(began)
        self.save()  # it returns if gradients wait for an optimizer step

    def _save_before_end(self) -> None:
        """Save the last step, because the data of the next one cannot be read: an error ends the loop. Called
        in the thread of the loop, in a job of one process: several would have to agree on a step."""
        step = self.loader.step
        if not self.loader.is_whole or self._ended != step or self._saved == step:
            return
        self.save()  # it returns if gradients wait for an optimizer step
        self.saver.collect(wait=True)
        if self.saver.durable == step:
            self.say(f"saved at step {step}: the data of the next one cannot be read")

    def _exit(self, step: int) -> None:
        """Exit after rank 0 has saved: when one process exits, its parent ends the others."""
        for rank, number in enumerate(ranks.gather_objects(signals.received())):
            if number:  # for the log and the exit code; the store may not have it yet
                signals.hear(rank, number)
        if ranks.is_first():
            self.saver.collect(wait=True)
        # every rank has to leave with the same code, and only rank 0 knows about the writes
        if hopeless := ranks.broadcast_object(self.saver.hopeless):
            raise NotSaved(hopeless)
        self.events.stopping(step, self.saver.durable)
        # a launcher ends the other ranks as soon as one has ended: none may leave before all have come so far
        if ranks.world_size() > 1:
            torch.distributed.barrier()
        self._end_watch()
        self.events.leaving()
        self._release()
        from bootfile.processes import forked_signals  # most runs do not end here

        forked_signals.end_daemons()
        errors.leave(signals.exit_code())


def _say(line: str) -> None:
    """Print a line on rank 0."""
    if ranks.is_first():
        errors.print_line(line)

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

import sys
import time
from typing import Any

import torch

from bootfile.exact.choose import choose
from bootfile.exact.machines import Machines
from bootfile.exact.nonfinite import Diverged, Guard, Verdict
from bootfile.exact.optimizer_steps import OptimizerSteps
from bootfile.exact.processes import Due, Processes
from bootfile.exact.protocols import TrainingLoader
from bootfile.exact.saver import Saver, find_infinite
from bootfile.exact.state import RunState, SavedState
from bootfile.ground import errors
from bootfile.ground.errors import BadInput
from bootfile.ground.intervals import Interval
from bootfile.machine import convolution, instructions
from bootfile.processes import ranks, signals, waits

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
    save_every: a number of steps, or an Interval (default: each epoch). Also the last step is saved.
    report_every: when end_step() says that a report is due (default: never, only before each save).
    keep: the number of newest checkpoints to keep.
    max_bad_steps: the run ends after as many steps in a row that are not finite.
    grace: seconds from a signal to the end of the process.
    same_instructions: whether a restart on another instruction set is refused (default: only with exact
        shards; otherwise a line names it).
    threads: of an operator on the CPU in each process (default: those of the checkpoint; in a first start
        torch.set_num_threads(), OMP_NUM_THREADS, or the cores of the node divided by its processes).
    processes: those of the run (default: the same ones from its start to its end).
    identity, settings, learned: see RunState.
    objects: further objects, as for add().
    Raises BadInput if the optimizer or the scheduler cannot be resumed exactly.
    """

    evaluate_every = 0  # steps between evaluations within an epoch

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
        keep: int = 3,
        max_bad_steps: int = 20,
        grace: float = 25.0,
        same_instructions: bool | None = None,
        threads: int | None = None,
        processes: Processes | None = None,
        by_rank: bool = False,
        identity: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
        learned: dict[str, Any] | None = None,
        **objects: Any,
    ):
        self.loader, self.model, self.criterion = loader, model, criterion
        self.forward = forward or model
        self.save_every = Interval(save_every) if isinstance(save_every, int) else save_every
        self.report_every, self.max_bad_steps, self.grace = report_every, max_bad_steps, grace
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "receipt": loader.receipt}
        if isinstance(criterion, torch.nn.Module) and criterion.state_dict():
            state["criterion"] = criterion
        self.state = RunState(state, identity, settings, learned, loader.sampling)
        self._steps: Any = None  # OptimizerSteps, from resume() on
        self.add(**objects)
        self._replicas: Any = None  # a Replicas, if there are several ranks
        self.saver = Saver(folder, keep, self.say, self.state.is_sharded, by_rank)
        if same_instructions is None:
            same_instructions = hasattr(self.forward, "exact_shards")
        device = next(model.parameters(), torch.empty(0)).device
        self._machines = Machines(same_instructions, threads, device, self.say)
        convolution.protect()
        if instructions.level_in_use():
            from bootfile.machine import vector_math  # only a run with a level needs it

            vector_math.protect()
        self.say_once = errors.Once(self.say)  # a line, or the first line of a subject
        self.is_stopping = self._waits = (
            False  # any rank was asked to stop; gradients wait for an optimizer step
        )
        self._label_mean: Any = None  # a LabelMean, if gradients are averaged
        self._digests: torch.Tensor | None = None  # Replicas.note(), sent with the next step
        self._late = False  # a save by time is due, or a save waits for an optimizer step
        self._report_late = self._has_asked = False  # a report by time is due on all ranks; was asked for
        self.saved_at = self.reported_at = time.monotonic()
        self.rate: Any = None  # the learning rate of the last step: that of the first parameter group
        self.processes = processes or Processes()

    @property
    def total_steps(self) -> int | None:
        """Return the steps of the whole run; None if it has no limit."""
        return self.loader.total_steps

    @property
    def most_steps(self) -> int:
        """Return the steps of the whole run, or a number that no run reaches."""
        return self.total_steps or sys.maxsize

    def add(self, **objects: Any) -> None:
        """Save further objects with a state_dict(), for example a gradient scaler, or seed your own generator
        of random numbers for each step. Call it before resume(). Raises BadInput."""
        if self._steps:
            raise BadInput(f"add({', '.join(objects)}) comes after resume(): call it before")
        for name, value in objects.items():
            if not self.loader.add_generator(value):
                self.state.objects[name] = value

    def resume(self) -> int:
        """Load the newest checkpoint on every rank, and return its step; 0 without one.

        Call it on every rank, before the first step. From then on a signal stops the loop at its next step.
        Raises BadInput if there are checkpoints and none can be used.
        """
        step = self._restore()
        if ranks.is_first():
            self.saver.resume_at(step, self.processes.may_change)
        self._begin(step)
        self.processes.announce(self, step)
        if self.processes.due.save:
            self.save()
        return step

    def accepts(self, loss: torch.Tensor) -> bool:
        """Return whether to take the optimizer step: whether the loss and the gradients are finite on every
        rank. Call it after each backward(), on every rank; a step may have several losses.

        If not, the step is counted, and BatchNorm's statistics are restored. If all optimizers are
        fused, the answer is always True: the device skips the step, and the host learns of it one step later.
        loss: scalar. Costs a pass over the gradients and, if an optimizer is not fused, one synchronisation
        with the device (nonfinite.py).
        """
        if self._replicas:
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
        step = self._count()
        if not self._guard.has_voted:
            self._vote(None)
        self._digests = None
        self._note(self._guard.end_step())
        if self.processes.may_change:
            self._note(self._guard.settle())  # nothing about this step may be known later
        if self._replicas and self._guard.has_more:  # the first step, or a layer that was frozen until now
            self._digests = self._replicas.note(step)
        self._guard.has_more = False
        if warning := self.state.take_change_of_frozen():
            self.say(warning)
        self._waits = self._steps.end_batch() and not self.state.bad_in_a_row
        reports, saves = self._is_report_due(step), self._is_planned(step)
        compares = saves or reports or self.is_stopping
        if self._waits and step != self.total_steps:
            self._late, saves = saves, False
        elif self.is_stopping or saves:
            reports = saves = True
        if reports:
            self._report_late, self._has_asked, self.reported_at = False, False, time.monotonic()
        due = Due(reports, saves)
        self.processes.end_step(self, step, due)
        if self._replicas and compares:
            self._replicas.compare_steps(step, self._waits)
        return due

    def save(self) -> None:
        """Save, and exit if the process was asked to stop. Call it on every rank after a step, if end_step()
        says that it is due."""
        step = self.loader.step
        if self._waits and step != self.total_steps:
            return
        if self._waits:
            self.say(
                f"warning: step {step} is the last one, and its gradients wait for an optimizer step: a "
                "longer run will not continue exactly from its checkpoint"
            )
        self._note(self._guard.settle())
        if self.state.bad_in_a_row and not self.is_stopping:
            return
        if self._replicas and (self.is_stopping or step == self.total_steps):  # no step follows
            self._replicas.compare(ranks.maxima(self._replicas.note(step)))
        elif self._replicas:
            self._digests = self._replicas.note(step)
        self._commit(step)
        if ranks.is_first() or self.state.is_sharded:
            if self.is_stopping:
                self.saver.collect(wait=True)  # a write that failed is tried again
            self.saver.save_checkpoint(
                step, self.state.run, lambda: self.state.capture(step), self._is_planned(step)
            )
        self._late, self._saved = False, step
        self.saved_at = time.monotonic()
        if self.is_stopping:
            self._exit(step)

    def close(self) -> None:
        """Save the last step, and wait for the last write. A signal is not noticed any more. Raises
        NotSaved."""
        if self._saved != self.loader.step and not self._waits:
            self._late = True
            self.save()
        signals.unfollow()
        lost = self.saver.finish()
        if ranks.is_first():
            lost.append(self.loader.receipt.finish(self.saver.folder))
        if any(lost):
            raise NotSaved("; ".join(filter(None, lost)))

    must_stop = staticmethod(signals.asked)  # whether this process, or another one of the job, must stop

    def say(self, line: str) -> None:
        """Print a line on rank 0."""
        if ranks.is_first():
            errors.print_line(line)

    def _restore(self) -> int:
        """Restore the checkpoint to continue from, on every rank, and return its step."""
        living = self.processes.restore(self)
        if living is not None:
            return living
        state = error = None
        if ranks.is_first():
            try:
                state = self._choose()
            except BadInput as refused:
                error = refused
        self._wait_for_first(error)
        state = self.state.broadcast(state)
        if state and (self.state.is_sharded or not ranks.is_first()):
            self.state.restore(state)
        step = state["step"] if state else 0
        self._settle_machine(step, state.get("machines", []) if state else [])
        return step

    def _settle_machine(self, step: int, saved: list[dict[str, Any]]) -> None:
        """Compute as the run did before, after the checkpoint of `step` was read. Call it on every rank."""
        self._machines.settle(step, saved, hasattr(self.forward, "exact_shards"))
        self.keep_machines(self._machines.history)

    def keep_machines(self, history: list[dict[str, Any]]) -> None:
        """Write these machines, which have computed the run, into each checkpoint and each digest."""
        self._machines.history = history
        self.state.machines = history
        self.saver.machines = history

    def abandon_step(self, finished: int) -> None:
        """Undo what the present step has changed, because it cannot end. finished: the last step that has."""
        if self._label_mean:
            self._label_mean.stop(torch.device("cpu"))
        shards = getattr(self.forward, "exact_shards", None)
        if shards is None:
            return
        if self.loader.step != finished:
            shards.undo()
        shards.detach()

    def _choose(self) -> SavedState | None:
        """Return the state to continue from on rank 0, or None. Raises BadInput."""
        self.state.check_saveable()
        return self._load("auto")[1]

    def _load(self, wanted: str) -> tuple[str, SavedState | None]:
        """Return (path, state) as choose() does. The state is loaded, unless it is sharded."""

        def load(state: SavedState) -> None:
            self._machines.compare_starts(state)
            self.state.load(state, self.most_steps)

        whole = not self.state.is_sharded  # otherwise each rank reads its part
        path, state = choose(wanted, self.saver.checkpoints, load, whole)
        if state:
            if wanted == "auto":
                self.state.run = state["run"]
            end = f" of {self.total_steps}" if self.total_steps else ""
            epoch = max(1, -(-state["step"] // len(self.loader)))
            self.say(f"resumed from {path}: epoch {epoch}, step {state['step']}{end}")
            if change := self.state.schedule.change:
                self.say(f"the schedule of the checkpoint is another one: {change}")
        return path, state

    def _wait_for_first(self, error: BadInput | None) -> None:
        """Wait on every rank until rank 0 has read the checkpoint. Raises its error on every rank."""
        if text := ranks.broadcast_object(error and str(error)):
            raise error or BadInput(text)

    def _begin(self, step: int, writes: bool = True) -> None:
        """Watch the loop from its first step on. step: the steps before it."""
        objects = self.state.objects
        several = ranks.world_size() > 1
        if several:
            from bootfile.exact.replicas import Replicas  # a job of one process has none

            self._replicas = Replicas(objects, self.forward, self.say_once)
        if shards := getattr(self.forward, "exact_shards", None):  # they have no buckets
            shards.watch(objects | {"criterion": self.criterion}, self.loader, self.processes)
        elif ranks.world_size() > 2 and isinstance(self.forward, torch.nn.parallel.DistributedDataParallel):
            from bootfile.exact.buckets import settle_buckets

            settle_buckets(self.forward, self.loader.example(2))  # otherwise a restart rounds differently
        if shards or several:
            from bootfile.exact.loss_means import LabelMean  # one process divides by what the loss does

            mean = self._label_mean = LabelMean()
            self.forward.register_forward_hook(lambda *given: mean.watch(given[-1]))
        self._steps = OptimizerSteps(objects, self.state.before_step, self.say_once)
        self._guard = Guard(self.model, *self._steps.optimizers)  # after the weights were loaded
        self.loader.lead(step, self.evaluate_every)
        self.saver.infinite = find_infinite(self.model.state_dict())
        self._first, self._ended, self._saved = step + 1, step, step
        if not self.processes.has_restored:  # otherwise these processes have warned before
            self._warn_of_generators()
        if writes:
            # otherwise a signal ends the process at once
            signals.watch(self.grace, self.processes.signal_store())
            if not several and not self.processes.may_change:  # several would have to agree on a step
                waits.serve_when_stopped(lambda: self._save_waiting(step))
        self.processes.begin(self, step)

    def _count(self) -> int:
        """Return the number of steps, which end_step() and the loader count."""
        self._ended += 1
        if self._ended != self.loader.step:
            raise BadInput(
                f"the loop has ended {self._ended} steps after {self.loader.step} batches: call end_step() "
                "once for each batch of the training loader, also if gradients are accumulated over several"
            )
        return self._ended

    def _vote(self, loss: torch.Tensor | None) -> bool:
        self.saver.collect()
        self.state.before_step()
        for optimizer in self._steps.optimizers[:1]:
            rate = optimizer.param_groups[0].get("lr")  # scheduler.step() changes it
            self.rate = rate.clone() if isinstance(rate, torch.Tensor) else rate
        if self._label_mean:
            device = next(self.model.parameters(), torch.empty(0)).device
            parts = [self._label_mean.stop(device)]
            if self._replicas:
                parts += [self._replicas.nothing() if self._digests is None else self._digests]
            self._guard.digests = torch.cat(parts)
        late = report = False
        if ranks.is_first():
            now = time.monotonic()
            late = self.save_every.has_passed(now - self.saved_at)
            if self.report_every and not self._has_asked:
                report = self._has_asked = self.report_every.has_passed(now - self.reported_at)
        asked = signals.asked() or bool(self.saver.hopeless)
        changed = self.processes.wants_change(self)
        return self._guard.vote(loss, asked, late, report, changed)

    def _is_report_due(self, step: int) -> bool:
        """Return whether a report is due; the same on every rank. If report_every counts seconds, one is also
        due after the first step. One is due after each epoch."""
        if self.report_every is None:
            return False
        by_time = self.report_every.unit == "s" and (self._report_late or step == self._first)
        return by_time or self.report_every.ends_at(step, len(self.loader)) or step % len(self.loader) == 0

    def _is_planned(self, step: int) -> bool:
        """Return whether save_every asks for a save after this step."""
        return self._late or step == self.total_steps or self.save_every.ends_at(step, len(self.loader))

    def _commit(self, step: int) -> None:
        """Extend the receipt before a save, if the loop has not done it with a report."""
        if self.loader.receipt.step != step:
            self.loader.commit(step, self.saver.folder)

    def _note(self, verdict: Verdict | None) -> None:
        """Apply the verdict of all ranks on a step."""
        if verdict is None:
            return
        if verdict.digests:
            is_other_mean, *digests = verdict.digests
            if self._replicas:
                self._replicas.compare(digests)
            if is_other_mean:
                self._refuse_mean()
        self.is_stopping, self._late = self.is_stopping or verdict.asked, self._late or verdict.late
        self._report_late |= verdict.report
        self.processes.is_changing |= verdict.changed
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
        if state.bad_in_a_row >= self.max_bad_steps:
            self.saver.collect(wait=True)
            durable = ranks.broadcast_object(self.saver.durable)  # all ranks end after rank 0 has saved
            kept = f"the checkpoint of step {durable} is kept" if durable else "there is no checkpoint"
            raise Diverged(
                f"{state.bad_in_a_row} steps in a row without a finite loss and gradient "
                f"(--max_bad_steps): {kept}; lower --lr, or check the data"
            )

    def _refuse_mean(self) -> None:
        """Raise BadInput, or print one warning without --exact_shards: a loss is not a mean over samples."""
        line = (
            "the loss is not a mean over samples (it divides by the weights of the labels, or labels are "
            "ignored): the gradients that "
        )
        if hasattr(self.forward, "exact_shards"):
            raise BadInput(
                f"--exact_shards: {line}are averaged over shards are not those of one batch. Expected a mean "
                "over samples, as (loss_of_each_sample * weight_of_its_label).mean()"
            )
        self.say_once(
            f"warning: {line}{ranks.world_size()} processes average are not those of one process. "
            "guides/own_step.md shows a step that divides by the sum over all processes",
            "mean",
        )

    def _warn_of_generators(self) -> None:
        """Print one warning that names generators which neither a checkpoint nor the loader knows."""
        parts = {"model": self.model, "criterion": self.criterion, "collate_fn": self.loader.collate_fn}
        if paths := self.loader.find_unknown_generators(parts, self.state.objects):
            self.say(
                f"warning: {', '.join(paths)}: random number generators of your own, whose numbers a restart "
                "does not repeat. Use torch's global one, or call checkpoint.add(name=generator) before "
                "resume(). One of a collate_fn repeats its numbers, but only at the same number of processes"
            )

    def _save_waiting(self, began: int) -> None:
        """Save and exit, while the loop waits for data. began: the step at which this process began."""
        if not self.loader.is_whole:  # a part of a step
            return
        self.is_stopping = True
        if self.loader.step == began:
            self._exit(began)
        self.save()  # it returns if gradients wait for an optimizer step

    def _end(self, error: BaseException | None) -> None:
        if error:
            self.saver.wait(_LAST_WRITE)
            self.saver.stop()
        else:
            self.close()

    def _exit(self, step: int) -> None:
        """Exit after rank 0 has saved: when one process exits, its parent ends the others."""
        for rank, number in enumerate(ranks.gather_objects(signals.received())):
            if number:  # for the log and the exit code; the store may not have it yet
                signals.hear(rank, number)
        if ranks.is_first():
            self.saver.collect(wait=True)
        if hopeless := ranks.broadcast_object(self.saver.hopeless):
            raise NotSaved(hopeless)
        self._say_where(step)
        if ranks.world_size() > 1:
            torch.distributed.barrier()
        self._leave()

    def _leave(self) -> None:
        errors.leave(signals.exit_code())

    def _say_where(self, step: int) -> None:
        self.say(
            f"stopped as asked after step {step}; the newest checkpoint is that of step {self.saver.durable}"
        )

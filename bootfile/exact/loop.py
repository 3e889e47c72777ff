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
stop at the same step. A step is read in this order: end_step() here, Guard (nonfinite.py), the plugins and
what the counters mean (plugins.py), save() here, Saver (saver.py). What comes before the first step is in
start.py, and what ends a run in ends.py. All else joins as a plugin.
"""

import dataclasses
import functools
import os
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from bootfile.exact.due import Due, Interval, ReportTimes, SaveTimes
from bootfile.exact.nonfinite import Diverged, Guard, Verdict
from bootfile.exact.optimizer_steps import OptimizerSteps
from bootfile.exact.plugins import Agreement, Events, Parts, Plugin, Processes, having
from bootfile.exact.saver import NotSaved, Saver
from bootfile.exact.state import RunState
from bootfile.ground import accelerator, errors
from bootfile.ground.errors import BadInput
from bootfile.processes import ranks, signals

if TYPE_CHECKING:
    from bootfile.exact.protocols import TrainingLoader

_EPOCH = Interval(1, "epoch")
_LAST_WRITE = 4.0  # seconds to wait for a write in flight when the job ends with an error
_last_runs: Any = weakref.WeakKeyDictionary()  # model -> (folder, position) of its last run in this process


@dataclasses.dataclass
class Job:
    """What a program around the loop sets, and a loop of one's own rarely.

    say: prints a line; called on every rank (default: rank 0 prints it).
    writes: False for a run that saves nothing, and that a signal ends at once.
    same_instructions: whether a restart on another instruction set is refused (default: only with exact
        shards; otherwise a line names it).
    events: where the run continues from, and what it says when it stops; None: the program is the loop.
    processes: those of the run (default: the same ones from its start to its end).
    report_after: the only steps after which a report is due, in place of report_every.
    evaluate_every: the steps between two evaluations within an epoch, before which a report is due; 0: none.
    by_rank: each rank writes its part of a sharded model.
    settings, learned: see RunState.
    """

    say: Callable[[str], object] | None = None
    writes: bool = True
    same_instructions: bool | None = None
    events: Events | None = None
    processes: Processes = dataclasses.field(default_factory=Processes)
    report_after: Collection[int | None] | None = None
    evaluate_every: int = 0
    by_rank: bool = False
    settings: dict[str, Any] | None = None
    learned: dict[str, Any] | None = None


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
    report_every: a number of steps, or an Interval, after which end_step() says that a report is due
        (default: never, only before each save).
    keep: the number of newest checkpoints to keep.
    keep_every: the distance of older checkpoints that stay, in steps or an Interval; a save is also due at
        each (ladder.py). 0: none. None: those of the checkpoint stay, new ones are not due.
    max_bad_steps: the run ends after as many steps in a row that are not finite.
    grace: seconds from a signal to the end of the process.
    threads: of an operator on the CPU in each process (default: those of the checkpoint; in a first start
        torch.set_num_threads(), OMP_NUM_THREADS, or the cores of the node divided by its processes).
    identity: name -> plain value: a restart with another value is refused.
    plugins: what joins the run (default: usual()); [] for none. Their order is that of the calls.
    job: what only a program around the loop sets.
    objects: further objects, as for add().
    Raises BadInput if an argument is of another kind, and if the optimizer or the scheduler cannot be resumed
        exactly.
    """

    _newest: Any = None  # weak reference to the Exact of this process that has begun last

    def __init__(
        self,
        folder: str | os.PathLike[str],
        loader: "TrainingLoader",
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any = None,
        forward: torch.nn.Module | None = None,
        criterion: Any = None,
        save_every: int | Interval = _EPOCH,
        report_every: int | Interval | None = None,
        keep: int = 3,
        keep_every: int | Interval | None = None,
        max_bad_steps: int = 20,
        grace: float = 25.0,
        threads: int | None = None,
        identity: dict[str, Any] | None = None,
        plugins: Sequence[Plugin] | None = None,
        job: Job | None = None,
        **objects: Any,
    ):
        folder = os.fspath(folder)
        if "://" in folder:
            raise BadInput(f"{folder} is a URL: Exact writes to a folder (jobs upload to URLs)")
        _check(loader, model, keep, plugins)
        from bootfile.exact import machines  # the facts of a machine: a run needs them, an import does not

        self._is_job = job is not None and job.events is not None
        job = job or Job()
        self.loader = loader
        self.model = model
        self.grace = grace
        self.processes = job.processes
        self._max_bad_steps = max_bad_steps
        say = job.say or _say
        lock = None
        if job.writes and not self._is_job:
            from bootfile.exact.ends import lock_of  # a job holds the folder of its output itself

            folder = os.path.abspath(folder)  # the loop may change the working directory
            lock = lock_of(folder)
        # what a checkpoint holds; add() may add to it until resume()
        saved = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "receipt": loader.receipt}
        if isinstance(criterion, torch.nn.Module) and criterion.state_dict():
            saved["criterion"] = criterion
        self.state = RunState(saved, identity, job.settings, job.learned, loader.sampling)
        self.state.attributes = getattr(loader, "loop_attributes", None)
        distance = keep_every.steps(len(loader)) if isinstance(keep_every, Interval) else keep_every
        is_off = keep_every == 0 or (isinstance(keep_every, Interval) and keep_every.number == 0)
        if distance is not None and distance < 1 and not is_off:
            raise BadInput(f"keep_every={keep_every}: expected 0, a number of steps, or Interval(1, 'epoch')")
        self.saver = Saver(folder, keep, say, self.state.is_sharded, job.by_rank, distance)
        forward = model if forward is None else forward  # a compiled module has no truth value
        # the state of this wrapper is a collective of all ranks, which rank 0 alone would wait for
        modules = [forward, *model.modules()]
        if any(type(module).__name__ == "FullyShardedDataParallel" for module in modules):
            raise BadInput("Exact does not save a FullyShardedDataParallel: use fully_shard(), its successor")
        same = hasattr(forward, "exact_shards") if job.same_instructions is None else job.same_instructions
        self.parts = Parts(
            loader=loader,
            model=model,
            forward=forward,
            criterion=criterion,
            state=self.state,
            saver=self.saver,
            machines=machines.Machines(same, threads, accelerator.device_of(model), say),
            # the distance is the same on all ranks; the saver of rank 0 may know another
            saves=SaveTimes(save_every, distance or 0),
            reports=ReportTimes(report_every, job.report_after, job.evaluate_every),
            lock=lock,
            events=job.events or Events(),
            say=say,
            say_once=errors.Once(say),
            writes=job.writes,
            may_change=self.processes.may_change,
            save=self.save,
            settle=self._settle,
            close=self.end,
            evaluate_every=job.evaluate_every,
        )
        self.position = self.parts.position
        machines.protect()
        self._given = plugins
        self._world_size = ranks.world_size()
        self.plugins: list[Plugin] = []  # from begin() on
        self._open: list[Plugin] = []  # those that end() has still to close
        self._has_begun = False
        self.add(**objects)

    @property
    def total_steps(self) -> int | None:
        """The steps of the whole run; None if it has no limit."""
        return self.loader.total_steps

    @property
    def running(self) -> torch.Tensor | None:
        """Sums since the last report, the same on all ranks: a process that joins gets them."""
        return self.position.running

    @running.setter
    def running(self, sums: torch.Tensor) -> None:
        self.position.running = sums

    def add(self, **objects: Any) -> None:
        """Save further objects with a state_dict(), for example a gradient scaler, or seed your own generator
        of random numbers for each step. Call it before resume(). Raises BadInput."""
        if self._has_begun:
            raise BadInput(f"add({', '.join(objects)}) comes after resume(): call it before")
        for name, value in objects.items():
            # it would take the place of that part; one named "scheduler" would not be saved at all
            if self.state.objects.get(name, value) is not value:
                raise BadInput(
                    f"add({name}=...): a checkpoint has another {name}: give the object another name, or "
                    f"the run's own to Exact(..., {name}={name})"
                )
            if self.loader.add_generator(value):
                self.state.generators.append(name)
                continue
            if not hasattr(value, "state_dict") or not hasattr(value, "load_state_dict"):
                raise BadInput(
                    f"add({name}=...) needs an object with state_dict() and load_state_dict(), and got "
                    f"{type(value).__name__}: give each object of a list or a dictionary a name of its own, "
                    "and options to job=Job(...) or plugins=usual(...)"
                )
            self.state.objects[name] = value

    def resume(self) -> int:
        """Load the newest checkpoint on every rank before the first step, and return its step; 0 without one.
        From then on a signal stops the loop at its next step. Raises BadInput if no checkpoint can be used.
        """
        step = self.restore()
        folder, position = _last_runs.get(self.model, ("", self.position))
        # a cell of a notebook that has failed before its first save, and is run again
        if not step and folder == self.saver.folder and position.ended:
            raise BadInput(
                f"{folder} has no checkpoint, and the model has trained {position.ended} steps in this "
                "process: make the model and the optimizer again, to begin with step 1"
            )
        _last_runs[self.model] = self.saver.folder, self.position
        self.begin(step)
        self.announce(step)
        return step

    def restore(self) -> int:
        """Restore the state on every rank, and return its step: the first part of resume()."""
        # of an elastic job: the state of processes that are alive is newer than any checkpoint
        living = self.processes.restore(self.parts)
        if living is not None:
            return living
        if former := _find_former():  # its last write may be the checkpoint to continue from
            former.saver.collect(wait=True)
        from bootfile.exact import start  # what a step does not need

        return start.restore(self.parts)

    def begin(self, step: int, is_saved_here: bool = True) -> None:
        """Begin to count, to vote and to save, on every rank: the second part of resume(). step: the steps
        before the first. is_saved_here: whether the checkpoint of this step is in the run's folder."""
        from bootfile.exact import ends, start  # what a step does not need

        parts = self.parts
        if former := _find_former():
            former.end(SystemExit())
        self._list_plugins()
        # the weights are loaded by now: what follows may look at them and run backward passes
        start.prepare(parts, self.processes, step, is_saved_here)
        # torch calls it at each optimizer step of the process from here on
        parts.steps = OptimizerSteps(self.state.objects, self.state.before_step, parts.say_once)
        parts.guard = Guard(self.model, *parts.steps.optimizers, watchers=having(self.plugins, "numbers"))
        self._has_begun = True
        Exact._newest = weakref.ref(self)
        if parts.writes:
            ends.watch(parts, self.grace, self.processes.signal_store())
        # the time of the set-up does not count: a save by time is measured from the first step on
        parts.saves.begin()
        for plugin in self.plugins:
            plugin.begin(parts, step)

    def _list_plugins(self) -> None:
        """List what joins the run, when it is known how many processes there are."""
        given = self._given
        if given is None:
            from bootfile.exact.usual import usual  # a run may name its own

            given = usual(is_job=self._is_job)
        elif given and self._world_size != ranks.world_size():
            raise BadInput(
                "init_process_group() came after plugins=usual(): call it before, as the plugins of several "
                "processes are others than those of one"
            )
        # In the order of each call. First the questions whose answers a step needs, then the processes of an
        # elastic job: they keep the step before any other collective of it can fail.
        self.plugins = [Agreement(), self.processes, *given]
        self._open = [*self.plugins]
        self._at_end_of_step = having(self.plugins, "ended")
        self._at_save = having(self.plugins, "saved")

    def announce(self, step: int) -> None:
        """Say which processes continue, and do what their last step had still to do, because rank 0 may have
        been lost before: the last part of resume(). Call it on every rank."""
        self.processes.announce(step)
        if self.processes.due.report:
            self.parts.events.repeat_report()
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
        if self.position.leaves_out:
            self._vote(None)  # the ranks agree on stops and saves
            return False
        return self._vote(loss)

    @property
    def found_inf(self) -> torch.Tensor | None:
        """Return, after accepts(), a float [] on the device: 1 if the device skips the step, else 0. None if
        an optimizer is not fused: then the answer of accepts() is final."""
        return self.parts.guard.found_inf

    def end_step(self) -> Due:
        """End a step, on every rank, and return what is due. Call it once for each batch of the loader.

        After a step that was skipped nothing is saved: the run may be diverging, and good checkpoints stay.
        If gradients are accumulated over several batches, a save waits for the optimizer step. Raises
        Diverged, and BadInput if the loop and the loader count other steps.
        """
        steps = self._get_steps()
        guard = self.parts.guard
        # raises at once if a step was not ended exactly once: the receipt would be one of other steps
        step = self._count()
        # a loop that never asks accepts(): all ranks still have to agree on a signal, a save and a report
        if not guard.has_voted:
            self._vote(None)
        # if the device decides about steps, this is the verdict on the step before
        self._apply(guard.end_step())
        if self.parts.may_change:
            self._settle()  # nothing about this step may be known later
        self.state.compare_frozen()
        for note in self.state.take_notes():  # also about groups that the loop has added after the restart
            self.parts.say(note)
        # also after a bad step: the batches of an accumulation that follow it add to gradients again
        self.position.waits = steps.end_batch()
        due = self._find_due(step)
        for plugin in self._at_end_of_step:  # the memory of an elastic job may raise Changed
            plugin.ended(step, due)
        guard.has_more = False
        if due.save:
            self.position.asked = step
        return due

    def save(self) -> None:
        """Save, and exit if the process was asked to stop. Call it on every rank if end_step() says it is
        due."""
        position = self.position
        position.asked = 0
        step = self.loader.step
        is_last = step == self.total_steps
        # the next end_step() whose gradients were taken by an optimizer asks for this save again
        if position.waits and not is_last:
            return
        if position.waits:
            self.parts.say(
                f"warning: step {step} is the last one, and its gradients wait for an optimizer step: a "
                "longer run will not continue exactly from its checkpoint"
            )
        if self.parts.is_between_epochs and not is_last:
            raise BadInput(
                f"save() after the batches of an epoch (step {step}): the code there would run again after a "
                "restart; call save() in the loop over the batches, after end_step()"
            )
        # the host waits for the device here: a checkpoint must not hold a step whose verdict is not known
        self._settle()
        # the run may diverge: a state that is written now would push a good checkpoint out
        if self.state.bad_in_a_row and not position.is_stopping:
            return
        if self.loader.receipt.step != step:  # the loop has not done it with a report
            self.loader.commit(step, self.saver.folder)
        for check in self.parts.before_save:
            check(step)
        # rank 0 copies the state to host memory here, and a thread writes it; the others do not wait
        if ranks.is_first() or self.state.is_sharded:
            if position.is_stopping:
                self.saver.collect(wait=True)  # a write that failed is tried again
            capture = functools.partial(self.state.capture, step, self.parts.has_left_epoch)
            self.saver.save_checkpoint(step, self.state.run, capture, self._is_planned(step))
        # also if the write fails later: the saver reports it then, and the next planned save tries again
        position.save_is_late = False
        position.saved = step
        self.parts.saves.saved_at = time.monotonic()
        for plugin in self._at_save:
            plugin.saved(step)
        if position.is_stopping:
            self._exit(step)

    def save_unplanned(self) -> None:
        """Save after this step as save() does, also if no save is due. Call it on every rank."""
        if not self._is_planned(self.loader.step):
            self.position.save_is_late = True
            self.save()

    def end_evaluation(self) -> bool:
        """Return, on every rank after an evaluation, whether one was asked to stop: then call stop()."""
        is_asked = ranks.maximum(float(signals.asked()), accelerator.device_of(self.model)) > 0
        for compare in self.parts.after_evaluation:
            compare(self.loader.step)
        # an evaluation has no votes: this is the first moment since its start at which all ranks agree
        self.position.is_stopping = is_asked
        self.parts.reports.reported_at = time.monotonic()
        return is_asked

    def stop(self, saves: bool = True) -> None:
        """Save, if no gradients wait for an optimizer step, and exit. Call it on every rank."""
        if saves and self.parts.writes:
            self.save()  # it exits, too
        self._exit(self.loader.step)

    def close(self) -> None:
        """Save the last step, and wait for the last write. Signals are not noticed any more. Raises
        NotSaved."""
        from bootfile.exact import ends

        writes = self.parts.writes
        if writes:
            ends.save_last(self.parts)
        # a process must not end while this thread reads the store: the wait for it is here
        signals.unfollow()
        self.end(None)
        # rank 0 waits for its last write; the other ranks have none
        lost = self.saver.finish()
        if ranks.is_first() and writes:
            lost.append(self.loader.receipt.finish(self.saver.folder))
        if self.parts.lock:  # last: from here on another run may take the folder
            self.parts.lock.release()
        if any(lost):
            raise NotSaved("; ".join(filter(None, lost)))

    def end(self, error: BaseException | None) -> None:
        """End the plugins, each once, also if one raises, and what watches the optimizers."""
        if self._has_begun:
            self.parts.steps.close()
            self.parts.guard.close()
        while self._open:
            plugin = self._open.pop(0)
            try:
                plugin.close(error)
            except BaseException:
                self.end(error)
                raise

    def give_up(self, error: BaseException | None = None) -> None:
        """End the writes of a run that ends with an error: wait some seconds for those in flight."""
        self.end(error or SystemExit())
        self.saver.give_up(_LAST_WRITE)

    must_stop = staticmethod(signals.asked)  # whether this process, or another one of the job, must stop

    def _get_steps(self) -> OptimizerSteps:
        """Return what counts the optimizer steps. Raises BadInput if this run has not begun or is not the
        last."""
        if not self._has_begun:
            raise BadInput("call resume() before the first step")
        newest = Exact._newest
        if newest is None or newest() is not self:
            raise BadInput(
                "another Exact of this process has begun: a process has one run at a time. Give further "
                "models and optimizers to this one by their names: Exact(..., discriminator=D), or add()"
            )
        steps: OptimizerSteps = self.parts.steps
        return steps

    def _count(self) -> int:
        """Return the number of steps, which end_step() and the loader count."""
        position = self.position
        if position.asked:
            self.parts.say_once(
                f"warning: end_step() said that a save is due after step {position.asked}, and save() was "
                "not called: call run.save() if end_step().save"
            )
            position.asked = 0
        position.ended += 1
        if position.ended != self.loader.step:
            raise BadInput(
                f"the loop has ended {position.ended} steps after {self.loader.step} batches: call "
                "end_step() once for each batch of the loader of Exact, also if gradients are accumulated "
                "over several"
            )
        return position.ended

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
            self.position.rate = rate
        # all ranks meet here: this is the collective of a step, besides that of the gradients
        return self.parts.guard.vote(loss)

    def _find_due(self, step: int) -> Due:
        """Return what is due after a step; the same on every rank."""
        position = self.position
        saves = self._is_planned(step)
        # the gradients of several batches are added up: a checkpoint would lose them
        if position.waits and step != self.total_steps:
            position.save_is_late = saves
            saves = False
        else:
            saves = saves or position.is_stopping
        # the receipt and the metrics end with the step of the checkpoint
        reports = self.parts.reports.is_due(step, len(self.loader)) or saves
        if reports:
            self.parts.reports.end()
        return Due(reports, saves)

    def _is_planned(self, step: int) -> bool:
        """Return whether save_every asks for a save after this step, or one is late."""
        if not self.parts.writes:
            return False
        is_late = self.position.save_is_late or step == self.total_steps
        return is_late or self.parts.saves.is_planned(step, len(self.loader))

    def _settle(self) -> None:
        self._apply(self.parts.guard.settle())

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
        self.parts.say(
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

    def _exit(self, step: int) -> None:
        from bootfile.exact import ends

        ends.leave(self.parts, step)


def _check(loader: Any, model: Any, keep: Any, plugins: Any) -> None:
    """Raise BadInput if an argument of Exact is of another kind: behind it no code asks again."""
    if not hasattr(loader, "receipt"):
        raise BadInput(
            f"the loader {type(loader).__name__} cannot continue exactly: give Exact the result of "
            "torch_loader(DataLoader(...), device, epochs=...) or of map_style_loader()"
        )
    if not isinstance(model, torch.nn.Module):
        raise BadInput(
            f"model={type(model).__name__}: expected one torch.nn.Module; give further ones names of their "
            "own: Exact(..., model=G, discriminator=D)"
        )
    if not isinstance(keep, int) or keep < 1:
        raise BadInput(f"keep={keep}: expected the number of newest checkpoints that stay, at least 1")
    if plugins is None:
        return
    if not isinstance(plugins, Sequence) or not all(isinstance(plugin, Plugin) for plugin in plugins):
        raise BadInput(f"plugins={plugins!r}: expected a list of Plugins, such as [Norms()]")


def _find_former() -> Exact | None:
    """Return the run of this process that has begun last: an error may have ended it, as in a notebook."""
    return Exact._newest() if Exact._newest else None


def _say(line: str) -> None:
    """Print a line on rank 0."""
    if ranks.is_first():
        errors.print_line(line)

"""Checkpointing: resume at the exact step, save, stop on SIGTERM, and skip steps that are not finite.

Checkpoints are in checkpoints/ below the output folder (files.py). Weights are in the output folder:
epoch_<n>.pth after each epoch and best.pth after the best. Rank 0 reads and writes. Before every optimizer
step one all_reduce of a few numbers makes all ranks skip, report, save and stop at the same step.
"""

import argparse
import contextlib
import math
import os
import shlex
import sys
import time
from collections.abc import Iterable
from typing import Any

import torch

from common.checkpoint import resume
from common.compute import losses
from common.console import arguments
from common.console.arguments import boolean, interval, non_negative_int, positive_float, positive_int
from common.distributed import barrier, preemption, ranks
from common.exact import digest
from common.exact.files import plain_names, write_weights
from common.exact.nonfinite import Diverged, Guard, Verdict
from common.exact.optimizer_steps import OptimizerSteps
from common.exact.replicas import Replicas
from common.exact.saver import Saver, find_infinite
from common.exact.state import RunState
from common.ground import exits
from common.ground.exits import BadInput
from common.run import output, trackers
from common.run.job import JobParser
from common.run.metrics import Log

_LAST_WRITE = 4.0  # seconds to wait for a write in flight when the job ends with an error


class NotSaved(BadInput):
    """Results could not be written."""

    code = exits.NOT_SAVED


class Checkpointer:
    """Saves, resumes and stops a training run.

    args: the arguments of a TrainingParser.
    log: prints the reports; its `output` is the output folder.
    model: the raw module.
    loader: the training loader; its receipt is saved too.
    forward: the module that the job calls: the model (default), or a wrapper of it.
    criterion: the loss; its parameters and buffers are saved too, if it has any.
    objects: further objects, as for add().
    Raises BadInput if the optimizer or the scheduler cannot be resumed exactly.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        log: Log,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        loader: Any,
        forward: torch.nn.Module | None = None,
        criterion: Any = None,
        **objects: Any,
    ):
        self.args, self.log, self.output = args, log, log.output
        self.model, self.forward, self.loader, self.criterion = model, forward or model, loader, criterion
        log.optimizer, log.scheduler = optimizer, scheduler
        self._steps: Any = None  # OptimizerSteps, from resume() on
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "receipt": loader.receipt}
        if isinstance(criterion, torch.nn.Module) and criterion.state_dict():
            state["criterion"] = criterion
        self._state = RunState(args, state)
        self.add(**objects)
        self._replicas = Replicas(self._state.objects, self.forward, log.warn_once)
        sharded = getattr(args, "checkpoint_format", "full") if self._state.is_sharded else ""
        self._saver = Saver(self.output.folder, args.keep, log.info, sharded)
        log.states = self._saver.digests
        self._mirror: Any = None
        self._writes = not output.writes_nothing(args)
        self._wanted = args.resume  # "auto", "never", or the path to continue from
        self._last_save = time.monotonic()
        self._stop = self._waits = False  # any rank was asked to stop; gradients wait for an optimizer step
        self._label_mean = losses.LabelMean()
        self._digests: torch.Tensor | None = None  # Replicas.note(), sent with the next step
        self._late = False  # --save_every in seconds is due, or a save waits for an optimizer step
        self._class_names: tuple[str, ...] = getattr(loader.plan.index, "class_names", ())

    def add(self, **objects: Any) -> None:
        """Save further objects with a state_dict(), for example a gradient scaler, or seed your own generator
        of random numbers for each step. Call it before resume(). Raises BadInput."""
        if self._steps:
            raise BadInput(f"checkpoint.add({', '.join(objects)}) comes after resume(): call it before")
        for name, value in objects.items():
            if not self.loader.add_generator(value):
                self._state.objects[name] = value

    def resume(self, total_steps: int) -> int:
        """Load the checkpoint that --resume asks for and return its step; 0 without one.

        Call it on every rank, before the first step. From then on a signal stops the job at its next step.
        Without a checkpoint, --weights gives the initial weights. With --evaluate only weights are loaded,
        and the result is total_steps, so the job does not train. Raises BadInput if there are checkpoints and
        none can be used.
        """
        self.total_steps, self.steps_per_epoch = total_steps, len(self.loader)
        if self.args.evaluate:  # the batch size, the seed and the training data may differ
            self._load_weights(self.args.weights or resume.newest(self._wanted), complete=True)
            preemption.watch(self.args.grace, ranks.store())
            self.log.start(self.loader, total_steps, total_steps)
            return total_steps
        step = self._restore()
        objects = self._state.objects
        if shards := getattr(self.forward, "exact_shards", None):  # they have no buckets
            shards.watch(objects | {"criterion": self.criterion}, self.loader)
        elif ranks.world_size() > 2 and isinstance(self.forward, torch.nn.parallel.DistributedDataParallel):
            from common.parallel.gradients import settle_buckets

            settle_buckets(self.forward, self.loader.example(2))  # otherwise a restart rounds differently
        if shards or ranks.world_size() > 1:
            self.forward.register_forward_hook(lambda *given: self._label_mean.watch(given[-1]))
        self._steps = OptimizerSteps(objects, self._state.before_step, self.log.warn_once)
        self._guard = Guard(self.model, *self._steps.optimizers)  # after the weights were loaded
        self.loader.lead(step, self.args.evaluate_every)
        self._saver.infinite = find_infinite(self.model.state_dict())
        self._warn_of_generators()
        if self._writes:
            preemption.watch(self.args.grace, ranks.store())  # otherwise a signal ends the process at once
            exits.at_end("results", self._end)
            if ranks.world_size() == 1:  # several would have to agree on a step
                self.loader.call_when_stopped(lambda: self._save_waiting(step))
        if self._mirror:
            self._mirror.start(step if self._wanted == "auto" else 0)
        self.log.run = self._state.run
        self.log.start(self.loader, step, total_steps, self.model)
        return step

    def accepts(self, loss: torch.Tensor) -> bool:
        """Return whether to take the optimizer step: whether the loss and the gradients are finite on every
        rank. Call it after each backward(), on every rank; a step may have several losses.

        If not, the step is counted, and BatchNorm's statistics are restored. If all optimizers are
        fused, the answer is always True: the device skips the step, and the host learns of it one step later.
        loss: scalar. Costs a pass over the gradients and, if an optimizer is not fused, one synchronisation
        with the device (nonfinite.py).
        """
        self._saver.check()
        self._state.before_step()
        self._replicas.check_backward()
        digests = self._replicas.nothing() if self._digests is None else self._digests
        self._guard.digests = torch.cat([self._label_mean.stop(digests.device), digests])
        late, report = (ranks.is_first() and each() for each in (self._is_late, self.log.asks_to_report))
        asked = preemption.asked() or bool(self._saver.hopeless)
        return self._guard.check(loss, asked, late, report)

    @property
    def found_inf(self) -> torch.Tensor | None:
        """Return, after accepts(), a float [] on the device: 1 if the device skips the step, else 0. None if
        an optimizer is not fused: then the answer of accepts() is final."""
        return self._guard.found_inf

    def is_due(self, step: int) -> bool:
        """End a step, and return whether a report or a save is due after it; the same on every rank. A report
        is also due before each evaluation. Call it once per step.

        step: the batches that the loader has handed out so far, since the start of training.
        Raises Diverged, and BadInput if `step` is another number.
        """
        self.loader.check(step)
        self._digests = None
        self._note(self._guard.end_step())
        if self._guard.has_more:  # the first step, or a layer that was frozen until now
            self._digests, self._guard.has_more = self._replicas.note(step), False
        if warning := self._state.check_frozen():
            self.log.info(warning)
        self._waits = self._steps.end_batch() and not self._state.bad_in_a_row
        every = self.args.evaluate_every
        reports = self.log.is_due(step) or bool(every and step % every == 0)
        is_planned = self._is_planned(step)
        if is_planned or reports or self._stop:
            self._replicas.compare_steps(step, self._waits)
        if self._waits and step < self.total_steps:
            self._late = is_planned
            return reports
        return self._stop or is_planned or reports

    def save(self, step: int) -> None:
        """Save if it is due, and exit if the job was asked to stop. Call it on every rank.

        After a step that was skipped nothing is saved: the run may be diverging, and good checkpoints stay.
        If gradients are accumulated over several batches, a save waits for the optimizer step.
        """
        is_due = self._stop or self._is_planned(step)
        if not is_due or (self._waits and step < self.total_steps):
            return
        if self._waits:
            self.log.info(
                f"warning: step {step} is the last one, and its gradients wait for an optimizer step: a "
                "longer run will not continue exactly from its checkpoint"
            )
        self._note(self._guard.settle())
        if self._state.bad_in_a_row and not self._stop:
            return
        if self._stop or step == self.total_steps:  # no step follows
            self._replicas.compare(ranks.maxima(self._replicas.note(step)))
        else:
            self._digests = self._replicas.note(step)
        if ranks.is_first() or self._state.is_sharded:
            if self._stop:
                self._saver.check(wait=True)  # a write that failed is tried again
            self._saver.save_checkpoint(
                step, self._state.run, lambda: self._state.capture(step), self._is_planned(step)
            )
        self._late = False
        self._last_save = time.monotonic()
        if self._stop:
            self._exit(step)

    must_stop = staticmethod(preemption.asked)  # whether this process, or another one of the job, must stop

    def save_weights(
        self, epoch: int, step: int, val_sums: torch.Tensor, model: torch.nn.Module | None = None
    ) -> None:
        """Write epoch_<n>.pth, and best.pth if the score is the best so far. Within an epoch
        (--evaluate_every) only best.pth is written.

        The score is the metric that log.metrics names; by default the accuracy, or the loss if the job has no
        accuracy. Call it on every rank after an evaluation. It exits if the job was asked to stop. With
        --evaluate, and with --epoch_weights false, nothing is written.

        epoch: the number of the epoch.
        step: the optimizer steps so far.
        val_sums: the result of evaluation.evaluate(), over all ranks.
        model: the model that was evaluated (default: the model that is trained).
        """
        digests = self._replicas.note(step)
        asked, *maxima = ranks.maxima(torch.cat([digests.new_full((1,), preemption.asked()), digests]))
        self._stop = asked > 0
        self._replicas.compare(maxima)
        if self._stop and self.args.evaluate:
            self._exit(step)
        if self._stop:
            self.save(step)  # and exit
            self._exit(step)  # without a save, if gradients wait for an optimizer step
        if self.args.evaluate:
            return
        score = self.log.metrics.score(val_sums)
        if not math.isfinite(score):
            name = self.log.metrics.best or "val_loss or val_acc"
            self.log.warn_once(
                f"warning: {name} is {abs(score)} after step {step}: this evaluation cannot write best.pth",
                "score",
            )
        self._state.note(score, self.log.metrics.best_of)
        if not ranks.is_first() and not self._state.is_sharded:
            return

        best, name = "best.pth", f"epoch_{epoch}.pth"
        if self.args.evaluate_every and step % self.steps_per_epoch and step < self.total_steps:
            name = best

        def write(tensors: dict) -> None:
            tensors = plain_names(model or self.model, tensors)
            if name != best:
                write_weights(os.path.join(self.output.folder, name), tensors)
            if score > self._state.best:
                write_weights(os.path.join(self.output.folder, best), tensors)
                self._state.best = score  # once it is written

        average, written = None if model is self.model else model, name if self.args.epoch_weights else ""
        self._saver.save_weights(written, step, average, lambda: self._state.capture(step)["objects"], write)

    def stops_early(self, evaluations: int | None) -> bool:
        """Return whether the last `evaluations` were not better than the best before them; None: never.

        Call it after save_weights(). The answer is the same on every rank. The checkpoint holds the count. If
        the run ends within an epoch, its last step is saved.
        """
        if evaluations is None or self._state.epochs_not_better < evaluations:
            return False
        if not self._is_planned(step := self.loader.step):
            self._late = True
            self.save(step)
        self.log.info(f"stopped early: {self._state.epochs_not_better} evaluations without a better score")
        return True

    def finish(self) -> None:
        """Print the last result and the TIME COST table, and wait for the last write and upload. Raises
        NotSaved. If main() returns without it, it is called then."""
        self.log.finish()
        lost = [self.log.lost, *self._saver.finish(), self._mirror.finish() if self._mirror else ""]
        if any(lost):
            raise NotSaved("; ".join(filter(None, lost)))

    def _end(self, error: BaseException | None) -> None:
        if error:
            self._saver.wait(_LAST_WRITE)
        else:
            self.finish()

    def _restore(self) -> int:
        """Open the output, and restore the checkpoint to continue from, or --weights, on every rank. Return
        its step."""
        state = error = None
        if ranks.is_first():
            try:
                state = self._choose()
            except BadInput as refused:
                error = refused
        barrier.wait_for_all("checkpoint", "to restore a checkpoint", error)
        state = self._state.broadcast(state)
        if state and (self._state.is_sharded or not ranks.is_first()):
            self._state.restore(state)
        given = self.args.weights
        if state and given:
            began = self._state.initial_weights or "random weights"
            self.log.info(f"--weights {given} is not used: the resumed run began with {began}")
        elif given:
            self._load_weights(given)
        if self._writes and ranks.is_first():  # another run's checkpoint is not in this folder
            self._saver.resume_at(state["step"] if state and self._wanted == "auto" else 0)
        return state["step"] if state else 0

    def _choose(self) -> dict | None:
        """Return the state to continue from on rank 0, or None. Raises BadInput."""
        if self._writes:
            self._state.check_saveable()
            self._mirror = resume.take_output(self.args, self._is_own, self.args.keep)
            self._wanted = resume.wanted(self.args)
            if self._mirror:
                self._saver.saved = self._mirror.saved
        if self._wanted == "never":
            return None
        load = lambda state: self._state.load(state, self.total_steps)  # noqa: E731
        whole = not self._state.is_sharded  # otherwise each rank reads its shards
        path, state = resume.choose(self._wanted, self._saver.checkpoints, load, whole)
        if state:
            if self._wanted == "auto":
                self._state.run = state["run"]
            epoch = max(1, math.ceil(state["step"] / self.steps_per_epoch))
            if "training data" not in self._state.identity:
                self.log.info("warning: the training data are not compared: the receipt has no fingerprint")
            self.log.info(f"resumed from {path}: epoch {epoch}, step {state['step']} of {self.total_steps}")
            if change := self._state.schedule.change:
                self.log.info(f"the schedule of the checkpoint is another one: {change}")
        return state

    def _load_weights(self, path: str, complete: bool = False) -> None:
        from common.checkpoint import pretrained, weights  # only a run with --weights or --evaluate needs it

        arch = getattr(self.args, "arch", None)
        partial = getattr(self.args, "partial_weights", False)
        self.log.info(weights.load(path, self.model, complete, arch, partial))
        if "ema" in self._state.objects:  # the average begins at, or consists of, these weights
            self._state.objects["ema"].module.load_state_dict(self.model.state_dict())
        line = weights.compare_class_names(path, self._class_names)
        if line and not pretrained.is_name(arch, path):
            self.log.info(line)

    def _is_own(self, start: dict) -> bool:
        """Return whether a start belongs to this run, which was killed before its first save.

        If there are weights of an epoch after that save, they belong to a run whose checkpoints were deleted.
        """
        identity = {name: start["settings"].get(name[2:]) for name in self._state.identity}
        identity |= {"training data": start.get("training data")}
        epoch, total = max(output.epochs(self.output.folder), default=0), self.total_steps
        first_save = min(self.args.save_every.steps(self.steps_per_epoch) or total, total)
        lines = digest.read(self.output.folder)  # a save may have waited for an optimizer step, or failed
        if any("saved" in line for line in lines.values()):
            first_save = min((step for step, line in lines.items() if line.get("saved")), default=0)
        is_before = not first_save or epoch * self.steps_per_epoch < first_save
        return is_before and all(identity[name] == each for name, each in self._state.identity.items())

    def _warn_of_generators(self) -> None:
        """Print one warning that names generators which neither a checkpoint nor the loader knows."""
        parts = {"model": self.model, "criterion": self.criterion, "collate_fn": self.loader.collate_fn}
        if paths := self.loader.find_unknown_generators(parts, self._state.objects):
            self.log.info(
                f"warning: {', '.join(paths)}: random number generators of your own, whose numbers a restart "
                "does not repeat. Use torch's global one, or call checkpoint.add(name=generator) before "
                "resume(). One of a collate_fn repeats its numbers, but only at the same number of processes"
            )

    def _refuse_mean(self) -> None:
        """Raise BadInput, or print one warning without --exact_shards: a loss is not a mean over samples."""
        line = "the loss divides by the weights of the labels, or labels are ignored: the gradients that "
        if hasattr(self.forward, "exact_shards"):
            raise BadInput(
                f"--exact_shards: {line}are averaged over shards are not those of one batch. Expected a mean "
                "over samples, as (loss_of_each_sample * weight_of_its_label).mean()"
            )
        self.log.warn_once(
            f"warning: {line}{ranks.world_size()} processes average are not those of one process. "
            "guides/own_step.md shows a step that divides by the sum over all processes",
            "mean",
        )

    def _save_waiting(self, began: int) -> None:
        """Save and exit, while the job waits for data. began: the step at which this process began."""
        self._stop = True
        if self.loader.step == began:
            self._exit(began)
        self.save(self.loader.step)  # it returns if gradients wait for an optimizer step

    def _is_late(self) -> bool:
        """Return whether --save_every counts seconds and they have passed."""
        every = self.args.save_every
        return every.unit == "s" and time.monotonic() - self._last_save >= every.number

    def _is_planned(self, step: int) -> bool:
        """Return whether --save_every asks for a save after this step."""
        if not self._writes:
            return False
        every = self.args.save_every.steps(self.steps_per_epoch)
        return self._late or step == self.total_steps or (every > 0 and step % every == 0)

    def _note(self, verdict: Verdict | None) -> None:
        """Apply the verdict of all ranks on a step."""
        if verdict is None:
            return
        is_other_mean, *digests = verdict.digests
        self._replicas.compare(digests)
        if is_other_mean:
            self._refuse_mean()
        self._stop, self._late = self._stop or verdict.asked, self._late or verdict.late
        self.log.is_late = verdict.report
        state = self._state
        if not verdict.bad:
            state.bad_in_a_row = 0
            return
        state.bad_steps += 1
        state.bad_in_a_row += 1
        self.log.info(
            f"skipped a step: loss {verdict.loss:g}, gradient norm {verdict.norm:g} on rank 0; "
            f"{state.bad_in_a_row} in a row, {state.bad_steps} in all"
        )
        if state.bad_in_a_row >= self.args.max_bad_steps:
            self._saver.check(wait=True)
            durable = ranks.broadcast_object(self._saver.durable)  # all ranks end after rank 0 has saved
            kept = f"the checkpoint of step {durable} is kept" if durable else "there is no checkpoint"
            raise Diverged(
                f"{state.bad_in_a_row} steps in a row without a finite loss and gradient "
                f"(--max_bad_steps): {kept}; lower --lr, or check the data"
            )

    def _exit(self, step: int) -> None:
        """Exit after rank 0 has saved: when one process exits, its parent ends the others."""
        for rank, number in enumerate(ranks.gather_objects(preemption.received())):
            if number:  # for the log and the exit code; the store may not have it yet
                preemption.hear(rank, number)
        if ranks.is_first() and not self.args.evaluate:
            self._saver.check(wait=True)
        if hopeless := ranks.broadcast_object(self._saver.hopeless):
            raise NotSaved(hopeless)
        if ranks.is_first() and not self.args.evaluate:
            self.log.info(
                f"stopped as asked after step {step}; the newest checkpoint is that of step "
                f"{self._saver.durable}"
            )
            start = "torchrun ..." if "TORCHELASTIC_RUN_ID" in os.environ else "python"
            folder = [] if self.args.output_dir else ["--output_dir", self.output.folder]
            words, masked = arguments.mask_words([*sys.argv[1:], *folder], getattr(self.args, "ignored", ()))
            self.log.info(f"to continue: {start} {shlex.join([sys.argv[0], *words])}")
            if masked:
                self.log.info(f"(fill in: {', '.join(masked)})")
            if self._mirror:  # as long as --grace permits
                self.log.info(self._mirror.finish() or f"all results are at {self._mirror.url}")
        if ranks.world_size() > 1:
            torch.distributed.barrier()
        self.output.release()
        exits.leave(preemption.exit_code())


class TrainingParser(JobParser):
    """The parser of a job that trains: a JobParser with the options of a Checkpointer."""

    def __init__(self, description: str | None):
        super().__init__(description)
        self.checks.append(check)

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        for group in self._action_groups:
            if self._option_string_actions.get("--batch_size") in group._group_actions:
                help = "samples of one optimizer step in each process, in place of --batch_size"
                group.add_argument("--batch_size_per_gpu", type=positive_int, help=help)
        _add_arguments(self)  # after the job's own, as --help shows them
        parsed = super().parse_args(args, namespace)
        if getattr(parsed, "batch_size_per_gpu", None):
            parsed.batch_size = parsed.batch_size_per_gpu * parsed.topology.world_size
        return parsed

    def parse_known_args(
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        if "--batch_size_per_gpu" not in self._option_string_actions:
            return super().parse_known_args(args, namespace)
        parsed = namespace or argparse.Namespace()
        parsed.batch_size = None  # argparse sets no default over it, so None stays if the option is not given
        parsed, unknown = super().parse_known_args(args, parsed)
        if parsed.batch_size and parsed.batch_size_per_gpu:
            raise BadInput(
                f"--batch_size {parsed.batch_size} and --batch_size_per_gpu {parsed.batch_size_per_gpu} "
                "exclude each other: the first counts the samples of all processes, the second those of one"
            )
        parsed.batch_size = parsed.batch_size or self.get_default("batch_size")
        return parsed, unknown


def _add_arguments(parser: JobParser) -> None:
    add = parser.add_argument_group("checkpoints").add_argument
    add(
        "--resume",
        metavar="auto|never|FILE",
        help="checkpoint to resume from (default: auto, the newest in --output_dir; never without one)",
    )
    help = (
        "initial weights: best.pth, epoch_<n>.pth, step_<n>.pt, or a file of another program (default: none)"
    )
    add("--weights", metavar="FILE", help=help)
    help = "true: use the tensors of --weights that fit, if others do not (default: false)"
    add("--partial_weights", type=boolean, default=False, help=help)
    add("--evaluate", action="store_true", help="only evaluate the weights of --weights or --resume")
    add("--save_every", type=interval, default="1epoch", help="200 (steps), 90s or 1epoch (default: 1epoch)")
    add("--keep", type=positive_int, default=3, help="newest checkpoints to keep (default: 3)")
    help = "also evaluate after every N steps (default: 0, only after each epoch)"
    add("--evaluate_every", type=non_negative_int, default=0, metavar="N", help=help)
    help = "false: no epoch_<n>.pth and no best.pth; the last checkpoint has the weights (default: true)"
    add("--epoch_weights", type=boolean, default=True, help=help)
    help = "most time from SIGTERM to the exit (default: 25)"
    add("--grace", type=positive_float, default=25, metavar="SECONDS", help=help)
    help = "most time to repeat the last upload to a URL if its store is busy or away (default: 300)"
    add("--upload_timeout", type=positive_float, default=300, metavar="SECONDS", help=help)
    help = "stop after N consecutive steps without a finite loss and gradient (default: 20)"
    add("--max_bad_steps", type=positive_int, default=20, help=help)
    help = "also send settings and metrics to it (default: none)"
    add("--tracker", choices=[*trackers.NAMED], help=help)


def check(args: argparse.Namespace) -> dict[str, str]:
    """Return the default of --resume. Raises BadInput for options that contradict each other."""
    if args.tracker:
        trackers.check(args.tracker)
    wanted = args.resume or ("auto" if args.output_dir else "never")
    if args.evaluate and (wanted not in ("auto", "never")) == bool(args.weights):
        raise BadInput("--evaluate needs one of --weights FILE and --resume PATH: the weights to evaluate")
    if wanted == "auto" and not args.output_dir:
        raise BadInput(
            "--resume auto without --output_dir: name the folder of the run to continue, for example "
            f"--output_dir {os.path.join(output.PARENT, output.LATEST)}"
        )
    return {"resume": wanted}

"""The checkpoints of a job: what Exact does, with the options and the log of a job, and results at a URL.

Checkpoints are in checkpoints/ below the output folder. Weights are in the output folder: epoch_<n>.pth after
each epoch and best.pth after the best.
"""

import math
import os
import shlex
import sys
import time
from typing import Any

import torch

from bootfile.console.words import mask_words
from bootfile.exact import digest
from bootfile.exact.choose import newest
from bootfile.exact.files import write_weights
from bootfile.exact.loop import Due, Exact, NotSaved
from bootfile.exact.nonfinite import Diverged
from bootfile.exact.processes import Processes
from bootfile.exact.state import SavedState
from bootfile.ground.errors import BadInput
from bootfile.machine import instructions
from bootfile.processes import ranks, signals
from common.checkpoint import resume
from common.checkpoint.options import TrainingParser as TrainingParser  # jobs import both
from common.checkpoint.plain_names import plain_names
from common.console import arguments
from common.distributed import barrier, membership
from common.ground import endings
from common.run import output
from common.run.run import Run


def _find_processes() -> Processes | None:
    """Return the processes of an elastic job; None for another one."""
    if membership.current is None:
        return None
    from common.elastic.memory import Memory  # most jobs are not elastic

    return Memory(membership.current)


class Checkpointer(Exact):
    """Saves, continues and stops a job.

    run: the job's; its options are those of a TrainingParser.
    loader, model, optimizer, scheduler, forward, criterion, objects: see Exact.
    Raises BadInput if the optimizer or the scheduler cannot be resumed exactly.
    """

    def __init__(self, run: Run, *, loader: Any, **parts: Any):
        self.args, self.log, self.output = run.args, run.log, run.output
        args, settings = run.args, arguments.settings(run.args)
        super().__init__(
            run.output.folder,
            loader,
            save_every=args.save_every,
            report_every=args.report_every,
            keep=args.keep,
            max_bad_steps=args.max_bad_steps,
            grace=args.grace,
            same_instructions=False if getattr(args, "cpu_level", None) == instructions.NATIVE else None,
            threads=getattr(args, "threads", None),
            by_rank=getattr(args, "checkpoint_format", "full") == "sharded",
            identity=arguments.identity(args),
            settings=settings,
            learned=arguments.without_operation(args, settings),
            processes=_find_processes(),
            **parts,
        )
        for name, steps in (("max_steps", loader.total_steps), ("epoch_steps", len(loader))):
            most = getattr(args, name, None)
            if most is not None and (steps is None or steps > most):
                raise BadInput(f"--{name} {most}: the job does not give it to its sampler")
        self.evaluate_every = args.evaluate_every
        self.state.initial_weights = args.weights
        self._writes = not output.writes_nothing(args)
        self._wanted = args.resume  # "auto", "never", or the path to continue from
        self._mirror: Any = None
        # figures since the last report, the same on all ranks: a process that comes gets them
        self.running: torch.Tensor | None = None
        self._sample_losses: Any = None
        if args.sample_losses and self._writes:
            from common.run.sample_losses import SampleLosses  # most jobs do not keep them

            own = run.output.folder, ranks.rank(), self.say
            self._sample_losses = SampleLosses(self.criterion, loader, *own)
        self._class_names: tuple[str, ...] = getattr(loader.plan.index, "class_names", ())

    def resume(self) -> int:
        """Load the checkpoint that --resume asks for and return its step; 0 without one.

        Call it on every rank, before the first step. From then on a signal stops the job at its next step.
        Without a checkpoint, --weights gives the initial weights. With --evaluate only weights are loaded,
        and the result is the last step, so the job does not train. Raises BadInput if there are checkpoints
        and none can be used.
        """
        if self.args.evaluate:  # the batch size, the seed and the training data may differ
            self._load_weights(self.args.weights or newest(self._wanted), complete=True)
            signals.watch(self.grace, ranks.store())
            self.log.start(self.loader, self.total_steps or 0, self.total_steps)
            return self.total_steps or 0
        step = self._restore()
        if self._writes and ranks.is_first():  # another run's checkpoint is not in this folder
            self.saver.resume_at(step if self._wanted == "auto" else 0, self.processes.may_change)
        self._begin(step, self._writes)
        endings.explain_with(self.loader)
        if self._writes:
            endings.at_end("results", self._end)
        if self._sample_losses:
            self._sample_losses.begin(step)
        if self._mirror:
            self._mirror.start(step if self._wanted == "auto" else 0)
        objects, run = self.state.objects, self.state.run
        processes: Any = self.processes
        was_begun = processes.may_change and processes.was_begun
        self.log.start(
            self.loader, step, self.total_steps, self.model, lambda: self.rate, objects["scheduler"], run,
            processes.due.report, was_begun,
        )  # fmt: skip
        if processes.may_change:
            processes.announce(self, step)
            self.log.members = processes.figures
            self._repeat_what_was_due(objects["scheduler"])
        return step

    def _repeat_what_was_due(self, scheduler: Any) -> None:
        """Report and save after the last finished step if it had to: rank 0 may have been lost before."""
        from common.parallel.exact_shards import sum_rows  # most jobs do not need it

        due = self.processes.due
        if due.report and self.running is not None:
            self.log.report(sum_rows(self.running.clone()), scheduler)
            self.running.zero_()
        if due.save:
            self.save()

    def end_step(self) -> Due:
        due = super().end_step()
        if due.report and self._sample_losses:
            self._sample_losses.write()
        self.log.advance(self.loader.step)
        return due

    def save_weights(self, epoch: int, val_sums: torch.Tensor, model: torch.nn.Module | None = None) -> None:
        """Write epoch_<n>.pth, and best.pth if the score is the best so far. Within an epoch
        (--evaluate_every) only best.pth is written.

        The score is the metric that Log.use() names; by default the accuracy, or the loss if the job has no
        accuracy. Call it on every rank after an evaluation. It exits if the job was asked to stop. With
        --evaluate, and with --epoch_weights false, nothing is written.

        epoch: the number of the epoch.
        val_sums: the result of evaluation.evaluate(), over all ranks.
        model: the model that was evaluated (default: the model that is trained).
        """
        step, asked = self.loader.step, float(signals.asked())
        if self._replicas:
            digests = self._replicas.note(step)
            asked, *maxima = ranks.maxima(torch.cat([digests.new_full((1,), asked), digests]))
            self._replicas.compare(maxima)
        elif ranks.world_size() > 1:  # with --evaluate
            asked = ranks.maximum(asked, next(self.model.parameters(), torch.empty(0)).device)
        self.is_stopping, self.reported_at = asked > 0, time.monotonic()
        if self.is_stopping and self.args.evaluate:
            self._exit(step)
        if self.is_stopping:
            self.save()  # and exit
            self._exit(step)  # without a save, if gradients wait for an optimizer step
        if self.args.evaluate:
            return
        score = self.log.metrics.score(val_sums)
        if not math.isfinite(score):
            name = self.log.metrics.best or "val_loss or val_acc"
            self.say_once(
                f"warning: {name} is {abs(score)} after step {step}: this evaluation cannot write best.pth",
                "score",
            )
        self.state.note(score, self.log.metrics.best_of)
        if not ranks.is_first() and not self.state.is_sharded:
            return

        best, name = "best.pth", f"epoch_{epoch}.pth"
        if self.evaluate_every and step % len(self.loader) and step != self.total_steps:
            name = best

        def write(tensors: dict) -> None:
            tensors = plain_names(model or self.model, tensors)
            if name != best:
                write_weights(os.path.join(self.output.folder, name), tensors)
            if score > self.state.best:
                write_weights(os.path.join(self.output.folder, best), tensors)
                self.state.best = score  # once it is written

        average, written = None if model is self.model else model, name if self.args.epoch_weights else ""
        self.saver.save_weights(written, step, average, lambda: self.state.capture(step)["objects"], write)

    def stop_early(self, evaluations: int | None) -> bool:
        """Save and return True if the last `evaluations` were not better than the best before them; None:
        never.

        Call it after save_weights(). The answer is the same on every rank. The checkpoint holds the count.
        """
        if evaluations is None or self.state.epochs_not_better < evaluations:
            return False
        if not self._is_planned(self.loader.step):
            self._late = True
            self.save()
        self.say(f"stopped early: {self.state.epochs_not_better} evaluations without a better score")
        return True

    def finish(self) -> None:
        """Print the last result and the TIME COST table, and wait for the last write and upload. Raises
        NotSaved. If main() returns without it, it is called then."""
        self.log.finish()
        lost = [self.log.lost, *self.saver.finish(), self._mirror.finish() if self._mirror else ""]
        if any(lost):
            raise NotSaved("; ".join(filter(None, lost)))

    close = finish

    def say(self, line: str) -> None:
        self.log.info(line)

    def _restore(self) -> int:
        step, given = super()._restore(), self.args.weights
        if self.processes.has_restored:
            self._wanted = "auto"  # a process that comes did not open the output folder
        if step and given:
            began = self.state.initial_weights or "random weights"
            self.say(f"--weights {given} is not used: the resumed run began with {began}")
        elif given:
            self._load_weights(given)
        return step

    def _choose(self) -> SavedState | None:
        if self._writes:
            self.state.check_saveable()
            self._mirror = resume.take_output(self.args, self.output, self._is_own, self.args.keep)
            self._wanted = resume.wanted(self.args, self.output)
            if self._mirror:
                self.saver.saved = self._mirror.saved
        if self._wanted == "never":
            return None
        state = self._load(self._wanted)[1]
        if state and "training data" not in self.state.identity:
            self.say("warning: the training data are not compared: the receipt has no fingerprint")
        if state:
            from common.checkpoint import former  # only a run that continues needs it

            former.warn(state["arguments"], self.say)
        return state

    def _wait_for_first(self, error: BadInput | None) -> None:
        barrier.wait_for_all("checkpoint", "to restore a checkpoint", error)

    def _load_weights(self, path: str, complete: bool = False) -> None:
        from common.checkpoint import pretrained, weights  # only a run with --weights or --evaluate needs it

        arch = getattr(self.args, "arch", None)
        partial = getattr(self.args, "partial_weights", False)
        self.say(weights.load(path, self.model, complete, arch, partial))
        if "ema" in self.state.objects:  # the average begins at, or consists of, these weights
            self.state.objects["ema"].module.load_state_dict(self.model.state_dict())
        line = weights.compare_class_names(path, self._class_names)
        if line and not pretrained.is_name(arch, path):
            self.say(line)

    def _is_own(self, start: dict) -> bool:
        """Return whether a start belongs to this run, which was killed before its first save.

        If there are weights of an epoch after that save, they belong to a run whose checkpoints were deleted.
        """
        identity = {name: start["settings"].get(name[2:]) for name in self.state.identity}
        identity |= {"training data": start.get("training data")}
        epoch, total = max(output.epochs(self.output.folder), default=0), self.total_steps
        every = self.save_every.steps(len(self.loader))
        first_save = min(every or total or 0, total or every)
        lines = digest.read(self.output.folder)  # a save may have waited for an optimizer step, or failed
        if any("saved" in line for line in lines.values()):
            first_save = min((step for step, line in lines.items() if line.get("saved")), default=0)
        is_before = not first_save or epoch * len(self.loader) < first_save
        return is_before and all(identity[name] == each for name, each in self.state.identity.items())

    def _is_report_due(self, step: int) -> bool:
        if profiled := getattr(self.args, "prof", None):  # before the last N steps, and after them
            return step in ((self.total_steps or 0) - profiled, self.total_steps)
        every = self.evaluate_every
        return super()._is_report_due(step) or bool(every and step % every == 0)

    def _is_planned(self, step: int) -> bool:
        return self._writes and super()._is_planned(step)

    def _commit(self, step: int) -> None:
        """Do nothing: a report comes before each save, and commits the receipt."""

    def _end(self, error: BaseException | None) -> None:
        if self._sample_losses and isinstance(error, Diverged):  # its last steps have no report
            self._sample_losses.write()
        super()._end(error) if error else self.finish()

    def _say_where(self, step: int) -> None:
        if not ranks.is_first() or self.args.evaluate:
            return
        super()._say_where(step)
        start = "torchrun ..." if "TORCHELASTIC_RUN_ID" in os.environ else "python"
        folder = [] if self.args.output_dir else ["--output_dir", self.output.folder]
        words, masked = mask_words([*sys.argv[1:], *folder], getattr(self.args, "ignored", ()))
        self.say(f"to continue: {start} {shlex.join([sys.argv[0], *words])}")
        if masked:
            self.say(f"(fill in: {', '.join(masked)})")
        if self._mirror:  # as long as --grace permits
            self.say(self._mirror.finish() or f"all results are at {self._mirror.url}")

    def _leave(self) -> None:
        self.output.release()
        super()._leave()

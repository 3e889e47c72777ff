"""The checkpoints of a job: an Exact, with the options and the log of a job, and results at a URL.

It takes a Run, whose options are those of a TrainingParser (options.py has checked them: nothing here asks
again), and the objects of the loop. It writes checkpoints to checkpoints/ below the output folder, and
weights to the output folder: epoch_<n>.pth after each epoch and best.pth after the best. Rank 0 alone opens
the output (resume.py) and uploads it (mirror.py); the others wait for it, and raise its error. What an option
adds to a step joins as a plugin.
"""

import math
import os
import shlex
import sys
from typing import TYPE_CHECKING, Any

import torch

from bootfile.console.words import mask_words
from bootfile.exact.due import Due
from bootfile.exact.files import write_weights
from bootfile.exact.loop import Exact, Job
from bootfile.exact.plugins import Events, Plugin, Processes, stopped_line
from bootfile.exact.saver import NotSaved
from bootfile.exact.usual import usual
from bootfile.ground.errors import BadInput
from bootfile.machine import levels
from bootfile.processes import ranks, stuck
from common.checkpoint import resume
from common.checkpoint.options import TrainingParser as TrainingParser  # jobs import both
from common.checkpoint.scores import BEST, Scores, plain_names
from common.console import arguments
from common.ground import endings
from common.run import output, starts
from common.run.run import Run

if TYPE_CHECKING:  # most jobs have none of these
    from common.checkpoint.fork import OtherRun
    from common.checkpoint.mirror import Mirror

_OF_EXACT = ("save_every", "report_every", "keep", "keep_every", "max_bad_steps", "grace")  # options


class Checkpointer(Exact, Events):
    """Saves, continues and stops a job: an Exact that decides with the options of the job, and prints and
    writes what a job prints and writes.

    run: the job's; its options are those of a TrainingParser.
    loader, model, optimizer, scheduler, forward, criterion, objects: see Exact.
    val_loader: the Loader of the validation set that chooses best.pth. If a restart has another set, the
        scores begin again. None, or a loader without a receipt: the sets are not compared.
    Raises BadInput if the optimizer or the scheduler cannot be resumed exactly.
    """

    loader: Any

    def __init__(self, run: Run, *, loader: Any, val_loader: Any = None, **parts: Any):
        args = run.args
        self.args = args
        given = vars(args)  # some options only some jobs have
        self.log = run.log
        self.output = run.output
        self.loader = loader
        self._val_loader = val_loader
        self.scores = Scores(args.weights)
        self._writes = not output.writes_nothing(args)
        self._wanted = args.resume  # "auto", "never", or the path to continue from
        self._mirror: Mirror | None = None  # of an output with a URL
        self._other_run: OtherRun | None = None  # with --from or --without
        processes = Processes()
        self._is_later = False  # whether an elastic job is in its second generation or a later one
        if members := run.topology.members:
            from common.elastic.memory import Memory  # most jobs are not elastic

            processes = Memory(members)
            self._is_later = members.generation > 0
        plugins = self._find_plugins(run, parts)
        for plugin in plugins:
            # what a report adds: the seconds of all ranks, if there are several
            self.log.pace = getattr(plugin, "figures", self.log.pace)
        settings = arguments.settings(args)
        prof = given.get("prof")
        super().__init__(
            run.output.folder,
            loader,
            **{name: given[name] for name in _OF_EXACT},
            threads=given.get("threads"),
            identity=arguments.identity(args),
            plugins=plugins,
            job=Job(
                say=self.log.info,
                writes=self._writes,
                # with "native" the checkpoint may be of another instruction set; else Exact decides
                same_instructions=False if given.get("cpu_level") == levels.NATIVE else None,
                events=self,
                processes=processes,
                # the clock is read before the last N steps, and after them: the first steps are slower
                report_after=((loader.total_steps or 0) - prof, loader.total_steps) if prof else None,
                evaluate_every=args.evaluate_every,
                by_rank=given.get("checkpoint_format") == "sharded",
                settings=settings,
                learned=arguments.without_operation(args, settings),
            ),
            **parts,
        )
        self.state.extras = self.scores
        # A copy of a job may have a sampler of its own, which would train longer without a line.
        for name, steps in (("max_steps", self.total_steps), ("epoch_steps", len(loader))):
            most = given.get(name)
            if most is not None and (steps is None or steps > most):
                raise BadInput(f"--{name} {most}: the job does not give it to its sampler")

    def _find_plugins(self, run: Run, parts: dict[str, Any]) -> list[Plugin]:
        """Return the plugins that the options ask for, around those of usual.py. Called on every rank.
        parts: the objects of the job. Raises BadInput."""
        args = self.args
        say = self.log.info
        first: list[Plugin] = []
        last: list[Plugin] = []  # after those that measure: their files may be on a slow mount
        write_sums = None
        if args.recheck:
            shards = getattr(parts.get("forward"), "exact_shards", None)
            if not shards:
                raise BadInput(f"--recheck {args.recheck} needs --exact_shards: jobs/train_exact.py has it")
            if not args.evaluate:
                recheck = shards.recheck(args.recheck, say)
                last.append(recheck)
                write_sums = recheck.write
        if args.without or args.from_run:
            from common.checkpoint.fork import OtherRun  # most runs begin with step 1

            self._other_run = OtherRun(run, self.loader, parts, say, write_sums)
            first.append(self._other_run.plugin)
        survivors: str = args.survivors
        if survivors != "first" and self.output.url:
            say("warning: --survivors any has no effect: rank 0 alone uploads results to a URL")
            survivors = "first"
        if args.sample_losses and self._writes:
            from common.run.sample_losses import SampleLosses  # most jobs do not keep them

            criterion = parts.get("criterion")
            last.append(SampleLosses(criterion, self.loader, run.output.folder, ranks.rank(), say))
            # a lost rank takes the losses since the last report along: the others must not save later steps
            survivors = ""
        if args.preemption:
            from bootfile.exact.preemption import Preemption  # most jobs ask for no notices

            first.append(Preemption(args.preemption))
        watching = usual(survivors, args.stuck_after, args.stuck_exit, args.slow_rank, is_job=True)
        return [*first, *watching, *last]

    # What a loop calls; see also Exact: accepts(), found_inf, save(), add(), total_steps, running.

    def resume(self) -> int:
        """Load the checkpoint that --resume asks for and return its step; 0 without one. See Exact.resume().

        Without a checkpoint, --weights gives the initial weights. With --evaluate only weights are loaded,
        and the result is the last step, so the job does not train.
        """
        if self.args.evaluate:  # the batch size, the seed and the training data may differ
            from common.checkpoint import given_weights

            return given_weights.resume_to_evaluate(self, self._wanted)
        step = self.restore()
        if self.processes.has_restored:
            self._wanted = "auto"  # a process that comes did not open the output folder
        elif step and "training data" not in self.state.identity:
            self.log.info("warning: the training data are not compared: the receipt has no fingerprint")
        if self._other_run:
            self._other_run.settle(self.parts, step, self.output.folder if self._writes else None)
            self.log.parent = self._other_run.facts
        given = self.args.weights
        if step and given:
            # The same command is started again: its first start has used the weights.
            began = self.scores.initial_weights or "random weights"
            self.log.info(f"--weights {given} is not used: the resumed run began with {began}")
        elif given:
            from common.checkpoint import given_weights

            given_weights.load(self, given)
        self._compare_validation_sets()
        if step:
            at_url = self._mirror.results() if self._mirror else []
            # the processes of an elastic job have written best.pth since
            writes = self._writes and self.args.epoch_weights and not self.processes.has_restored
            self.scores.settle(self.output.folder, at_url, writes, self.log.info)
        is_saved_here = self._wanted == "auto"  # another run's checkpoint is not in this folder
        self.begin(step, is_saved_here)
        endings.explain_with(self.loader)
        if self._writes:
            endings.at_end("results", self._end)
        if self._mirror:
            # only now is it known which checkpoints at the URL this run has left behind
            self._mirror.start(step if is_saved_here else 0, self.saver.keep_every or 0)
        processes: Any = self.processes
        if processes.may_change:
            self.log.members = processes.figures
        self.log.start(
            self.loader,
            step,
            self.total_steps,
            self.model,
            lambda: self.position.rate,  # the learning rate of the last step: each report asks for it
            self.state.objects["scheduler"],
            self.state.run,
            repeats=processes.due.report,
            continues=processes.may_change and processes.was_begun,
        )
        # the last: it may have to repeat a report or a save that a lost rank 0 has left out
        self.announce(step)
        return step

    def end_step(self) -> Due:
        """End a step and return what is due, as Exact.end_step()."""
        due = super().end_step()
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
        step = self.loader.step
        if self.end_evaluation():
            # The signal may have ended the evaluation: its sums are not those of the whole set.
            self.stop(saves=not self.args.evaluate)
        if self.args.evaluate:
            return
        metrics = self.log.metrics
        score = metrics.score(val_sums)
        if not math.isfinite(score):
            name = metrics.best or "val_loss or val_acc"
            self.parts.say_once(
                f"warning: {name} is {abs(score)} after step {step}: this evaluation cannot write best.pth",
                "score",
            )
        is_within_epoch = step % len(self.loader) != 0
        place = f"step {step}" if is_within_epoch else f"epoch {epoch}"
        self.scores.note(score, metrics.best_of, f"{metrics.describe_score(val_sums)} at {place}")
        if not ranks.is_first() and not self.state.is_sharded:
            # if rank 0 is lost, this rank may save the state (--survivors)
            self.scores.best = max(self.scores.best, score)
            return  # rank 0 has all weights, unless each rank has a part of them
        is_only_best = self.args.evaluate_every and is_within_epoch and step != self.total_steps
        name = BEST if is_only_best else f"epoch_{epoch}.pth"

        def write(tensors: dict) -> None:
            """Write the files, in the thread of the saver, from a copy of the weights."""
            tensors = plain_names(model or self.model, tensors)
            if name != BEST:
                write_weights(os.path.join(self.output.folder, name), tensors)
            if score > self.scores.best:
                write_weights(os.path.join(self.output.folder, BEST), tensors)
                self.scores.best = score  # once it is written

        average = None if model is self.model else model  # the weights of the model are in the state
        written = name if self.args.epoch_weights else ""  # "": only the digest
        self.saver.save_weights(
            written, step, self.state.run, average, lambda: self.state.capture(step)["objects"], write
        )
        if self.parts.may_change:  # others continue with the scores of this moment if this process is lost
            self.saver.collect(wait=True)

    def stop_early(self, evaluations: int | None) -> bool:
        """Save and return True if the last `evaluations` were not better than the best before them; None:
        never. Call it after save_weights(). The answer is the same on every rank. The checkpoint holds the
        count."""
        if evaluations is None or self.scores.epochs_not_better < evaluations:
            return False
        self.save_unplanned()  # a restart has to know the count, or it would train on
        self.log.info(f"stopped early: {self.scores.epochs_not_better} evaluations without a better score")
        return True

    def finish(self) -> None:
        """Print the last result and the TIME COST table, and wait for the last write and upload. Raises
        NotSaved. If main() returns without it, it is called then."""
        if self.scores.best_at and not self.args.evaluate:
            self.log.info(f"best: {self.scores.best_at}")
        self.log.finish()
        self.end(None)
        lost = [self.log.lost, *self.saver.finish()]
        if self._mirror:  # after the last write, which it has to upload
            lost.append(self._mirror.finish())
        if any(lost):
            raise NotSaved("; ".join(filter(None, lost)))

    close = finish

    # What Exact asks and tells: see Events.

    def choose_checkpoint(self) -> str:
        """Open the output, and return what the run continues from: "auto", "never" or a path. On rank 0."""
        if self._writes:
            # under the lock of the output: another job cannot write a checkpoint between this and the choice
            self._mirror = resume.take_output(
                self.args, self.output, self._is_of_this_run, self.args.keep, self._is_later
            )
            self._wanted = resume.find_source(self.args, self.output, self._is_later)
            if self._other_run:
                self._wanted = self._other_run.choose(self._wanted, self.state)
            if self._mirror:  # the thread that writes wakes the one that uploads
                self.saver.saved = self._mirror.saved
        return self._wanted

    def wait_for_first(self, error: BadInput | None) -> None:
        """Wait until rank 0 has opened the output, which may take long, and raise its error on every rank."""
        if not ranks.store():  # one process
            super().wait_for_first(error)
            return
        from common.distributed import barrier

        barrier.wait_for_all("checkpoint", "to restore a checkpoint", error)

    def repeat_report(self) -> None:
        """Report what the last step of an elastic job had still to report, on every rank: rank 0 was lost."""
        from common.parallel.exact_shards import sum_rows  # most jobs do not need it

        if self.running is not None:
            self.log.report(sum_rows(self.running.clone()), self.state.objects["scheduler"])
            self.running.zero_()

    def stopping(self, step: int, saved: int) -> None:
        """Print the command that continues the run, record the signal, and upload the rest, before a stop."""
        if not ranks.is_first() or self.args.evaluate:
            return  # an evaluation has nothing to continue
        self.log.info(stopped_line(step, saved))
        # torchrun sets the variable in the processes that it starts
        start = "torchrun ..." if "TORCHELASTIC_RUN_ID" in os.environ else "python"
        words = sys.argv[1:]
        if not self.args.output_dir:  # the same command would begin a new run in a folder of its own
            words = [*words, "--output_dir", self.output.folder]
        if self.args.resume == "never" and (self.args.output_dir or "--resume" in "".join(words)):
            words = [*words, "--resume", "auto"]  # the last one counts; else this is the default
        words, masked = mask_words(words, self.args.ignored)
        self.log.info(f"to continue: {start} {shlex.join([sys.argv[0], *words])}")
        if masked:
            self.log.info(f"(fill in: {', '.join(masked)})")
        self.log.record_signal(step)
        if self._mirror:  # as long as --grace permits
            self.log.info(self._mirror.finish() or f"all results are at {self._mirror.url}")
        self.log.print_end(step, *starts.end_of_signal())

    def leaving(self) -> None:
        self.output.release()

    def _end(self, error: BaseException | None) -> None:
        """End the writes when main() ends (common/ground/endings.py)."""
        if error is None:
            self.finish()
        else:
            stuck.explain(error)  # at once: the other ranks wait for the reason
            self.give_up(error)

    def _compare_validation_sets(self) -> None:
        """Forget the scores of the checkpoint if they are those of another validation set, with a warning:
        a score of other samples would decide about best.pth. Called on every rank."""
        receipt = getattr(self._val_loader, "receipt", None)
        # rank 0 decides: ranks that disagree would not stop early together, and items that are not seeded
        # give each rank another digest
        digests = [str(getattr(receipt, "fingerprint", "")), *getattr(receipt, "further", {}).values()]
        if self.scores.begin(ranks.broadcast_object("+".join(digests))):
            self.log.info(
                "warning: the validation set is another one than in the evaluations before: their scores do "
                "not count any more, and the next evaluation writes best.pth; keep a copy of best.pth if you "
                "need the one before"
            )

    def _is_of_this_run(self, start: dict) -> bool:
        """Return whether a start without a checkpoint belongs to this run, and was killed before its first
        save. Weights of an epoch after that save are those of a run whose checkpoints were deleted."""
        from bootfile.histories import read_states  # a first start has no start before it

        folder = self.output.folder
        lines = read_states(folder)
        saves = [step for step, line in lines.items() if line.get("saved")]
        # without lines of its saves, the weights are those of an unknown run
        was_killed = any("saved" in line for line in lines.values())
        first_save = min(saves, default=math.inf if was_killed else 0)
        if max(output.epochs(folder), default=-1) * len(self.loader) >= first_save:
            return False
        expected = self.state.identity
        # the start may be of another version: only the options that identify this run count
        identity = {name: start["settings"].get(name.removeprefix("--")) for name in expected}
        identity["training data"] = start.get("training data")
        # a start has no digests of the lists of the data
        names = expected.keys() - self.state.further.keys()
        return all(identity[name] == expected[name] for name in names)

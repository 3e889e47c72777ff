"""--from RUN --at_step K: a new run that begins at a step of an old one, in a folder of its own. A run with
--without (without.py) begins here, too.

The options that are not given are those of the old run at that step. The newest checkpoint at or before the
step is loaded, and the steps between are computed again and compared with the records of the old run:

    with its options (only others that may change at a restart): by the new run itself
    with others (--lr, --epochs, a number of processes): first in a program of its own, in NEW/.fork

A start of the same command in the same folder continues the new run. The old run is only read. check()
refuses options that contradict each other before anything is opened; OtherRun takes them as they are.
Outside are URLs (download the run first), and --evaluate, --prof, --elastic and --resume.
"""

import argparse
import math
import os
import shutil
import sys
from collections.abc import Callable, Collection
from typing import Any

from bootfile.exact.files import step_of
from bootfile.exact.forked import Forked, Plan
from bootfile.exact.plugins import Parts
from bootfile.exact.state import RunState
from bootfile.ground import git
from bootfile.ground.errors import BadInput
from bootfile.ground.numbers import counted
from bootfile.ground.results import checkpoints
from bootfile.histories import start_of
from bootfile.history import compute
from bootfile.history.parent import NOT_THE_SAME, Parent, describe_steps, parse_steps, read_starts_of_job
from bootfile.machine.differences import THREADS
from bootfile.processes import ranks
from bootfile.records import read_starts
from bootfile.sampling.removal import REMOVED, describe_removed
from common.checkpoint.scores import Scores
from common.console import arguments
from common.console.arguments import OPERATION
from common.ground.files import is_url
from common.run import environment
from common.run.run import Run

_SKIPPED = "list of skipped steps"  # a name in the identity
_COMPUTED = ".fork"  # in the folder of the new run, until it has begun
# options that change the bits of a step although a restart may change them
_COMPUTE_OTHERWISE = {"compile", "grad_checkpointing"}
# options that belong to one start, or to its place
_OF_A_START = {
    "output_dir", "resume", "evaluate", "from_run", "at_step", "skip_steps", "without", "prof", "init_method",
    "rank", "world_size", "local_rank", "processes_per_node", "elastic", "batch_size_per_gpu",
    "partial_weights",
}  # fmt: skip


def inherit(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the old run at the step, name -> default for this start. A restart takes those
    that the new run began with. Raises BadInput."""
    if is_url(args.from_run):
        raise BadInput(
            f"--from {args.from_run}: expected a folder; download it: python -m launch fetch {args.from_run} "
            "--to FOLDER"
        )
    is_local = args.output_dir and not is_url(args.output_dir)
    new_starts = read_starts(args.output_dir) if is_local else []
    settings: dict[str, Any]
    source = args.from_run
    # a restart: the new run has begun, and its first start has the options
    if new_starts and new_starts[0].get("parent"):
        settings = dict(new_starts[0]["settings"])
        source = args.output_dir
        if checkpoints(source):  # the newest one has the threads, which may have changed since
            settings["threads"] = None
    else:
        step = sys.maxsize if args.at_step is None else max(1, args.at_step)  # default: the last start
        start = start_of(read_starts_of_job(args.from_run), step)
        # without a state at or before the step, nothing else names the threads of the run
        settings = dict(start["settings"])
        settings["threads"] = start["environment"].get(THREADS, settings.get("threads"))
        # backends round pixels differently: the steps are computed with the one that was used
        if settings.get("data_backend") == "auto" and start.get("data backend"):
            settings["data_backend"] = start["data backend"]
    # a value with *** was not recorded as it was: a part of it is secret
    left_out = {name for name, value in settings.items() if name in _OF_A_START or "***" in str(value)}
    defaults = {name: value for name, value in settings.items() if name not in left_out}
    if settings.get("without"):  # the file may be gone: the run has kept its content
        defaults["without"] = os.path.join(os.path.realpath(source), REMOVED)
    if settings.get("weights") and settings.get("partial_weights"):
        defaults["weights"] = f"{settings['weights']},partial"
    return defaults


def check(args: argparse.Namespace) -> dict[str, Any]:
    """Return --skip_steps in one form. Raises BadInput for options that contradict each other."""
    if not args.from_run:
        name = "--at_step" if args.at_step is not None else "--skip_steps"
        raise BadInput(f"{name} needs --from RUN, the folder of the run from which this one begins")
    for name in ("evaluate", "prof", "elastic"):
        if vars(args).get(name):
            raise BadInput(f"--from: expected a training without --{name}")
    if args.resume:
        raise BadInput(f"--from --resume {args.resume}: leave out --resume: a restart continues by itself")
    # the old run is only read: nothing of the new one may be written to its folder
    folder = args.output_dir or ""
    if os.path.realpath(folder) == os.path.realpath(args.from_run):
        raise BadInput(f"--output_dir {folder} is the run of --from: expected a new folder")
    if args.skip_steps is None:  # '' is refused: a variable of a shell may be empty
        return {}
    steps = parse_steps("--skip_steps", args.skip_steps)
    _check_skipped(args.skip_steps, steps, args.at_step or 0)
    return {"skip_steps": describe_steps(steps)}


def _check_skipped(text: str | None, steps: Collection[int], step: int) -> None:
    """Raise BadInput if one of the skipped steps is not after the step at which the new run begins."""
    if steps and min(steps) <= step:
        raise BadInput(
            f"--skip_steps {text}: the new run begins after step {step}: expected later steps, or a smaller "
            "--at_step"
        )


class OtherRun:
    """The beginning of a run with --from or --without. The Checkpointer has one on each rank.

    run: the job's. loader, objects: those of the training. say: prints a line on rank 0. write_sums: writes
    what --recheck has kept of the steps so far, if it was asked for.
    `plugin`: compares, and leaves out steps. `facts`: the "parent" in each line of starts.jsonl, {} without
    --from: its folder, the name of the run, `step`, and `state`, the step of the checkpoint that was loaded;
    "unknown": steps between that the old run has not recorded. Raises BadInput.
    """

    def __init__(self, run: Run, loader: Any, objects: dict[str, Any], say: Any, write_sums: Callable | None):
        args = run.args
        self._run = run
        self._args = args
        self._say = say
        self._write_sums = write_sums
        self._skipped = parse_steps("--skip_steps", args.skip_steps) if args.skip_steps else ()
        self._without: Any = None
        if args.without:
            from common.checkpoint.without import Without

            forward = objects.get("forward")
            self._without = Without(args.without, loader, objects["model"] if forward is None else forward)
        self.plugin = Forked(self._check if args.from_run else None)
        self._parts: Any = None  # from settle() on
        self._folder = run.output.folder
        self._parent: Parent | None = None  # on rank 0, until its step
        self._is_first_start = False  # on rank 0, from choose() on: the new run has no checkpoint yet
        self.facts: dict[str, Any] = {}

    def choose(self, wanted: str, state: RunState) -> str:
        """Return what the run continues from: "auto" for its own checkpoints, the path of one of the old
        run, or "never" to begin with step 1; without --from `wanted`, which --resume says. Called on rank 0,
        which holds the folder. Raises BadInput."""
        if self._without:
            self._without.identify(state)
        if not self._args.from_run:
            return wanted
        starts = read_starts(self._folder)
        names = checkpoints(self._folder)
        if starts or names:  # a restart: the folder must hold this new run, not another one
            self.facts = self._find_facts(starts)
        if not names:
            return self._begin(state)
        # the new run continues from its own checkpoint; up to the step of --at_step the old run is compared
        if self._skipped:
            state.identity[_SKIPPED] = self._args.skip_steps
        if step_of(names[-1]) < self.facts["step"]:
            self._parent = Parent(self._args.from_run, self.facts["step"])
            self._parent.state = self.facts["state"]
        return "auto"

    def _begin(self, state: RunState) -> str:
        """Return the path of the checkpoint from which the new run begins, or "never" for step 1. choose()
        calls it on rank 0 of a start without a checkpoint of its own. Raises BadInput."""
        # without --at_step: a start of this run that was killed before its first checkpoint has the step
        step = self.facts.get("step") if self._args.at_step is None else self._args.at_step
        # the program in NEW/.fork, which only computes steps, begins with the state that its parent chose
        latest = int(os.environ[compute.ONLY]) if compute.ONLY in os.environ else None
        parent = Parent(self._args.from_run, step, latest)
        self._parent = parent
        self._is_first_start = True
        _check_skipped(self._args.skip_steps, self._skipped, parent.step)
        self.facts = {"folder": parent.folder, "run": parent.run, "step": parent.step, "state": parent.state}
        if parent.unrecorded:
            self.facts["unknown"] = parent.unrecorded
        if self._without:
            self._without.identify(state, parent)
        before = parent.settings.get("skip_steps")
        if before:  # the checkpoint of the old run has this entry, too
            state.identity[_SKIPPED] = before
        line = f"begins at step {parent.step} of {parent.folder}"
        if parent.state == parent.step:
            self._say(line)
            return parent.path or "never"
        line += f": steps {parent.state + 1}-{parent.step} are computed"
        changed = self._find_changed(parent)
        if not changed:
            self._say(f"{line} again, and compared")
            return parent.path or "never"
        self._say(f"{line} first with its {changed}, and compared")
        self._parent = None  # they are compared already
        return self._compute(parent, changed)

    def settle(self, parts: Parts, step: int, folder: str | None) -> None:
        """Give the plugin its Plan, on every rank, when the state after `step` is restored. folder: of the
        results, None if nothing is written. Raises BadInput."""
        removes = None
        if self._without:
            self._without.identify(parts.state)
            removes = self._without.takes_all
            if folder and ranks.is_first():
                self._without.write(folder)
            parts.say(f"without {describe_removed(self._without.ids)}: no batch has them")
        if not self._args.from_run:
            self.plugin.follow(Plan(0, removes=removes))
            return
        self._parts = parts
        points: list[int] = []  # steps at which the records of the old run are compared
        skipped: list[int] = []  # steps that the old run has left out
        # only rank 0 has read the old run
        if self._parent and step < self._parent.step:
            points = [point for point in self._parent.points if point > step]
            skipped = [number for number in self._parent.skipped if number > step]
        of_first = (self.facts, points, skipped, self._is_first_start)
        self.facts, points, skipped, is_first_start = ranks.broadcast_object(of_first)
        scores = parts.state.extras
        if is_first_start and isinstance(scores, Scores):
            scores.best = -math.inf  # the folder has no best.pth yet
        parts.state.identity.pop(_SKIPPED, None)
        if self._skipped:
            parts.state.identity[_SKIPPED] = self._args.skip_steps
            if max(self._skipped) > parts.most_steps:
                raise BadInput(
                    f"--skip_steps {self._args.skip_steps}: the run ends at step {parts.most_steps}: "
                    "expected earlier steps"
                )
        left_out = frozenset([*skipped, *self._skipped])
        self.plugin.follow(Plan(self.facts["step"], points, left_out, removes, compute.ONLY in os.environ))
        if ranks.is_first():
            shutil.rmtree(os.path.join(self._folder, _COMPUTED), ignore_errors=True)

    def _check(self, step: int, line: dict[str, Any]) -> str:
        """Return the first difference from the old run up to a step; see Forked."""
        if self._write_sums:
            self._write_sums()  # the check reads them
        assert self._parent is not None
        parent = self._parent
        difference = parent.check(self._folder, step, line)
        if difference:
            if changes := "; ".join(parent.find_changes(self._describe_start())):
                difference += f"{NOT_THE_SAME}{changes}"
        elif step == parent.step:
            samples, states = parent.compared
            steps = f"steps {parent.state + 1}-{step}"
            text = f"{steps} are those of {parent.folder}"
            if parent.unrecorded:
                text = f"warning: it is not known that {text}: steps {parent.unrecorded} have no record"
            self._say(
                f"{text}; compared and the same: the samples of {counted(samples, 'step')}, and "
                f"{counted(states, 'state')}"
            )
        return difference

    def _describe_start(self) -> dict[str, Any]:
        """Return what this start computes with; see Parent.find_changes()."""
        parts = self._parts
        all_settings = arguments.settings(self._args)
        learned = arguments.without_operation(self._args, all_settings).keys() | _COMPUTE_OTHERWISE
        settings = {name: value for name, value in all_settings.items() if name in learned - _OF_A_START}
        return {
            "modules": parts.state.code,
            "code": git.find_commit(sys.argv[0]),
            "training data": parts.loader.receipt.fingerprint,
            "data backend": getattr(parts.loader, "backend", ""),
            "settings": settings,
            "environment": environment.facts(),
        }

    def _find_facts(self, starts: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the facts of the run in the folder. Raises BadInput if it did not begin as this one."""
        facts: dict[str, Any] = (starts[0].get("parent") if starts else None) or {}
        if facts and self._args.at_step in (None, facts["step"]) and self._is_parent(facts):
            return facts
        began = f"step {facts['step']} of {facts['folder']}" if facts else "step 1"
        raise BadInput(
            f"{self._folder} holds a run that began at {began}, not at the step of --from and --at_step: "
            "use another --output_dir"
        )

    def _is_parent(self, facts: dict[str, Any]) -> bool:
        """Return whether the run of --from is the one of these facts, which may have been moved since."""
        if facts["folder"] == os.path.realpath(self._args.from_run):
            return True
        return bool(facts["run"]) and Parent(self._args.from_run, facts["step"]).run == facts["run"]

    def _find_changed(self, parent: Parent) -> str:
        """Return the options and processes of the old run that this start has changed, in words; "" without
        one. The steps between need those of the old run."""
        settings = arguments.settings(self._args)
        learned = arguments.without_operation(self._args, settings)
        old = {name: parent.settings.get(name, value) for name, value in learned.items()}
        names = [f"--{name} {old[name]}" for name, value in learned.items() if old[name] != value]
        # exact shards give the same bits on any number of processes
        is_exact = settings.get("exact_shards") is not None
        if ranks.world_size() != parent.world_size and not is_exact:
            names.append(f"{parent.world_size} processes")
        return ", ".join(names)

    def _compute(self, parent: Parent, changed: str) -> str:
        """Compute the steps between with the options of the old run, and return the path of the checkpoint
        after them. Called on rank 0; the others wait. Raises BadInput."""
        if self._run.topology.nodes > 1:
            raise BadInput(
                f"--at_step {parent.step}: {parent.folder} has no checkpoint of this step, and the steps "
                f"{parent.state + 1}-{parent.step} need its {changed}, which this start has not: begin at "
                f"step {parent.state}, or at another step whose checkpoint is there"
            )
        # what may change at a restart is that of this start, such as paths and the number of workers
        options = []
        for name, value in arguments.settings(self._args).items():
            may_change = self._args.roles.get(name) == OPERATION and name not in _OF_A_START
            if may_change and value not in (None, parent.settings.get(name)):
                options.append(f"--{name}={value}")
        for name, value in arguments.identity(self._args).items():
            old_value = parent.settings.get(name.removeprefix("--"), value)
            if old_value != value:
                raise BadInput(f"{name} {value}: that of {parent.folder} is {old_value}, and cannot change")
        folder = os.path.join(self._folder, _COMPUTED)
        path = compute.compute(parent, folder, os.path.abspath(sys.argv[0]), parent.world_size, options)
        # the new run continues the receipt of the steps between
        receipt = os.path.join(folder, "receipt.bin")
        if os.path.exists(receipt):
            shutil.copy(receipt, self._folder)
        return path

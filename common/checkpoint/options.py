"""The options of a job that trains."""

import argparse
import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

from bootfile.console.parser import plain
from bootfile.exact.due import Interval
from bootfile.ground.errors import BadInput
from bootfile.machine import levels
from common.console.arguments import (
    FLAG,
    IDENTITY,
    OPERATION,
    boolean,
    interval,
    non_negative_float,
    non_negative_int,
    positive_float,
    positive_int,
)
from common.distributed import devices
from common.platform.place import default_grace
from common.run import output
from common.run.run import JobParser

_MOST_THREADS = 1024  # an operator of a process takes at most as many
_PARTIAL = ",partial"  # at the end of --weights: use the tensors that fit, if others do not


class TrainingParser(JobParser):
    """The parser of a job that trains: a JobParser with the options of a Run and a Checkpointer. A job may
    define those of the group "run" itself."""

    def __init__(self, description: str | None):
        super().__init__(description)
        self.checks += [_split_weights, check, _check_level]

    def parse_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        """Add the options of a Run and a Checkpointer to those of the job, and return the Arguments."""
        options = self.by_name()
        if "batch_size" in options:  # the job's own, which also takes N/gpu
            action = self._option_string_actions[options["batch_size"]]
            # for an option without a type, argparse has one in its registry
            parse_number = self._registry_get("type", action.type, action.type)
            action.type = functools.partial(_batch_size, parse_number)
            action.metavar = action.metavar or "N|N/gpu"
            # first: the other checks read --batch_size as a number
            self.checks.insert(0, _count_batch)
        options_of_job = {action.dest for action in self._actions}
        _add_run_arguments(self)  # after the job's own, as --help shows them
        _add_arguments(self)
        # the job may have called set_defaults() for options that are added only now: argparse sets a default
        # of an option that it knows already
        late = {name: value for name, value in self._defaults.items() if name not in options_of_job}
        self.set_defaults(**late)
        self.roles |= {"batch_size_per_gpu": OPERATION, "partial_weights": OPERATION}  # which the checks add
        return super().parse_args(args, namespace)

    def read_defaults(self, parsed: argparse.Namespace) -> dict[str, Any]:
        """Return the options of the run of --from, which are the defaults of this start."""
        if not parsed.from_run:
            return {}
        from common.checkpoint import fork  # most runs begin with step 1

        return fork.inherit(parsed)


def _distance(text: str) -> Interval:
    """Parse "1000" or "1000step", "5epochs", or "0", also "0epochs": none is kept."""
    if re.fullmatch("0(steps?|epochs?)?", text):
        return Interval(0)
    with contextlib.suppress(argparse.ArgumentTypeError):  # its line would offer seconds
        distance = interval(text)
        if distance.unit != "s":
            return distance
    expected = "a number of steps (1000step) or epochs (5epochs), or 0"
    raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")


def _threads(text: str) -> int:
    """Parse the number of threads. Far more than a machine has cores would stop the whole machine."""
    count: int = positive_int(text)
    if count > _MOST_THREADS:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {_MOST_THREADS}: expected one a core")
    return count


def _batch_size(parse_number: Callable[[str], Any], text: str) -> Any:
    """Parse N with the job's own type, or N/gpu, which stays a text until _count_batch()."""
    count, slash, unit = text.partition("/")
    if not slash:
        return parse_number(text)
    if unit != "gpu":
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of samples (128), or of each GPU (32/gpu)"
        )
    positive_int(count)
    return text


def _count_batch(args: argparse.Namespace) -> dict[str, int | None]:
    """Return --batch_size as the number of samples of a step over all processes, and N as batch_size_per_gpu
    if it is N/gpu, else None."""
    count, slash, _ = str(args.batch_size).partition("/")
    if not slash:
        return {"batch_size_per_gpu": None}
    world_size = devices.find_topology(args).world_size
    return {"batch_size": int(count) * world_size, "batch_size_per_gpu": int(count)}


def _split_weights(args: argparse.Namespace) -> dict[str, Any]:
    """Return --weights FILE,partial as two values. Raises BadInput."""
    if not (args.weights or "").endswith(_PARTIAL):
        return {"partial_weights": False}
    path = args.weights.removesuffix(_PARTIAL)
    if not path:
        raise BadInput(f"--weights {args.weights}: expected FILE{_PARTIAL}")
    return {"weights": path, "partial_weights": True}


def _check_level(args: argparse.Namespace) -> dict[str, str]:
    """Compute with the instruction set of --cpu_level from here on. Raises BadInput if torch does not."""
    if args.cpu_level in (None, levels.NATIVE):
        return {}
    from bootfile.machine import instructions, vector_math  # only a run with a level needs them

    # torch has read the variables of the level when it was imported: here it is too late to set them
    instructions.check(args.cpu_level)
    vector_math.protect()
    if vars(args).get("compile"):  # an option of some jobs
        raise BadInput(
            f"--cpu_level {args.cpu_level} --compile: compiled code has the instructions of this CPU: leave "
            "one of them out"
        )
    return {}


def _add_run_arguments(parser: JobParser) -> None:
    """Add the options of a Run, but not those that the job has defined itself."""
    options_of_job = parser.by_name().keys() | {action.dest for action in parser._actions}

    def add(*names: str, **options: Any) -> None:
        if options_of_job.isdisjoint(map(plain, names)):  # else the job's own counts
            group.add_argument(*names, **options)

    group = parser.add_argument_group("run", role=OPERATION)
    add("--output_dir", "--train_url", help="folder for results (default: a new one)")
    add("--report_every", type=interval, default="10s", help="report interval (default: 10s)")
    add("--enable_gpu", type=boolean, help="default: true if there is a GPU")
    help = "end each epoch after N steps, for a trial (default: no limit)"
    add("--epoch_steps", role=IDENTITY, type=positive_int, help=help)
    add("--max_steps", role="", type=positive_int, help="end after N steps (default: no limit)")
    help = "threads of an operator on the CPU, in each process (default: the run's, first cores / processes)"
    add("--threads", type=_threads, metavar="N", help=help)
    add(levels.OPTION, choices=levels.LEVELS, help=levels.HELP)


def _add_arguments(parser: JobParser) -> None:
    """Add the options of a Checkpointer."""
    add = parser.add_argument_group("checkpoints", role=OPERATION).add_argument
    help = (
        "where to continue: auto (the newest checkpoint in --output_dir), never, or a file or folder "
        "(default: auto with --output_dir, else never)"
    )
    add("--resume", metavar="auto|never|PATH", help=help)
    help = (
        "initial weights: best.pth, epoch_<n>.pth, step_<n>.pt, or a file of another program; FILE,partial: "
        "those of its tensors that fit (default: none)"
    )
    add("--weights", metavar="FILE", help=help)
    help = "begin a new run at a step of this one, with its options where none are given; see --at_step"
    add("--from", dest="from_run", metavar="RUN", help=help)
    help = "the step of --from, whose checkpoint it may not have any more (default: that of its newest one)"
    add("--at_step", type=non_negative_int, metavar="N", help=help)
    add("--skip_steps", metavar="A-B", help="leave out these steps of the new run, for example 400-420")
    help = "leave out these samples of every batch: a file with an id on each line; see launch replay"
    add("--without", metavar="FILE", help=help)
    add("--evaluate", **FLAG, help="only evaluate the weights of --weights or --resume")
    help = (
        "time between two checkpoints: 200 (steps), 90s or 1epoch; also by time within a long epoch "
        "(default: 1epoch)"
    )
    add("--save_every", type=interval, default="1epoch", help=help)
    add("--keep", type=positive_int, default=3, help="number of newest checkpoints to keep (default: 3)")
    help = "also keep a checkpoint after every 1000step or 5epochs, and save it then (default: the run's)"
    add("--keep_every", type=_distance, metavar="N|Nepochs|0", help=help)
    help = "also evaluate after every N steps (default: 0, only after each epoch)"
    add("--evaluate_every", type=non_negative_int, default=0, metavar="N", help=help)
    help = "false: no epoch_<n>.pth and no best.pth; the last checkpoint has the weights (default: true)"
    add("--epoch_weights", type=boolean, default=True, help=help)
    help = "after SIGTERM or Ctrl-C: time to finish the step, save and exit (default: 25; on SageMaker 100)"
    add("--grace", type=positive_float, default=default_grace(os.environ), metavar="SECONDS", help=help)
    help = "save and end if aws, google, azure or alibaba takes the machine, or FILE exists (default: off)"
    add("--preemption", metavar="CLOUD|FILE", help=help)
    help = "any: another rank saves the last step if rank 0 is lost; needs a shared mount (default: first)"
    add("--survivors", choices=["first", "any"], default="first", help=help)
    help = "say where each rank is if no step ends for so long; 0: never (default: 60 or 20 median steps)"
    add("--stuck_after", type=non_negative_float, default=60, metavar="SECONDS", help=help)
    help = "true: end the run with exit code 5 then, for a restart by the platform (default: false)"
    add("--stuck_exit", type=boolean, default=False, help=help)
    help = "stop after N consecutive steps without a finite loss and gradient (default: 20)"
    add("--max_bad_steps", type=positive_int, default=20, help=help)
    help = "with exact shards: another process computes a shard of every N-th step again (default: 0, never)"
    add("--recheck", type=non_negative_int, default=0, metavar="N", help=help)
    help = "name the rank for which the others wait more than this share of the time (default: 0.1)"
    add("--slow_rank", type=positive_float, default=0.1, metavar="SHARE", help=help)
    help = "true: keep the loss of each sample, for `launch data RUN --around STEP` (default: false)"
    add("--sample_losses", type=boolean, default=False, help=help)
    help = "package that also gets the settings and metrics (default: none)"
    add("--tracker", choices=["mlflow", "wandb", "swanlab", "trackio"], help=help)


def check(args: argparse.Namespace) -> dict[str, Any]:
    """Return the default of --resume, and --skip_steps in one form. Raises BadInput for options that
    contradict each other."""
    if args.tracker:
        from common.run import trackers  # most jobs have none

        trackers.check(args.tracker)
    if args.preemption:
        from bootfile.processes import notices  # most jobs ask for no notices

        notices.check(args.preemption, is_elastic=bool(vars(args).get("elastic")))
    changes = {}
    if args.from_run or args.at_step is not None or args.skip_steps is not None:
        from common.checkpoint import fork  # most runs begin with step 1

        changes = fork.check(args)
    if args.without:
        from common.checkpoint import without  # most runs have all samples

        without.check(args)
    # A restart is the same command. Without --output_dir each start has a new folder: nothing to resume.
    resume = args.resume or ("auto" if args.output_dir else "never")
    if args.evaluate and (resume not in ("auto", "never")) == bool(args.weights):
        raise BadInput("--evaluate needs one of --weights FILE and --resume PATH: the weights to evaluate")
    if resume == "auto" and not args.output_dir:
        raise BadInput(
            "--resume auto without --output_dir: name the folder of the run to continue, for example "
            f"--output_dir {os.path.join(output.PARENT, output.LATEST)}"
        )
    return {"resume": resume, **changes}

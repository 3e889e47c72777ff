"""The options that decide how a run saves, resumes and stops."""

import argparse
import os

from common import output
from common.arguments import JobParser, interval, positive_float, positive_int
from common.exits import BadInput

# options that decide what is learned
IDENTITY = (
    "dataset", "custom_data", "image_size", "arch", "batch_size", "bn_weight_decay", "seed",
)  # fmt: skip
# options that decide where and how, and not what is learned
OPERATION = {
    "output_dir", "output_url", "resume", "save_every", "keep", "grace", "max_bad_steps", "report_every",
    "enable_gpu", "data_url", "stage", "cache_dir", "pack", "cache", "cache_mode", "workers",
    "data_backend", "ray_address", "init_method", "rank", "world_size", "local_rank", "processes_per_node",
    "rank_level", "timeout", "weights", "evaluate",
}  # fmt: skip


class TrainingParser(JobParser):
    """The parser of a job that trains: a JobParser with the options of a Checkpointer."""

    def __init__(self, description: str | None):
        super().__init__(description)
        _add_arguments(self)
        self.checks.append(check)


def _add_arguments(parser: JobParser) -> None:
    parser.add_argument(
        "--resume",
        metavar="{auto,never,PATH}",
        help="checkpoint to continue from (default: auto, the newest in --output_dir; without one, never)",
    )
    parser.add_argument(
        "--weights",
        metavar="FILE",
        help="initial weights: best.pth, epoch_<n>.pth, step_<n>.pt (default: none)",
    )
    parser.add_argument(
        "--evaluate", action="store_true", help="only evaluate the weights of --weights or --resume"
    )
    parser.add_argument(
        "--save_every", type=interval, default="1epoch", help="200 (steps), 90s or 1epoch (default: 1epoch)"
    )
    parser.add_argument(
        "--keep", type=positive_int, default=3, help="newest checkpoints to keep (default: 3)"
    )
    parser.add_argument(
        "--grace", type=positive_float, default=25,
        help="seconds from SIGTERM to the end at the latest (default: 25)",
    )  # fmt: skip
    parser.add_argument(
        "--max_bad_steps", type=positive_int, default=20,
        help="stop after N consecutive steps without a finite loss and gradient (default: 20)",
    )  # fmt: skip


def check(args: argparse.Namespace) -> None:
    """Set the default of --resume, and raise BadInput for options that contradict each other."""
    if args.resume is None:
        args.resume = "auto" if args.output_dir else "never"
    if args.evaluate and (args.resume not in ("auto", "never")) == bool(args.weights):
        raise BadInput("--evaluate needs one of --weights FILE and --resume PATH: what to evaluate")
    if args.resume == "auto" and not args.output_dir:
        raise BadInput(
            "--resume auto without --output_dir: name the folder of the run to continue, for example "
            f"--output_dir {os.path.join(output.PARENT, output.LATEST)}"
        )

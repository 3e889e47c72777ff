"""Measure the training speed of the jobs, compared with a published loop.

    python -m tests.benchmarks.train [--rounds 5] [--json]
    python -m tests.benchmarks.train --arch resnet50 [--data_url IMAGENET]

resnet18: CIFAR-10 (generated without --data_url) with a loop after ModelArts' published sample, train.py and
its variants. resnet50: jobs/imagenet.py with images in memory, and with JPEG files. Every contestant is
started once. Then all take turns, while the others are stopped. Loading, compiling (without a cache) and
warming up come before the first round. Ratios are to the first contestant in the same round.

Waiting: the share of the time in which the loop had no batch. Memory: the maximum of one process, on a GPU as
allocated by torch. Compiling: as the job reports, else the extra time of its first report. Start: from the
start of the process to its first report.
"""

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
from typing import NoReturn

import torch

from common.console import arguments
from common.distributed.entry import entry
from common.ground.exits import BadInput
from common.run import starts
from launch.bench import log
from tests.benchmarks import contestants as jobs
from tests.benchmarks import turns
from tests.benchmarks.contestants import ROOT, Contestant
from tests.benchmarks.rounds import describe, divide, make_parser, spread
from tests.benchmarks.turns import Runner

_INTERRUPTED = 128 + signal.SIGINT
_MONITORING = "TORCH_NCCL_ENABLE_MONITORING"  # it would report a stopped process as hanging
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@entry
def main() -> None:
    """Measure and print a table (or JSON). Raises BadInput, also if a job fails."""
    args = _parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() and args.enable_gpu is not False else "cpu")
    _complete(args, device)
    contestants, left_out = jobs.choose(args, device)
    for name, reason in left_out.items():
        log(f"{name} is skipped: {reason}")
    machine = describe()  # with the load before the jobs run
    signal.signal(signal.SIGTERM, _leave)
    try:
        rows = _measure(args, contestants)
    except KeyboardInterrupt:
        log("interrupted: the jobs were ended")
        sys.exit(_INTERRUPTED)
    found = {
        "machine": machine, "arch": args.arch, "image_size": args.image_size, "batch_size": args.batch_size,
        "rounds": args.rounds, "report_every": args.report_every, "left_out": left_out, "rows": rows,
    }  # fmt: skip
    print(json.dumps(found, indent=2) if args.json else format_table(found))


def _parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, 5)
    add, count = parser.add_argument, arguments.positive_int
    add("--cache_dir", default="output_dir/index", help="for indexes (default: %(default)s)")
    add("--json", action="store_true", help="print JSON")
    add("--arch", choices=["resnet18", "resnet50"], default="resnet18", help="default: resnet18")
    add("--jobs", type=_names, help="contestants, separated by commas; ratios are to the first")
    add("--data_url", metavar="DIR", help="CIFAR-10, or a folder with train/<class>/* (default: generated)")
    add("--batch_size", type=count, help="default: 128; resnet50: 32, on a GPU 256")
    add("--report_every", type=count, help="steps of a turn (default: 2, on a GPU 50)")
    add("--image_size", type=count, help="for resnet50 (default: 224)")
    add("--enable_gpu", type=arguments.boolean, help="default: true if there is a GPU")
    add("--compile", type=arguments.boolean, help="also run compiled networks (default: on a GPU)")
    add("--timeout", type=arguments.positive_float, default=1800, help="seconds of a turn (default: 1800)")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if len(set(names)) < len(names) or "" in names:
        raise argparse.ArgumentTypeError(f"{text!r} has an empty or a repeated name")
    return names


def _complete(args: argparse.Namespace, device: torch.device) -> None:
    """Set the defaults that depend on other options."""
    gpu, small = device.type == "cuda", args.arch == "resnet18"
    if args.enable_gpu and not gpu:
        raise BadInput(f"--enable_gpu=true, but torch {torch.__version__} sees no GPU")
    if small and args.image_size not in (None, 32):
        raise BadInput(f"--image_size {args.image_size}: expected 32 (CIFAR-10), or add --arch resnet50")
    args.image_size = args.image_size or (32 if small else 224)
    args.batch_size = args.batch_size or (128 if small else 256 if gpu else 32)
    args.report_every = args.report_every or (50 if gpu else 2)


def _leave(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)  # through the context managers that end the jobs


def _measure(args: argparse.Namespace, contestants: dict[str, Contestant]) -> list[dict]:
    """Return a row for each contestant. The lists in it have one figure for each round."""
    images = args.report_every * args.batch_size
    with contextlib.ExitStack() as stack:
        kept = tempfile.TemporaryDirectory(prefix="bootfile-bench-", ignore_cleanup_errors=True)
        folder = stack.enter_context(kept)
        rows: list[dict] = []
        reports: dict[str, list[dict]] = {}
        runners: list[Runner] = []
        for number, (name, contestant) in enumerate(contestants.items()):
            output = os.path.join(folder, str(number))
            command = [*contestant.command, "--output_dir", output]
            # New folders: the caches of earlier runs are not used.
            env = {_MONITORING: "0"} | {each: os.path.join(output, each.lower()) for each in _CACHES}
            runner = stack.enter_context(Runner(name, command, output, env, ROOT))
            rows.append({"name": name, "images_per_s": []})
            reports[name] = []
            runners.append(runner)
            log(f"{name}: starting")
            warm = runner.turn(images, args.timeout)
            rows[-1] |= _start(runner, contestant, warm)
            log(f"{name}: first report after {rows[-1]['start_s']:.1f} s")
        for number in range(args.rounds):
            pairs = list(zip(rows, runners, strict=True))
            for row, runner in pairs[:: -1 if number % 2 else 1]:  # every other round reversed, against drift
                turn = runner.turn(images, args.timeout)
                row["images_per_s"].append(turns.rate(turn))
                reports[row["name"]] += turn
                log(f"round {number + 1} of {args.rounds}: {row['name']} {turns.rate(turn):.1f} images/s")
    for row in rows:
        own = reports[row["name"]]
        row["ratio"] = divide(row["images_per_s"], rows[0]["images_per_s"])
        row["waiting"] = sum(report["data_time"] for report in own) / turns.seconds(own)
        row["memory_mb"] = max(report["memory_mb"] for report in own)
    return rows


def _start(runner: Runner, contestant: Contestant, warm: list[dict]) -> dict:
    """Return the seconds of the start of a contestant, and those of compiling in it."""
    start = {}
    with contextlib.suppress(FileNotFoundError), open(os.path.join(runner.output_dir, starts.FILE)) as file:
        start = json.loads(file.readline())
    compiling = start.get("laps", {}).get("compilation")
    first = runner.first
    if contestant.compiled and compiling is None:
        compiling = turns.seconds([first]) * (1 - turns.rate([first]) / turns.rate(warm))
    return {"start_s": first["time"] - runner.started, "compile_s": compiling}


def format_table(found: dict) -> str:
    """Return the table. found: the object that `--json` prints."""
    lines = [
        f"\n{found['machine']}",
        f"{found['arch']}, {found['image_size']} pixels, batches of {found['batch_size']}; medians of "
        f"{found['rounds']} rounds of {found['report_every']} steps (range)",
        f"{'':<16}{'images/s':>27}{'ratio':>22}{'waiting':>9}{'MB':>8}{'compiling':>11}{'start':>8}",
    ]
    for row in found["rows"]:
        compiling = "-" if row["compile_s"] is None else f"{row['compile_s']:.1f} s"
        lines.append(
            f"{row['name']:<16}{spread(row['images_per_s'], '.1f'):>27}{spread(row['ratio'], '.2f', 'x'):>22}"
            f"{row['waiting']:>9.1%}{row['memory_mb']:>8.0f}{compiling:>11}{row['start_s']:>6.1f} s"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()

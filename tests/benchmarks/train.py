"""Measure the training speed of the jobs, compared with a published loop.

    python -m tests.benchmarks.train [--rounds 5] [--json]
    python -m tests.benchmarks.train --arch resnet50 [--data_url IMAGENET]
    python -m tests.benchmarks.train --arch shufflenet_v2_x0_5 --jobs pytorch,dali -- --workers 10

resnet18: CIFAR-10 (generated without --data_url) with a loop after ModelArts' published sample, train.py and
its variants. Other networks: jobs/imagenet.py with images in memory, and with JPEG files and each backend. In
each round every contestant is started once, and its third report counts. Ratios are to the first contestant
in the same round.

Waiting: the share of the time in which the loop had no batch. Memory: the maximum of one process, on a GPU as
allocated by torch. Compiling: as the job reports it, in the first round, which has an empty cache. Start:
from the start of the process to its first report.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile

import torch

from bootfile.ground.errors import BadInput
from common.compute import networks
from common.console import arguments
from common.distributed.entry import entry
from common.ground.files import ROOT
from datasets.loaders import backends
from launch.loader_rates import log
from tests.benchmarks import generated, jobs
from tests.benchmarks.rounds import describe, divide, make_parser, spread

BASELINE = "seed loop"  # ratios are to this contestant
_ENDLESS = ("--epochs", "10000", "--seed", "0")
# Saves are not timed.
_JOB = (*_ENDLESS, "--resume", "never", "--save_every", "1000000000", "--epoch_weights", "false")
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@entry
def main() -> None:
    """Measure and print a table (or JSON). Raises BadInput, also if a job fails."""
    args = _parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() and args.enable_gpu is not False else "cpu")
    _complete(args, device)
    contestants = (_small if args.arch == "resnet18" else _large)(args, device)
    for name in args.jobs or ():
        if name not in contestants:
            raise BadInput(f"--jobs: {name!r} is not one of {', '.join(contestants)} (--arch {args.arch})")
    found = {
        "machine": describe(), "arch": args.arch, "image_size": args.image_size,
        "batch_size": args.batch_size, "rounds": args.rounds, "report_every": args.report_every,
        "rows": _measure(args, {name: contestants[name] for name in args.jobs or contestants}),
    }  # fmt: skip
    print(json.dumps(found, indent=2) if args.json else _table(found))


def _parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, 5)
    add, count = parser.add_argument, arguments.positive_int
    add("--cache_dir", default="output_dir/index", help="for indexes (default: %(default)s)")
    add("--json", action="store_true", help="print JSON")
    add("--arch", type=networks.arch, default="resnet18", help="default: resnet18")
    add("--jobs", type=lambda names: names.split(","), help="contestants, separated by commas (default: all)")
    add("--data_url", metavar="DIR", help="CIFAR-10, or a folder with train/<class>/* (default: generated)")
    add("--batch_size", type=count, help="default: 128; not for resnet18: 32, on a GPU 256")
    add("--report_every", type=count, help="steps of a report (default: 2, on a GPU 50)")
    add("--image_size", type=count, help="not for resnet18 (default: 224)")
    add("--enable_gpu", type=arguments.boolean, help="default: true if there is a GPU")
    add("--compile", type=arguments.boolean, help="also run compiled networks (default: on a GPU)")
    add("--timeout", type=arguments.positive_float, default=1800, help="seconds of a turn (default: 1800)")
    add("job", nargs="*", help="after --: arguments of jobs/imagenet.py, for example --workers 10")
    return parser.parse_args()


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


def _small(args: argparse.Namespace, device: torch.device) -> dict[str, list[str]]:
    """Return the commands of the contestants for CIFAR-10."""
    data = ["--custom_data", "true"]  # 5,000 images: on a GPU an epoch of them is shorter than a report
    if args.data_url or device.type == "cuda":
        data = ["--data_url", os.path.abspath(args.data_url or generated.cifar_folder(args.cache_dir))]
    shared = [*_shared(args, device), *data, "--dataset", "cifar10"]

    def job(name: str, *extra: str) -> list[str]:
        return [sys.executable, os.path.join(ROOT, "jobs", name), *_JOB, *shared, *extra]

    compiled = [] if args.compile is None else ["--compile", str(args.compile).lower()]
    several = ["--processes_per_node", "2"] if device.type == "cpu" else []
    return {
        BASELINE: [sys.executable, "-m", "tests.benchmarks.seed_loop", *_ENDLESS, *shared],
        "train.py": job("train.py"),
        "train_amp.py": job("train_amp.py"),
        "train_fast.py": job("train_fast.py", *compiled),
        "train_ddp.py": job("train_ddp.py", *several),
    }


def _large(args: argparse.Namespace, device: torch.device) -> dict[str, list[str]]:
    """Return the commands of the contestants for ImageNet."""
    job = [sys.executable, os.path.join(ROOT, "jobs", "imagenet.py"), *_JOB, *_shared(args, device)]
    job += ["--arch", args.arch, "--image_size", str(args.image_size), "--training_only"]
    job += ["--cache_dir", os.path.abspath(args.cache_dir), *args.job]
    synthetic, plain = [*job, "--data_backend", "synthetic"], ["--compile", "false", "--amp"]
    folder = args.data_url or generated.image_folder(args.cache_dir)  # several steps an epoch
    data = ["--data_url", os.path.abspath(folder), "--data_backend"]
    commands = {"float32": [*synthetic, *plain, "false"], "mixed": [*synthetic, *plain, "true"]}
    if device.type == "cuda" if args.compile is None else args.compile:
        commands["mixed compiled"] = [*synthetic, "--compile", "true", "--amp", "true"]
    here = [name for name, reason in backends.reasons(device).items() if not reason and name != "synthetic"]
    return commands | {backend: [*job, *data, backend, *plain, "true"] for backend in here}


def _shared(args: argparse.Namespace, device: torch.device) -> list[str]:
    return [
        "--batch_size", str(args.batch_size), "--report_every", str(args.report_every),
        "--enable_gpu", str(device.type == "cuda").lower(),
    ]  # fmt: skip


def _measure(args: argparse.Namespace, contestants: dict[str, list[str]]) -> list[dict]:
    """Return a row for each contestant. The lists in it have one figure for each round."""
    turns: dict[str, list[dict]] = {name: [] for name in contestants}
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {name: os.path.join(folder, name) for name in _CACHES}
        for number in range(args.rounds):
            for name in list(contestants)[:: -1 if number % 2 else 1]:  # every other round reversed
                turns[name].append(jobs.measure(contestants[name], args.timeout, env))
                rate = turns[name][-1]["images_per_s"]
                log(f"round {number + 1} of {args.rounds}: {name} {rate:.1f} images/s")
    rows: list[dict] = []
    for name, own in turns.items():
        rates = [turn["images_per_s"] for turn in own]
        rows.append({
            "name": name, "images_per_s": rates,
            "ratio": divide(rates, rows[0]["images_per_s"] if rows else rates),
            "waiting": statistics.mean(turn["waiting"] for turn in own),
            "memory_mb": max(turn["memory_mb"] for turn in own),
            "start_s": statistics.median(turn["start_s"] for turn in own),
            "compile_s": own[0]["compile_s"],
        })  # fmt: skip
    return rows


def _table(found: dict) -> str:
    lines = [
        f"\n{found['machine']}",
        f"{found['arch']}, {found['image_size']} pixels, batches of {found['batch_size']}; medians of "
        f"{found['rounds']} rounds, the third report of {found['report_every']} steps (range)",
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

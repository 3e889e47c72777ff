"""Measure the training speed of the jobs, compared with a published loop and with the peak of the device.

    python -m tests.benchmarks.train [--rounds 5] [--json]
    python -m tests.benchmarks.train --arch resnet50 [--data_url IMAGENET]

resnet18: CIFAR-10 (generated without --data_url) with a loop after ModelArts' published sample, train.py and
its variants. resnet50: jobs/imagenet.py with images in memory, and with JPEG files. Every contestant is
started once. Then all take turns, while the others are stopped. Loading, compiling (without a cache) and
warming up come before the first round. Ratios are to the first contestant in the same round.

TFLOP/s: images/s times the operations of forward and backward for an image (convolutions and matrix products;
a multiplication and addition count as 2). Peak: the most TFLOP/s of any operation in the contestant's
precision over all rounds: matrix products, convolutions, and the contestants themselves. The operation is
printed. Waiting: the share of the time in which the loop had no batch. Memory:
the maximum of one process, on a GPU as allocated by torch. Compiling: as the job reports, else the extra time
of its first report. Start: from the start of the process to its first report.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
from typing import NoReturn

import torch

from common import arguments, starts
from common.entry import entry
from common.exits import BadInput
from launch.bench import log
from tests.benchmarks import contestants as jobs
from tests.benchmarks import peak as device_peak
from tests.benchmarks import turns
from tests.benchmarks.contestants import ROOT, Contestant
from tests.benchmarks.machine import describe
from tests.benchmarks.output import make_parser
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
        rows, peaks = _measure(args, contestants, device)
    except KeyboardInterrupt:
        log("interrupted: the jobs were ended")
        sys.exit(_INTERRUPTED)
    found = {
        "machine": machine, "arch": args.arch, "image_size": args.image_size, "batch_size": args.batch_size,
        "rounds": args.rounds, "report_every": args.report_every,
        "gflop_per_image": device_peak.count_flop(args.arch, args.image_size) / 1e9,
        "peaks": peaks, "left_out": left_out, "rows": rows,
    }  # fmt: skip
    _relate(found)
    print(json.dumps(found, indent=2) if args.json else format_table(found))


def _parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, "train")
    add, count = parser.add_argument, arguments.positive_int
    add("--arch", choices=["resnet18", "resnet50"], default="resnet18", help="default: resnet18")
    add("--jobs", type=_names, help="contestants, separated by commas; ratios are to the first")
    add("--data_url", metavar="DIR", help="CIFAR-10, or a folder with train/<class>/* (default: generated)")
    add("--rounds", type=count, default=5, help="default: 5")
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


def _measure(
    args: argparse.Namespace, contestants: dict[str, Contestant], device: torch.device
) -> tuple[list[dict], dict[str, dict]]:
    """Return a row for each contestant, with lists over the rounds, and the peaks by precision."""
    images = args.report_every * args.batch_size
    side = args.image_size if args.arch == "resnet18" else max(1, args.image_size // 4)  # after the stem
    dtypes = {"float32": torch.float32, "half": device_peak.mixed_dtype(device)}
    peaks: dict[str, dict] = {
        name: {"dtype": str(each).removeprefix("torch."), "rounds": []} for name, each in dtypes.items()
    }
    with contextlib.ExitStack() as stack:
        kept = tempfile.TemporaryDirectory(prefix="bootfile-bench-", ignore_cleanup_errors=True)
        folder = stack.enter_context(kept)
        rows: list[dict] = []
        runners: list[Runner] = []
        for number, (name, contestant) in enumerate(contestants.items()):
            output = os.path.join(folder, str(number))
            command = [*contestant.command, "--output_dir", output]
            # New folders: the caches of earlier runs are not used.
            env = {_MONITORING: "0"} | {each: os.path.join(output, each.lower()) for each in _CACHES}
            runner = stack.enter_context(Runner(name, command, output, env, ROOT))
            rows.append({"name": name, "precision": contestant.precision, "reports": []})
            runners.append(runner)
            log(f"{name}: starting")
            warm = runner.turn(images, args.timeout)
            rows[-1] |= _start(runner, contestant, warm, device)
            log(f"{name}: first report after {rows[-1]['start_s']:.1f} s")
        for number in range(args.rounds):
            for name, dtype in dtypes.items():
                peaks[name]["rounds"].append(device_peak.measure_peak(device, dtype, side, args.batch_size))
            pairs = list(zip(rows, runners, strict=True))
            for row, runner in pairs[:: -1 if number % 2 else 1]:  # every other round reversed, against drift
                row["reports"].append(runner.turn(images, args.timeout))
                rate = turns.rate(row["reports"][-1])
                log(f"round {number + 1} of {args.rounds}: {row['name']} {rate:.1f} images/s")
    return rows, peaks


def _start(runner: Runner, contestant: Contestant, warm: list[dict], device: torch.device) -> dict:
    """Return the seconds of the start and the number of devices of a contestant."""
    start = {}
    with contextlib.suppress(FileNotFoundError), open(os.path.join(runner.output_dir, starts.FILE)) as file:
        start = json.loads(file.readline())
    compiling = start.get("laps", {}).get("compilation")
    first = runner.first
    if contestant.compiled and compiling is None:
        compiling = turns.seconds([first]) * (1 - turns.rate([first]) / turns.rate(warm))
    processes = start.get("environment", {}).get("world size", 1)
    return {
        "start_s": first["time"] - runner.started, "compile_s": compiling,
        "devices": processes if device.type == "cuda" else 1,
    }  # fmt: skip


def _relate(found: dict) -> None:
    """Replace the reports by figures: [median, least, greatest] over the rounds.

    A peak becomes the greatest over the rounds, and its source. A contestant that is faster than all measured
    operations is the peak, so no share exceeds 1.
    """
    base = [turns.rate(reports) for reports in found["rows"][0]["reports"]]
    for row in found["rows"]:
        rounds = row.pop("reports")
        reports = [report for each in rounds for report in each]
        rates = [turns.rate(each) for each in rounds]
        speeds = [rate * found["gflop_per_image"] / 1e3 for rate in rates]
        fastest = device_peak.Peak(max(speeds) / row["devices"], row["name"])
        found["peaks"][row["precision"]]["rounds"].append(fastest)
        row["images_per_s"] = _spread(rates)
        row["ratio"] = _spread([rate / other for rate, other in zip(rates, base, strict=True)])
        row["tflop_per_s"] = _spread(speeds)
        row["waiting"] = sum(report["data_time"] for report in reports) / turns.seconds(reports)
        row["memory_mb"] = max(report["memory_mb"] for report in reports)
    for peak in found["peaks"].values():
        peak["tflop_per_s"], peak["source"] = max(peak.pop("rounds"))
    for row in found["rows"]:
        limit = row["devices"] * found["peaks"][row["precision"]]["tflop_per_s"]
        row["share_of_peak"] = [speed / limit for speed in row["tflop_per_s"]]


def _spread(values: list[float]) -> list[float]:
    return [statistics.median(values), min(values), max(values)]


def format_table(found: dict) -> str:
    """Return the table. found: the object that `--json` prints."""
    peaks = [
        f"peak of {peak['dtype']}: {peak['tflop_per_s']:.3g} TFLOP/s ({peak['source']})"
        for peak in found["peaks"].values()
    ]
    lines = [
        f"\n{found['machine']}",
        f"{found['arch']}, {found['image_size']} pixels, {found['gflop_per_image']:.2f} GFLOP an image, "
        f"batches of {found['batch_size']}; medians of {found['rounds']} rounds of {found['report_every']} "
        "steps (range)",
        *peaks,
        f"{'':<16}{'images/s':>9}{'':18}{'ratio':>7}{'':14}{'TFLOP/s':>8}{'of peak':>9}{'waiting':>9}"
        f"{'MB':>8}{'compiling':>11}{'start':>8}",
    ]
    for row in found["rows"]:
        rate, ratio = row["images_per_s"], row["ratio"]
        compiling = "-" if row["compile_s"] is None else f"{row['compile_s']:.1f} s"
        lines.append(
            f"{row['name']:<16}{rate[0]:>9.1f}{_range(rate, '.1f'):<18}{ratio[0]:>6.2f}x"
            f"{_range(ratio, '.2f'):<14}{row['tflop_per_s'][0]:>8.3g}{row['share_of_peak'][0]:>9.1%}"
            f"{row['waiting']:>9.1%}{row['memory_mb']:>8.0f}{compiling:>11}{row['start_s']:>6.1f} s"
        )
    return "\n".join(lines)


def _range(values: list[float], form: str) -> str:
    return f" ({values[1]:{form}}-{values[2]:{form}})"


if __name__ == "__main__":
    main()

"""Test and measure the jobs on this machine's GPU: `make gpu`.

    python -m tests.gpu [--data_url FOLDER] [--stages tests,waits]
    python -m tests.gpu --device cpu                     a rehearsal: every command, tiny, on the CPU

The first stages test correctness: GPU tests, compiled against plain, SIGTERM and resume. The others measure
where the host waits, and figures with their targets. It takes at most 8 minutes, 4 more for CIFAR-10 to 94 %
(needs --data_url), and 2 more for several GPUs. If a stage fails, its row has the reason, and the rest
continues. gpu.json, gpu.md (a table), traces/ (with the longest kernels) and logs.tar.gz are in --output_dir.

Exit code: 0; 1 if a stage of correctness failed; 2 without a GPU.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile

from common.distributed.entry import entry

# isort: split
import torch

from bootfile.ground.errors import BadInput
from bootfile.machine.cores import available_cores
from common.console import arguments
from common.ground.files import ROOT
from tests.gpu import checks, figures, report
from tests.gpu.lab import Setting, Stage, run_stages

_MINUTES, _MINUTES_OF_ACCURACY, _MINUTES_OF_SEVERAL = 8.0, 4.0, 2.0
_MEMORY = "/dev/shm"  # outputs are written there, so that the disk does not affect the figures
_NEEDED, _NEEDED_SMALL = 8e9, 0.3e9  # bytes: a pack of 3.4 GB, data sets, checkpoints, compiled code
_FAILED = 1


@entry
def main() -> None:
    args = _parse_args()
    is_small = args.device == "cpu"
    if not is_small and not torch.cuda.is_available():
        built = torch.version.cuda
        reason = f"is built for CUDA {built} and sees none" if built else "is built without CUDA"
        raise BadInput(f"no GPU: torch {torch.__version__} {reason}; --device cpu runs a rehearsal")
    gpus = 0 if is_small else torch.cuda.device_count()
    stages, minutes = _choose(args, gpus)
    logs = os.path.join(args.output_dir, "logs")
    os.makedirs(logs, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    scratch = tempfile.mkdtemp(
        prefix="bootfile-gpu-", dir=find_scratch(_NEEDED_SMALL if is_small else _NEEDED)
    )
    machine = report.describe(is_small) | {"states": {} if is_small else {"begin": report.gpu_state()}}

    shown: list[str] = []

    def show(results: list[dict]) -> None:
        report.write(args.output_dir, machine, results)
        for result in results[len(shown) :]:
            line = f"{result['stage']}: {result['failed'] or 'done'} ({result['seconds']:.0f} s)"
            print(line, file=sys.stderr, flush=True)
            shown.append(result["stage"])
            if not is_small:
                machine["states"][result["stage"]] = report.gpu_state()

    try:
        gpu = "none" if is_small else report.gpu_name()
        setting = Setting(is_small, args.data_url, scratch, logs, _environment(scratch, is_small), gpus, gpu)
        results = run_stages(stages, setting, minutes, show)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        shutil.make_archive(logs, "gztar", logs)  # one file
    print(report.format_table(machine, results))
    if any(result["is_check"] and result["failed"] for result in results):
        sys.exit(_FAILED)


def find_scratch(needed: float) -> str:
    """Return a folder with so many bytes for the outputs of the jobs. Raises BadInput."""
    folders = [_MEMORY, tempfile.gettempdir()]
    for folder in folders:
        if os.access(folder, os.W_OK) and shutil.disk_usage(folder).free >= needed:
            return folder
    raise BadInput(f"{' and '.join(folders)} have less than {needed / 1e9:g} GB: set TMPDIR")


def _parse_args() -> argparse.Namespace:
    parser = arguments.Parser(__doc__)
    parser.prog = "python -m tests.gpu"
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal (default: cuda)")
    add("--data_url", metavar="FOLDER", help="folder with CIFAR-10 (default: skip that stage)")
    add("--stages", metavar="NAMES", help="separated by commas (default: all)")
    add("--minutes", type=arguments.positive_float, help="time limit (default: 8, 4 more with --data_url)")
    add("--output_dir", default=os.path.join(ROOT, "output_dir", "gpu"), help="default: output_dir/gpu")
    args = parser.parse_args()
    args.output_dir = os.path.abspath(args.output_dir)
    if args.data_url and not os.path.isdir(args.data_url):
        raise BadInput(f"--data_url {args.data_url}: no such folder")
    args.data_url = args.data_url and os.path.abspath(args.data_url)
    return args


def _choose(args: argparse.Namespace, gpus: int) -> tuple[list[Stage], float]:
    """Return the stages and the minutes that they may take. Raises BadInput."""
    is_small, minutes = args.device == "cpu", _MINUTES
    stages = [*checks.STAGES, *figures.STAGES]
    if gpus > 1 or is_small:
        stages.append(figures.SEVERAL)
        minutes += _MINUTES_OF_SEVERAL
    if args.data_url or is_small:
        stages.append(figures.ACCURACY)
        minutes += _MINUTES_OF_ACCURACY
    if is_small:  # two cores take longer
        stages, minutes = [stage._replace(seconds=600) for stage in stages], 60
    if args.stages:
        names = args.stages.split(",")
        if unknown := set(names) - {stage.name for stage in stages}:
            known = ", ".join(stage.name for stage in stages)
            raise BadInput(f"--stages {sorted(unknown)[0]}: expected one of {known}")
        stages = [stage for stage in stages if stage.name in names]
    return stages, args.minutes or minutes


def _environment(scratch: str, is_small: bool) -> dict[str, str]:
    """Return the environment of all commands, with one compiler cache."""
    # tests/conftest.py would compile with one process
    threads = os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, available_cores() // 4)))
    env = os.environ | {"PYTHONUNBUFFERED": "1", "TMPDIR": scratch, "TORCHINDUCTOR_COMPILE_THREADS": threads}
    env |= {
        name: os.path.join(scratch, name.lower()) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    }
    return env | ({"CUDA_VISIBLE_DEVICES": ""} if is_small else {})


if __name__ == "__main__":
    main()

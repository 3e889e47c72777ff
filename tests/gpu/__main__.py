"""Test and measure the jobs on this machine's GPU: `make gpu` does both.

    python -m tests.gpu right [--data FOLDER]     is it right? At most 5 minutes
    python -m tests.gpu fast [--data FOLDER]      how fast is it? At most 6 minutes
    python -m tests.gpu users                     what a user gets, against PyTorch alone. At most 6 minutes
    python -m tests.gpu fast --device cpu         a rehearsal: every command, tiny, on the CPU

FOLDER has the four files of Fashion-MNIST; without it the small jobs train on digits. Each row is written as
soon as it is known, and a stage that fails is a row: the others continue. --output_dir has four files in the
end: gpu.json, gpu.md (a table), logs.tar.gz and traces.tar.gz (with the longest kernels). With several GPUs
`right` takes 2 minutes more. `right --stages prove` runs `python -m launch prove`, 5 minutes.

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
from common.ground import endings
from common.ground.files import ROOT
from tests.gpu import checks, figures, report, users
from tests.gpu.lab import Setting, Stage, run_stages

MINUTES = {"right": 5.0, "fast": 6.0, "users": 6.0}
_MINUTES_OF_SEVERAL = 2.0
_CLOSING = 8.0  # seconds of the limit for the end of processes and for the archives
_MEMORY = "/dev/shm"  # outputs are written there, so that the disk does not affect the figures
_NEEDED, _NEEDED_SMALL = 8e9, 0.3e9  # bytes: outputs, checkpoints, compiled code
_COMMIT = "GPU_COMMIT"  # variable with the commit, if the machine has a copy without .git
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
    stages, minutes = choose(args, gpus)
    os.makedirs(args.output_dir, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    scratch = tempfile.mkdtemp(
        prefix="bootfile-gpu-", dir=find_scratch(_NEEDED_SMALL if is_small else _NEEDED)
    )
    folders = {name: os.path.join(scratch, name) for name in ("logs", "traces")}
    for folder in folders.values():
        os.makedirs(folder)
    machine = report.describe(is_small, args.commit)

    shown: set[str] = set()

    def show(results: list[dict]) -> None:
        for result in results:
            if not result["is_over"] or result["stage"] in shown:
                continue
            shown.add(result["stage"])
            line = f"{result['stage']}: {result['failed'] or 'done'} ({result['seconds']:.0f} s)"
            print(line, file=sys.stderr, flush=True)
            if not is_small:
                machine["states"][result["stage"]] = report.gpu_state()
            report.archive(args.output_dir, folders)  # a run may be killed before its end
        report.write(args.output_dir, machine, results)

    try:
        gpu = "none" if is_small else report.gpu_name()
        environment = _environment(scratch, args.run, is_small)
        setting = Setting(
            is_small, args.data, scratch, folders["logs"], folders["traces"], environment, gpus, gpu
        )
        results = run_stages(stages, setting, endings.STARTED + 60 * minutes - _CLOSING, show)
    finally:
        report.archive(args.output_dir, folders)
        shutil.rmtree(scratch, ignore_errors=True)
    print(report.format_table(machine, results))
    if any(result["is_check"] and result["failed"] for result in results):
        sys.exit(_FAILED)


def find_scratch(needed: float) -> str:
    """Return a folder with that number of bytes for the outputs of the jobs. Raises BadInput."""
    folders = [_MEMORY, tempfile.gettempdir()]
    for folder in folders:
        if os.access(folder, os.W_OK) and shutil.disk_usage(folder).free >= needed:
            return folder
    raise BadInput(f"{' and '.join(folders)} have less than {needed / 1e9:g} GB: set TMPDIR")


def _parse_args() -> argparse.Namespace:
    parser = arguments.Parser(__doc__)
    parser.prog = "python -m tests.gpu"
    add = parser.add_argument
    add("run", choices=sorted(MINUTES), help="as above")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal (default: cuda)")
    add("--data", metavar="FOLDER", help="folder with Fashion-MNIST (default: the digits of scikit-learn)")
    add("--stages", metavar="NAMES", help="separated by commas (default: all but prove)")
    add("--minutes", type=arguments.positive_float, help="time limit (default: 5 of right, 6 of the others)")
    commit = os.environ.get(_COMMIT)
    add("--commit", default=commit, help=f"commit of these files (default: ${_COMMIT}, else that of git)")
    add("--output_dir", help="default: output_dir/gpu/RUN")
    args = parser.parse_args()
    args.output_dir = os.path.abspath(args.output_dir or os.path.join(ROOT, "output_dir", "gpu", args.run))
    if args.data and not os.path.isdir(args.data):
        raise BadInput(f"--data {args.data}: no such folder")
    args.data = args.data and os.path.abspath(args.data)
    return args


def choose(args: argparse.Namespace, gpus: int) -> tuple[list[Stage], float]:
    """Return the stages and the minutes that they may take. Raises BadInput."""
    is_small, minutes = args.device == "cpu", MINUTES[args.run]
    stages = list(users.STAGES if args.run == "users" else figures.STAGES)
    if args.run == "right":
        stages = [*checks.STAGES, figures.ONCE]
        if gpus > 1 or is_small:
            stages.append(figures.SEVERAL)
            minutes += _MINUTES_OF_SEVERAL
        if is_small or args.stages:  # alone it takes the minutes of all others
            stages.append(checks.PROVE)
    if is_small:  # two cores take longer
        stages, minutes = [stage._replace(seconds=1500) for stage in stages], 90
    if args.stages:
        names = args.stages.split(",")
        if unknown := set(names) - {stage.name for stage in stages}:
            known = ", ".join(stage.name for stage in stages)
            raise BadInput(f"--stages {sorted(unknown)[0]}: expected one of {known}")
        stages = [stage for stage in stages if stage.name in names]
    return stages, args.minutes or minutes


def _environment(scratch: str, run: str, is_small: bool) -> dict[str, str]:
    """Return the environment of all commands, with one compiler cache."""
    # tests/conftest.py would compile with one process
    threads = os.environ.get("TORCHINDUCTOR_COMPILE_THREADS", str(max(1, available_cores() // 3)))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env = os.environ | {
        "PYTHONUNBUFFERED": "1", "TMPDIR": scratch, "TORCHINDUCTOR_COMPILE_THREADS": threads,
        "PYTHONPATH": path,
    }  # fmt: skip
    if run == "right":  # tens of processes share the cores
        env["OMP_NUM_THREADS"] = "2"
    elif is_small:
        env["OMP_NUM_THREADS"] = "1"
    env |= {
        name: os.path.join(scratch, name.lower()) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    }
    return env | ({"CUDA_VISIBLE_DEVICES": ""} if is_small else {})


if __name__ == "__main__":
    main()

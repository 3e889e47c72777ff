"""Run what is possible on machines that the maintainers lack, and write a report to attach to an issue.

    python -m tests.real.report                              several GPUs of one machine
    srun --ntasks-per-node=1 python -m tests.real.report     in an allocation of Slurm, of several nodes
    torchrun --nproc-per-node=8 -m tests.real.report         any launcher, or the boot file of a platform

For a platform: `python -m launch pack tests/real/report.py --to packed` makes the folder to upload; the boot
file is tests/real/report.py in it. Start it as a job, on every node: with the platform's arguments and
variables. Options that the platform adds are ignored.

It takes at most 10 minutes: train_exact.py on digits; the same, stopped by SIGTERM and resumed; train_ddp.py,
30 steps (DistributedDataParallel, SyncBatchNorm); images/s of imagenet.py. Then the same as a process alone.
Equal must be: the bits and receipts of train_exact.py, and the receipts of train_ddp.py and, up to rounding,
its first loss.

--output FILE gets one JSON, on the first node. It has versions, the kinds of processors, counts, times,
digests and, of an error, its class and the lines of this repository: no names, paths, hosts, keys or lines of
logs. The logs stay on this machine, and the last line names their folder.

Exit code: 0; 1 if something failed; 2 for bad input.
"""

import argparse
import contextlib
import datetime
import hashlib
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.abspath(f"{__file__}/../../.."))  # the root: a platform starts this as a file
from bootfile.histories import read_states
from common.distributed.entry import entry

# isort: split
import sklearn  # noqa: F401  # of digits: pack then lists it for the platform
import torch

import bootfile
from bootfile.ground.errors import BadInput, print_line
from bootfile.machine.cores import available_cores
from bootfile.receipt import receipt
from common.console import arguments
from common.console.arguments import FLAG
from common.distributed import devices, process_group
from common.ground.files import ROOT
from common.platform import node
from common.platform.platforms import MPI
from common.platform.topology import Topology
from common.run.run import JobParser

FORMAT = 2
_FILE = "bootfile-report.json"
_GRACE = 10.0  # seconds from SIGTERM to SIGKILL
_POLL = 0.1  # seconds
_LEAST_SHARDS = 8
_LIMIT = 200.0  # seconds of a part
_BATCH = 64  # samples of a step, or about as many
_START, _DDP = "start", "DistributedDataParallel"  # the parts whose figures others must have
# Relative, of a first loss: rounding. BatchNorm over the samples of one process only changes it by 0.0008 to
# 0.012, computed for 2, 4 and 8 processes and 5 seeds.
_TOLERANCE = 0.0005
# what launchers set in addition to the variables of MPI: a process alone must not see it
_OF_LAUNCHERS = ("SLURM_", "TORCHELASTIC_", "PMI_", "PMIX_", "GROUP_", "ROLE_", "AZUREML_", "NODE_")
_FRAME = re.compile(r'^ *File "(.+?)", line (\d+)', re.MULTILINE)
_ERROR = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Z]\w*(?:Error|Exception|Interrupt))\b", re.MULTILINE)
_ONE_LINE = re.compile(r"^error: ", re.MULTILINE)
_RATE = re.compile(r"^prof: ([\d.]+) images/s", re.MULTILINE)
_PARTS = ("bootfile", "common", "datasets", "jobs", "launch", "tests")  # folders of this repository


class Failed(Exception):
    """A part of the report is wrong. The text is the reason, without values of this machine."""


class Report:
    """The report of a job of one or several processes. Each process that the user started has one; that of
    rank 0 writes the file."""

    def __init__(self, args: argparse.Namespace, topology: Topology, folder: str):
        self._args = args
        self.topology = topology
        self.is_first = topology.rank == 0
        self.has_gpu = devices.count_gpus(args) > 0
        self._folder = folder
        # no job is started later, or runs longer: to end it takes up to two times the grace
        self._end = time.monotonic() + max(0.0, 60 * args.minutes - 2 * _GRACE)
        self._deadline = self._end  # of the part that runs
        self._starts = 0
        self.parts: list[dict[str, Any]] = []
        self._backend: str | None = None

    def take(self, name: str, function: Callable[[dict[str, Any]], object]) -> None:
        """Run a part, and note its result. All processes take the parts in the same order: a job waits for
        the ranks of the others. After the time limit a part fails without a start."""
        figures: dict[str, Any] = {}
        begin = time.monotonic()
        self._deadline = min(self._end, begin + _LIMIT)
        failed = ""
        try:
            if begin >= self._end:
                raise Failed("no time is left")
            function(figures)
        except Failed as error:
            failed = str(error)
        except Exception as error:  # a figure is missing: the other parts do not depend on it
            failed = type(error).__name__
        seconds = round(time.monotonic() - begin, 1)
        self.parts.append(
            {"part": name, "passed": not failed, "failed": failed, "seconds": seconds} | figures
        )
        if self.is_first:
            print_line(f"{name}: {failed or 'passed'} ({seconds:.0f} s)")
            self.write()

    def train_exact(
        self, figures: dict[str, Any], name: str, is_stopped: bool = False, is_alone: bool = False
    ) -> None:
        """Train with train_exact.py. is_stopped: stop it in epoch 2 with SIGTERM, and continue. is_alone: as
        one process. Raises Failed."""
        shards = _LEAST_SHARDS
        while shards < self.topology.world_size:
            shards *= 2
        job = ["jobs/train_exact.py", "--epochs", "4", "--exact_shards", str(shards)]
        job += ["--batch_size", str(max(_BATCH, shards))]
        self._train(figures, name, job, is_alone, is_stopped)

    def train_ddp(self, figures: dict[str, Any], name: str, is_alone: bool = False) -> None:
        """Train 30 steps with train_ddp.py: DistributedDataParallel and SyncBatchNorm. is_alone: as one
        process. Raises Failed."""
        processes = self.topology.world_size
        batch = processes * max(1, _BATCH // processes)  # each process has the same number of samples
        job = ["jobs/train_ddp.py", "--max_steps", "30", "--lr", "0.02", "--batch_size", str(batch)]
        self._train(figures, name, job, is_alone)

    def _train(
        self, figures: dict[str, Any], name: str, job: list[str], is_alone: bool, is_stopped: bool = False
    ) -> None:
        """Train on digits with a job, and note its figures."""
        output = os.path.join(self._folder, name)
        job += ["--dataset", "digits", "--width", "8", "--save_every", "10", "--report_every", "1"]
        job += ["--output_dir", output]
        metrics = Path(output, "metrics.jsonl")

        def is_in_epoch_2() -> bool:
            return self.is_first and metrics.exists() and '"epoch": 2,' in metrics.read_text()

        if is_stopped:
            self._run(figures, name, job, is_alone, is_in_epoch_2)
        self._run(figures, name, job, is_alone)
        if not self.is_first:
            return
        figures["state"] = list(read_states(output).values())[-1]["digest"]
        figures["receipt"] = hashlib.sha256(Path(output, receipt.FILE).read_bytes()).hexdigest()[:16]
        reports = [json.loads(line) for line in _read_lines(output, "metrics.jsonl")]
        steps = [line for line in reports if "loss" in line]
        figures["first_loss"] = steps[0]["loss"]
        figures["seconds_a_step"] = _median([line["data_time"] + line["compute_time"] for line in steps])
        if self._backend is None:
            self._backend = json.loads(_read_lines(output, "starts.jsonl")[0])["environment"]["backend"]

    def compare(self, figures: dict[str, Any], part: str, *names: str) -> None:
        """Raise Failed if a figure of these names is not that of another part."""
        if not self.is_first:
            return
        others = self._figures_of(part)
        for name in names:
            if figures[name] != others.get(name):
                raise Failed(f"the {name} is not that of {part}")

    def compare_loss(self, figures: dict[str, Any], part: str) -> None:
        """Raise Failed if the first loss differs from that of another part by more than rounding."""
        if not self.is_first:
            return
        loss = self._figures_of(part)["first_loss"]
        if abs(figures["first_loss"] - loss) > _TOLERANCE * abs(loss):
            raise Failed(f"the first loss is not that of {part}")

    def _figures_of(self, name: str) -> dict[str, Any]:
        """Return the figures of a part that has run."""
        for part in self.parts:
            if part["part"] == name:
                return part
        raise Failed(f"{name} did not run")

    def measure(self, figures: dict[str, Any], name: str, is_alone: bool = False) -> None:
        """Measure images/s of imagenet.py with images in memory. Raises Failed."""
        processes = 1 if is_alone else self.topology.world_size
        job = ["jobs/imagenet.py", "--data_backend", "synthetic", "--compile", "false"]
        if self.has_gpu:
            job += ["--arch", "resnet50", "--batch_size", str(128 * processes), "--prof", "30"]
        else:
            job += ["--arch", "resnet18", "--image_size", "32", "--prof", "2"]
            job += ["--batch_size", str(8 * processes)]
        text = self._run(figures, name, [*job, "--output_dir", os.path.join(self._folder, name)], is_alone)
        if self.is_first:
            match = _RATE.search(text)
            if not match:
                raise Failed("no line with images/s")
            figures["images_per_s"] = float(match[1])

    def _run(
        self,
        figures: dict[str, Any],
        name: str,
        job: list[str],
        is_alone: bool,
        is_stopped: Callable[[], bool] | None = None,
    ) -> str:
        """Run a job to its end, and return its output. is_stopped: when to stop it by SIGTERM."""
        if is_alone and not self.is_first:
            return ""
        env, options = self._environment(is_alone)
        self._starts += 1
        log = os.path.join(self._folder, f"{self._starts}-{name}.log")
        with open(log, "wb") as file:
            process = subprocess.Popen(
                [sys.executable, *job, *options], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        is_asked = False
        try:
            while process.poll() is None:
                if time.monotonic() > self._deadline:
                    raise Failed("no end within the time limit")
                if is_stopped is not None and not is_asked and is_stopped():
                    is_asked = True
                    process.terminate()
                time.sleep(_POLL)
        finally:
            _end(process)
        text = Path(log).read_text(errors="replace")
        figures.setdefault("exit_codes", []).append(process.returncode)
        expected = 0 if is_stopped is None else 128 + signal.SIGTERM
        if process.returncode != expected:
            figures["error"] = explain(text)
            raise Failed(f"exit code {process.returncode}, expected {expected}")
        return text

    def _environment(self, is_alone: bool) -> tuple[dict[str, str], list[str]]:
        """Return the variables and options of the next job. Each job of several has a port of its own: the
        processes of the one before may still hold theirs."""
        env = os.environ | {"PYTHONUNBUFFERED": "1"}
        options = [] if self._args.enable_gpu is not False else ["--enable_gpu=false"]
        topology = self.topology
        if is_alone:
            of_mpi = {variable for variables in MPI.values() for variable in variables.split()}
            for variable in list(env):
                if variable in of_mpi or variable.startswith(_OF_LAUNCHERS):
                    del env[variable]
            alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
            env |= alone | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
            return env, options
        for option in ("rank", "world_size", "processes_per_node"):
            if getattr(self._args, option) is not None:
                options.append(f"--{option}={getattr(self._args, option)}")
        if topology.master_host and topology.master_port:
            port = topology.master_port + 1 + self._starts
            env.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # torchrun's store has keys of the job before
            if "LOCAL_RANK" in env:
                env["MASTER_PORT"] = str(port)
            else:
                host = f"[{topology.master_host}]" if ":" in topology.master_host else topology.master_host
                options.append(f"--init_method=tcp://{host}:{port}")
        return env, options

    def write(self) -> None:
        """Write the report so far."""
        topology = self.topology
        gpu = torch.cuda.get_device_name(0) if self.has_gpu and torch.cuda.is_available() else "none"
        content = {
            "format": FORMAT,
            "month": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m"),
            "versions": {
                "bootfile": bootfile.__version__, "python": platform.python_version(),
                "torch": str(torch.__version__),
                "cuda": torch.version.cuda, "rocm": torch.version.hip,
                "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu != "none" else None,
            },
            "machine": {
                "system": platform.system(), "processor": platform.machine(), "cores": available_cores(),
                "gpu": gpu, "gpus": torch.cuda.device_count() if self.has_gpu else 0,
                "driver": node.find_driver(), "backend": self._backend,
            },
            "launcher": {
                "source": topology.source, "level": topology.level, "nodes": topology.nodes,
                "processes_per_node": topology.processes_per_node,
            },
            "parts": self.parts,
        }  # fmt: skip
        Path(self._args.output).write_text(json.dumps(content, indent=1) + "\n")


def explain(text: str) -> dict[str, Any]:
    """Return what a report tells of the error in a log: its class, and the lines of this repository. Its text
    stays here: it may have names, paths or keys."""
    places = []
    for path, line in _FRAME.findall(text):
        name = os.path.relpath(path, ROOT).replace(os.sep, "/")
        if name.partition("/")[0] in _PARTS:
            places.append(f"{name}:{line}")
    kinds = _ERROR.findall(text)
    kind = kinds[-1] if kinds else ""
    if not kind and _ONE_LINE.search(text):
        kind = "one line"
    return {"kind": kind, "places": places[-6:]}


def _read_lines(output: str, name: str) -> list[str]:
    """Return the lines of a file of an output folder."""
    return Path(output, name).read_text().splitlines()


def _median(values: list[float]) -> float:
    return round(sorted(values)[len(values) // 2], 6)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _end(process: subprocess.Popen) -> None:
    """End a job and the processes that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)


def _parse_args() -> argparse.Namespace:
    parser = JobParser(__doc__)  # options that a platform adds are ignored
    parser.prog = "python -m tests.real.report"
    add = parser.add_argument
    add("--output", default=_FILE, metavar="FILE", help="the report, or its folder (default: %(default)s)")
    add(
        "--work", metavar="FOLDER", help="for outputs and logs, which stay (default: in the temporary folder)"
    )
    add("--minutes", type=arguments.positive_float, default=10, help="time limit (default: 10)")
    add("--enable_gpu", **FLAG | {"default": None}, help="false: train on the CPU")
    process_group.add_arguments(parser)
    parser.checks.append(_find_output)
    args: argparse.Namespace = parser.parse_args()
    return args


def _find_output(args: argparse.Namespace) -> dict[str, str]:
    """Return the absolute path of the report. Raises BadInput if its folder does not exist."""
    path = os.path.abspath(args.output)
    if os.path.isdir(path):  # an output of a platform
        path = os.path.join(path, _FILE)
    if not os.path.isdir(os.path.dirname(path)):
        raise BadInput(f"--output {path}: no such folder")
    return {"output": path}


@entry
def main() -> None:
    args = _parse_args()
    topology = devices.find_topology(args)
    folder = tempfile.mkdtemp(prefix="bootfile-report-", dir=args.work)
    report = Report(args, topology, folder)

    def restart(figures: dict[str, Any]) -> None:
        report.train_exact(figures, "restart", is_stopped=True)
        report.compare(figures, _START, "state", "receipt")

    def alone(figures: dict[str, Any]) -> None:
        report.train_exact(figures, "alone", is_alone=True)
        report.compare(figures, _START, "state", "receipt")

    def ddp_alone(figures: dict[str, Any]) -> None:
        report.train_ddp(figures, "ddp-alone", is_alone=True)
        report.compare(figures, _DDP, "receipt")
        report.compare_loss(figures, _DDP)

    report.take(_START, lambda figures: report.train_exact(figures, "start"))
    report.take("restart after SIGTERM", restart)
    report.take(_DDP, lambda figures: report.train_ddp(figures, "ddp"))
    report.take("rate", lambda figures: report.measure(figures, "rate"))
    if topology.world_size > 1:  # the other processes wait no more
        report.take("one process", alone)
        report.take(f"{_DDP} of one process", ddp_alone)
        report.take(
            "rate of one process", lambda figures: report.measure(figures, "rate-alone", is_alone=True)
        )
    if report.is_first:
        print_line(f"report: {args.output}; logs, which are not in it: {folder}")
    if not all(part["passed"] for part in report.parts):
        sys.exit(1)


if __name__ == "__main__":
    main()

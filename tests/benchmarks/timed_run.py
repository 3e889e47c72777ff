"""Run a job once, read its reports while it runs, and end it in time.

The fields of a run are described in tests/benchmarks/time_to_accuracy.py.
"""

import contextlib
import functools
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from glob import glob

from common import exits, starts
from common.distributed import preemption
from common.exits import BadInput
from common.files import ROOT

_ENDED = {0: "schedule", exits.DIVERGED: "diverged"}  # exit code -> reason of a job's own end
_SETUP = 600.0  # seconds that a job may take until its first report, in addition to the limit
_GRACE = 5.0  # seconds from SIGTERM to SIGKILL
_POLL = 0.25  # seconds
_SIGNALS = {signal.SIGINT, signal.SIGTERM}


def run(command: list[str], limit: float, enough: float | None, keep_compiled: bool = False) -> dict:
    """Run `python *command --output_dir=FOLDER` and return {"laps", "seconds", "ended", "curve"}.

    limit: end the run after these seconds of training
    enough: end the run at this test accuracy
    keep_compiled: use the compiler caches of earlier runs

    Raises BadInput if the job fails.
    """
    with tempfile.TemporaryDirectory(prefix="time_to_accuracy_") as folder:
        output, log = os.path.join(folder, "output"), os.path.join(folder, "log")
        command = [sys.executable, *command, f"--output_dir={output}"]
        caches = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}
        environment = os.environ | {name: os.path.join(folder, each) for name, each in caches.items()}
        if keep_compiled:
            environment = dict(os.environ)
        started = time.monotonic()
        with open(log, "wb") as file:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=functools.partial(preemption.die_with_parent, signal.SIGKILL),
            )  # fmt: skip
        try:
            ended = None
            while not ended:
                code = process.poll()
                begin, laps, curve = _reported(output, limit)
                if code is not None:
                    ended = _ENDED.get(code) or _failed(command, code, log)
                elif time.monotonic() - started > limit + _SETUP or (begin and time.time() - begin > limit):
                    ended = "limit"
                elif enough and any(accuracy >= enough for _, accuracy in curve):
                    ended = "target"
                else:
                    _drop_weights(output)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(_POLL)
        finally:
            seconds = time.monotonic() - started
            _end(process)
    return {"laps": laps, "seconds": round(seconds, 3), "ended": ended, "curve": curve}


def _reported(output: str, limit: float) -> tuple[float | None, dict, list]:
    """Return (time at which training began, laps before it, curve up to the limit), as far as known."""
    begun = _lines(os.path.join(output, starts.FILE))
    if not begun:
        return None, {}, []
    begin = begun[-1]["time"]
    lines = [line for line in _lines(os.path.join(output, "metrics.jsonl")) if "val_acc" in line]
    curve = [[round(line["time"] - begin, 3), line["val_acc"]] for line in lines]
    return begin, begun[-1]["laps"], [point for point in curve if point[0] <= limit]


def _lines(path: str) -> list[dict]:
    """Return the complete lines of a file to which a job may be writing."""
    try:
        with open(path, encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.endswith("\n")]
    except FileNotFoundError:
        return []


def _drop_weights(output: str) -> None:
    """Delete old weights: a job of many epochs writes them after each epoch and would fill the disk."""
    weights = sorted(glob(os.path.join(output, "epoch_*.pth")), key=os.path.getmtime)
    for path in weights[:-2]:  # a job may be writing the last one
        os.remove(path)


def _failed(command: list[str], code: int, log: str):
    with open(log, encoding="utf-8", errors="replace") as file:
        print("".join(file.readlines()[-20:]), end="", file=sys.stderr)
    raise BadInput(f"exit code {code}: {shlex.join(command)}")


def _end(process: subprocess.Popen) -> None:
    """Send SIGTERM to the process group, then SIGKILL to the remaining processes. Signals are blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # no process left; macOS: only zombies
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

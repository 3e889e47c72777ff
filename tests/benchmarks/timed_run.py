"""One run of a job, watched from outside through what it reports, and ended in time.

The fields of a run are described in tests/benchmarks/time_to_accuracy.py.
"""

import contextlib
import ctypes
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
from common.exits import BadInput

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

_ENDED = {0: "schedule", exits.DIVERGED: "diverged"}  # exit code -> how a job ended by itself
_SETUP = 600.0  # seconds that a job may take, beside the limit, until it has reported for the first time
_GRACE = 5.0  # seconds from SIGTERM to SIGKILL
_POLL = 0.25  # seconds
_SIGNALS = {signal.SIGINT, signal.SIGTERM}


def run(command: list[str], limit: float, enough: float | None, keep_compiled: bool = False) -> dict:
    """One run of `python *command --output_dir=FOLDER`: {"laps", "seconds", "ended", "curve"}.

    limit: seconds of training after which it is ended; enough: test accuracy at which it is. What it compiles
    it does not find compiled by an earlier run, unless keep_compiled. Raises BadInput where it fails.
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
                command, cwd=_ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_die_with_parent,
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
    """(when training began, the laps before it, the curve up to the limit) as far as they are known."""
    begun = _lines(os.path.join(output, starts.FILE))
    if not begun:
        return None, {}, []
    begin = begun[-1]["time"]
    lines = [line for line in _lines(os.path.join(output, "metrics.jsonl")) if "val_acc" in line]
    curve = [[round(line["time"] - begin, 3), line["val_acc"]] for line in lines]
    return begin, begun[-1]["laps"], [point for point in curve if point[0] <= limit]


def _lines(path: str) -> list[dict]:
    """The lines of a file that may be being written."""
    try:
        with open(path, encoding="utf-8") as file:
            return [json.loads(line) for line in file if line.endswith("\n")]
    except FileNotFoundError:
        return []


def _drop_weights(output: str) -> None:
    """A loop of many epochs, with weights after each, would fill the disk."""
    weights = sorted(glob(os.path.join(output, "epoch_*.pth")), key=os.path.getmtime)
    for path in weights[:-2]:  # the last one may be being written
        os.remove(path)


def _failed(command: list[str], code: int, log: str):
    with open(log, encoding="utf-8", errors="replace") as file:
        print("".join(file.readlines()[-20:]), end="", file=sys.stderr)
    raise BadInput(f"exit code {code}: {shlex.join(command)}")


def _end(process: subprocess.Popen) -> None:
    """SIGTERM to the process group, and SIGKILL to what is left of it. Nothing interrupts it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody left; macOS: only zombies
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def _die_with_parent() -> None:
    """Between fork and exec: a benchmark killed without notice leaves no endless loop behind."""
    if _prctl:
        PR_SET_PDEATHSIG = 1
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

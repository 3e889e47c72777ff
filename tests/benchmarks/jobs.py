"""Run jobs for a measurement: start one, read its reports while it runs, and end it."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bootfile.ground import errors
from bootfile.ground.errors import BadInput
from bootfile.processes import sessions
from bootfile.records import read_starts
from common.ground.files import ROOT
from tests.benchmarks.rounds import tail

_POLL = 0.1  # seconds
_WARM = 2  # reports that do not count


def run(command: list[str], is_done: Callable[[], bool], timeout: float, env: dict | None = None) -> float:
    """Run a job until is_done() is true or it ends, then kill it and its children.

    Return time.time() at its start. Raises BadInput if it fails or takes more than `timeout` seconds.
    """
    with tempfile.TemporaryFile("w+") as printed:
        process = sessions.start_child(
            command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=printed
        )
        started = time.time()
        try:
            while True:
                code = process.poll()
                if is_done() or code in (0, errors.DIVERGED):
                    return started
                if code is not None or time.time() > started + timeout:
                    printed.seek(0)
                    reason = f"no result within {timeout:g} s" if code is None else f"exit code {code}"
                    raise BadInput(f"{' '.join(command)}: {reason}: {tail(printed.read())}")
                time.sleep(_POLL)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def read_metrics(output: str) -> list[dict]:
    """Return the complete lines of metrics.jsonl."""
    with contextlib.suppress(FileNotFoundError):
        lines = Path(output, "metrics.jsonl").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]
    return []


def measure(command: list[str], timeout: float, env: dict | None = None) -> dict:
    """Run a job from its start until its third report on training steps, and return the figures of this one.

    images_per_s, memory_mb: as reported
    waiting: share of the time in which the loop had no batch
    start_s: seconds from the start of the process to the first report
    compile_s: seconds of compiling, None if the job reports none
    """
    with tempfile.TemporaryDirectory() as output:

        def reports() -> list[dict]:
            return [line for line in read_metrics(output) if "loss" in line]

        started = run([*command, f"--output_dir={output}"], lambda: len(reports()) > _WARM, timeout, env)
        found, laps = reports(), read_starts(output)[-1]["laps"]
    if len(found) <= _WARM:
        raise BadInput(f"{' '.join(command)} ended after {len(found)} reports, expected {_WARM + 1}")
    last = found[_WARM]
    return {
        "images_per_s": last["images_per_s"], "memory_mb": last["memory_mb"],
        "waiting": last["data_time"] / (last["data_time"] + last["compute_time"]),
        "start_s": found[0]["time"] - started, "compile_s": laps.get("compilation"),
    }  # fmt: skip


def rate(reports: list[dict]) -> float:
    """Return images/s over all these reports."""
    seconds = [report["data_time"] + report["compute_time"] for report in reports]
    images = [report["images_per_s"] * each for report, each in zip(reports, seconds, strict=True)]
    return sum(images) / sum(seconds)

"""Run jobs in turns: one runs while the others are stopped, so that all are timed on the same machine.

with Runner("train.py", command, folder) as job:
    job.turn(images=256, timeout=1800)     # starts it; the first reports include the start
    for _ in range(rounds):
        reports = job.turn(images=256, timeout=600)
"""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time

from common.ground.exits import BadInput

_POLL = 0.02  # seconds
_END = 5.0  # seconds until killed processes have ended
_TAIL = 65536  # bytes of a job's stderr
# Kills the job's processes when its own input ends: by close(), or because this process has ended. Stopped
# processes would otherwise keep their memory forever.
_GUARD = 'read -r nothing; kill -s KILL -- "-$1" 2>/dev/null'


class Runner:
    """A job in its own process group, which runs in turns until close().

    name: for messages
    command: the job with its arguments; it writes `output_dir`/metrics.jsonl as common/run/metrics.py does
    env: variables in addition to this process's own
    cwd: default: this process's
    """

    def __init__(
        self, name: str, command: list[str], output_dir: str, env: dict | None = None, cwd: str | None = None
    ):
        self.name, self.command, self.output_dir = name, command, output_dir
        self.started = 0.0  # time.time() at the start of the process
        self.first: dict = {}  # its first report
        self._env, self._cwd = os.environ | (env or {}), cwd
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process: subprocess.Popen | None = None
        self._guard: subprocess.Popen | None = None
        self._read = 0  # bytes of metrics.jsonl

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def turn(self, images: int, timeout: float) -> list[dict]:
        """Let the job run until its reports cover `images`, then stop it. The first turn starts it.

        Return these reports on training steps, as in metrics.jsonl. The first report of a turn is skipped,
        and so are reports whose steps began before it: the job may have been stopped between measuring and
        writing. Raises BadInput with the job's last error if the job ends or takes more than `timeout`
        seconds.
        """
        deadline, begin = time.monotonic() + timeout, time.time()
        process = self._process or self._start()
        self._signal(signal.SIGCONT)
        kept, covered, skipped = [], 0.0, False
        try:
            while True:
                ended = process.poll()
                for report in self._reports():
                    if skipped and report["time"] - seconds([report]) >= begin:
                        kept.append(report)
                        covered += _images([report])
                    skipped = True
                if covered > images - 0.5:  # rates are rounded
                    return kept
                if ended is not None:
                    raise BadInput(f"{self.name} ended with exit code {ended}: {self._last_line()}")
                if time.monotonic() > deadline:
                    raise BadInput(
                        f"{self.name} reported {covered:.0f} of {images} images within {timeout:g} s: "
                        f"{self._last_line()}"
                    )
                time.sleep(_POLL)
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """Kill the job's processes, stopped or not. May be called twice."""
        if self._process is None:
            return
        self._signal(signal.SIGKILL)  # also ends stopped processes
        if self._guard and self._guard.stdin:
            self._guard.stdin.close()
            self._guard.wait(_END)
        self._process.wait(_END)
        deadline = time.monotonic() + _END
        while self._signal(0) and time.monotonic() < deadline:  # children of the job
            time.sleep(_POLL)
        self._errors.close()
        self._process = self._guard = None

    def _start(self) -> subprocess.Popen:
        self.started = time.time()
        process = self._process = subprocess.Popen(
            self.command, cwd=self._cwd, env=self._env, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._errors,
        )  # fmt: skip
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "guard", str(process.pid)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        return process

    def _signal(self, number: int) -> bool:
        """Send a signal to all processes of the job. Return False if there are none."""
        if self._process is None:
            return False
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):  # the second on macOS
            return False
        return True

    def _reports(self) -> list[dict]:
        """Return the new reports on training steps whose lines are complete."""
        with contextlib.suppress(FileNotFoundError):
            with open(os.path.join(self.output_dir, "metrics.jsonl"), "rb") as file:
                file.seek(self._read)
                whole = file.read().rpartition(b"\n")[0]
            self._read += len(whole) + 1 if whole else 0
            found = [line for line in map(json.loads, whole.splitlines()) if "loss" in line]
            self.first = self.first or next(iter(found), {})
            return found
        return []

    def _last_line(self) -> str:
        """Return the last line of the job's stderr."""
        handle = self._errors.fileno()  # pread: a seek would move the position at which the job writes
        size = os.fstat(handle).st_size
        lines = os.pread(handle, _TAIL, max(0, size - _TAIL)).decode(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "no output")


def seconds(reports: list[dict]) -> float:
    """Return the seconds that these reports of turn() cover."""
    return sum(report["data_time"] + report["compute_time"] for report in reports)


def rate(reports: list[dict]) -> float:
    """Return images/s over all these reports."""
    return _images(reports) / seconds(reports)


def _images(reports: list[dict]) -> float:
    return sum(report["images_per_s"] * seconds([report]) for report in reports)

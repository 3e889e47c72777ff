"""Run `launch prove` in the process of the tests. Its jobs are forked, which saves the import of torch."""

import contextlib
import io
import os
import signal
import subprocess
import threading
from pathlib import Path
from unittest import mock

from launch import processes
from launch.prove import cli, verdict
from launch.prove.jobs import REFERENCE, Case, Job
from launch.prove.verdict import Row
from tests.conftest import ROOT, environment, start


class _Job:
    """A job as processes.start() returns it, whose output goes to a file."""

    def __init__(self, command, mark, output, variables=None, cwd=None):
        known = environment(**{processes._MARK: mark}, **(variables or {}))
        options = {"cwd": cwd or os.getcwd(), "env": known, "start_new_session": True}
        self._job = start(*command[1:], stderr=subprocess.STDOUT, **options)
        self.pid, self._output = self._job.pid, os.dup(output.fileno())
        self._copying = threading.Thread(target=self._copy, daemon=True)
        self._copying.start()

    def _copy(self):
        with open(self._output, "w") as output, contextlib.suppress(OSError, ValueError):
            for line in self._job.stdout:
                output.write(line)
                output.flush()

    def poll(self):
        if (code := self._job.poll()) is not None:
            self._copying.join(10)
        return code

    def wait(self):
        self._job.wait()
        return self.poll()

    returncode = property(poll)


@contextlib.contextmanager
def forked_jobs(cwd: Path = ROOT):
    """Fork the jobs of a proof. The context has this folder and keeps the signals of the tests."""
    numbers, before = (signal.SIGTERM, signal.SIGHUP), os.getcwd()
    handlers = [signal.getsignal(number) for number in numbers]
    os.chdir(cwd)
    try:
        with mock.patch.object(processes, "start", _Job):
            yield
    finally:
        os.chdir(before)
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)


def prove(*words, cwd: Path = ROOT, code: int = 0) -> str:
    """Run `python -m launch prove *words` in a folder, check the exit code, and return what it prints."""
    printed = io.StringIO()
    with forked_jobs(cwd), contextlib.redirect_stdout(printed):
        ended = cli.main([str(word) for word in words])
    assert ended == code, f"exit code {ended}\n{printed.getvalue()}"
    return printed.getvalue()


def prove_cases(job: Job, *names: str) -> dict[str, Row]:
    """Run the reference of a job and the cases of these names. Return their results by name."""
    with forked_jobs():
        cases = {case.name: case for case in job.plan()}
        job.run(Case(REFERENCE))
        return {name: verdict.run(job, cases[name]) for name in names}

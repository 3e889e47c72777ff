"""Run `launch prove` and `launch audit` in the process of the tests. Their jobs are forked, which saves the
import of torch."""

import contextlib
import io
import os
import signal
import subprocess
import threading
from pathlib import Path
from unittest import mock

import launch.prove
from bootfile.console.words import get_option
from bootfile.history import cli
from bootfile.processes import sessions
from bootfile.prove import forks, verdict
from bootfile.prove.cases import PROCESSES
from bootfile.prove.job import Job
from bootfile.prove.verdict import Row
from tests import conftest
from tests.conftest import ROOT, free_port, start


class _Job:
    """A job as sessions.start() returns it, whose output goes to a file. Its ranks are forked, too."""

    def __init__(self, command, mark, output, environment=None, cwd=None):
        count = 1 if get_option(command, "--elastic") == "true" else int(get_option(command, PROCESSES) or 1)
        changed = {name: each for name, each in (environment or {}).items() if os.environ.get(name) != each}
        if changed.get("PYTHONHASHSEED") == "1":  # a fork has that of the tests
            del changed["PYTHONHASHSEED"]
        shared = {sessions._MARK: mark, **changed}
        if count > 1:
            shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
            shared |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count))
        self._ranks, self._copies = [], []
        for rank in range(count):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if count > 1 else {}
            known = {"cwd": cwd or os.getcwd(), "env": conftest.environment(**shared, **own)}
            job = start(*command[1:], stderr=subprocess.STDOUT, start_new_session=True, **known)
            self._ranks.append(job)
            self._copies.append(threading.Thread(target=_copy, args=(job, os.dup(output.fileno()))))
            self._copies[-1].start()
        self.pid = self._ranks[0].pid

    def poll(self):
        """Return the first exit code that is not 0 if all ranks have ended. A failed rank ends the others."""
        codes = [rank.poll() for rank in self._ranks]
        if any(codes) and None in codes:
            self.end(signal.SIGKILL)
            self.code = next(filter(None, codes))
        if None in codes:
            return None
        for copy in self._copies:
            copy.join(conftest.LONGEST)
        return getattr(self, "code", next(filter(None, codes), 0))

    returncode = property(poll)

    def wait(self, timeout=None):
        for rank in self._ranks:
            rank.wait(timeout)
        return self.poll()

    def end(self, number):
        for rank in self._ranks:
            with contextlib.suppress(ProcessLookupError):
                if rank.poll() is None:
                    os.killpg(rank.pid, number)


def _copy(job, output):
    with open(output, "w") as file, contextlib.suppress(OSError, ValueError):
        for line in job.stdout:
            file.write(line)
            file.flush()


def _end(tasks, number):
    for task in tasks:
        task.end(number)


@contextlib.contextmanager
def forked_jobs(cwd: Path = ROOT):
    """Fork the jobs of a proof here. The context has this folder and keeps the signals of the tests."""
    numbers, before = (signal.SIGTERM, signal.SIGHUP), os.getcwd()
    handlers = [signal.getsignal(number) for number in numbers]
    os.chdir(cwd)
    try:
        with (
            mock.patch.object(sessions, "start", _Job),
            mock.patch.object(sessions, "end", _end),
            mock.patch.object(forks, "are_possible", bool),
        ):
            yield
    finally:
        os.chdir(before)
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)


def prove(*words, cwd: Path = ROOT, code: int = 0) -> str:
    """Run `python -m launch prove *words` in a folder, check the exit code, and return what it prints."""
    return _run(launch.prove.main, words, cwd, code)


def audit(*words, code: int = 0) -> str:
    """Run `python -m launch audit *words` as prove() does."""
    return _run(cli.main, words, ROOT, code)


def _run(main, words, cwd: Path, code: int) -> str:
    printed = io.StringIO()
    with forked_jobs(cwd), contextlib.redirect_stdout(printed):
        ended = main([str(word) for word in words])
    assert ended == code, f"exit code {ended}\n{printed.getvalue()}"
    return printed.getvalue()


def prove_cases(job: Job, *names: str) -> dict[str, Row]:
    """Run the reference of a job and the cases of these names. Return their results by name."""
    with forked_jobs():
        cases = {case.name: case for case in job.plan()}
        job.run_reference()
        return {name: verdict.run(job, cases[name]) for name in names}

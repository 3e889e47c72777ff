"""A program that run() forks ends as one in a new Python: output, exit code, handlers."""

import signal
import subprocess
import sys

import pytest
import sklearn.datasets  # noqa: F401  # as other tests do: it sets environment variables
import torch  # noqa: F401

from tests.conftest import CAN_FORK, USUAL, environment
from tests.support import forkserver

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="a program that is forked after torch 2.1 aborts")
SHOW = """
import multiprocessing, os, pathlib, signal, sys
print(sys.argv[1:], sys.orig_argv[1:], sys.path[1:], os.getcwd(), sorted(os.environ.items()), __name__)
print(signal.getsignal(signal.SIGINT), multiprocessing.get_start_method(), os.path.abspath(sys.path[0]))
"""
END = """
import atexit, os, signal, sys, threading, time
atexit.register(print, "handler")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
"""


def forked(folder, words, timeout=60.0, **variables):
    env = environment(**variables)
    assert forkserver.can_fork(words, env, USUAL)
    return forkserver.run(words, folder, env, USUAL, timeout)


@pytest.fixture(autouse=True)
def _set_by_earlier_tests(monkeypatch):
    """ray.init() and the import of a job leave these variables in the process."""
    monkeypatch.setenv("PYTHONBREAKPOINT", "ray.util.rpdb._driver_set_trace")
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")


@pytest.mark.parametrize("words", [["show.py", "--one", "two"], ["-m", "show", "one"]])
def test_a_program_sees_what_a_new_python_shows(words, tmp_path):
    (tmp_path / "show.py").write_text(SHOW)
    new = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment(NAME="x"), capture_output=True, text=True
    )
    result = forked(tmp_path, words, NAME="x")
    assert (result.stdout, result.stderr, result.returncode) == (new.stdout, "", 0) and new.stdout


@pytest.mark.parametrize(
    ("last_line", "code", "error"),
    [
        ("", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('text')", 1, "text"),
        ("raise ValueError('text')", 1, "ValueError: text"),
    ],
)
def test_threads_and_exit_handlers_run_before_the_end(last_line, code, error, tmp_path):
    (tmp_path / "end.py").write_text(END + last_line)
    result = forked(tmp_path, ["end.py"])
    assert (result.returncode, result.stdout) == (code, "thread\nhandler\n")
    assert result.stderr.splitlines()[-1:] == ([error] if error else [])


def test_a_signal_and_the_limit_of_time_end_it(tmp_path):
    (tmp_path / "killed.py").write_text("import os; os.kill(os.getpid(), 9)")
    assert forked(tmp_path, ["killed.py"]).returncode == -signal.SIGKILL
    (tmp_path / "slow.py").write_text("import time; time.sleep(600)")
    with pytest.raises(subprocess.TimeoutExpired):
        forked(tmp_path, ["slow.py"], timeout=0.5)


@pytest.mark.parametrize(
    ("words", "variables"),
    [(["-c", "pass"], {}), (["-u", "a.py"], {}), (["a.py"], {"PYTHONPATH": "x"}), (["a.py"], {"OMP_X": "1"})],
)
def test_what_needs_a_new_python(words, variables):
    assert not forkserver.can_fork(words, environment(**variables), USUAL)

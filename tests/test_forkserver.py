"""A program that start() forks ends as one in a new Python: output, exit code, handlers."""

import signal
import subprocess

import psutil
import pytest
import sklearn.datasets  # noqa: F401  # as other tests do: it sets environment variables
import torch  # noqa: F401

from tests.conftest import CAN_FORK, ROOT, USUAL, environment, finish, start
from tests.support import forkserver

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="a program that is forked after torch 2.1 aborts")
SHOW = """
import multiprocessing, os, pathlib, signal, sys
print(sys.argv[1:], sys.orig_argv[1:], sys.path[1:], os.getcwd(), sorted(os.environ.items()), __name__)
print(*map(signal.getsignal, (1, 2, 10, 13, 15, 17)), os.getpid() == os.getsid(0), sys.stdin.read())
print(multiprocessing.get_start_method(), os.path.abspath(sys.path[0]))
"""
END = """
import atexit, os, signal, sys, threading, time
atexit.register(print, "handler")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
"""


def forked(*words, code=0, timeout=60.0, **options):
    process = start(*words, **options)
    assert isinstance(process, forkserver.Forked)
    return finish(process, code, timeout)


@pytest.fixture(autouse=True)
def _set_by_earlier_tests(monkeypatch):
    """ray.init() and the import of a job leave these variables in the process."""
    monkeypatch.setenv("PYTHONBREAKPOINT", "ray.util.rpdb._driver_set_trace")
    monkeypatch.setenv("GOMP_SPINCOUNT", "1000")


@pytest.mark.parametrize("variables", [{"NAME": "x"}, {"PYTHONPATH": str(ROOT)}], ids=lambda x: next(iter(x)))
@pytest.mark.parametrize(
    "words", [["show.py", "--one", "two"], ["-m", "show", "one"], ["-c", SHOW, "--one"]], ids=lambda x: x[0]
)
def test_a_program_sees_what_a_new_python_shows(words, variables, tmp_path):
    (tmp_path / "show.py").write_text(SHOW)
    options = {"cwd": tmp_path, "env": environment(**variables), "start_new_session": True}
    new = finish(start(*words, fresh=True, **options))
    result = forked(*words, **options)
    assert (result.stdout, result.stderr) == (new.stdout, "") and new.stdout


@pytest.mark.parametrize(
    ("last_line", "code", "error"),
    [
        ("", 0, ""),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('text')", 1, "text"),
        ("raise ValueError('text')", 1, "ValueError: text"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
    ],
)
def test_threads_and_exit_handlers_run_before_the_end(last_line, code, error, tmp_path):
    (tmp_path / "end.py").write_text(END + last_line)
    result = forked("end.py", code=code, cwd=tmp_path)
    assert result.stdout == "thread\nhandler\n"
    assert result.stderr.splitlines()[-1:] == ([error] if error else [])


def test_it_has_the_threads_of_its_environment():
    code = "import os, torch; print(torch.get_num_threads(), os.environ['OMP_NUM_THREADS'])"
    assert forked("-c", code, env=environment(OMP_NUM_THREADS="3")).stdout == "3 3\n"
    assert forked("-c", code).stdout == "1 1\n"


LEFT = """
import multiprocessing, signal, sys
def work(ready):
    signal.signal(signal.SIGTERM, lambda *_: (print("SIGTERM", flush=True), sys.exit()))
    ready.set()
    while True:
        signal.pause()
context = multiprocessing.get_context("fork")
ready = context.Event()
context.Process(target=work, args=(ready,), daemon=True).start()
ready.wait()
"""


def test_a_process_that_it_leaves_gets_sigterm():
    """As the workers of a loader: torch raises in a program whose worker was killed."""
    assert forked("-c", LEFT).stdout == "SIGTERM\n"


def test_an_error_goes_to_the_hook_of_the_program(tmp_path):
    """A job has one that names the rank, or saves what to print at the end."""
    hook = "import sys\nsys.excepthook = lambda kind, error, trace: print(error, sys.last_value is error)\n"
    (tmp_path / "hook.py").write_text(f"{END}{hook}raise ValueError('text')")
    result = forked("hook.py", code=1, cwd=tmp_path)
    assert (result.stdout, result.stderr) == ("text True\nthread\nhandler\n", "")


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGKILL]
)
def test_a_signal_ends_it_while_its_lines_are_read(number):
    code = "import sys, time; print('ready', flush=True); print('error', file=sys.stderr); time.sleep(600)"
    process = start("-c", code, stderr=subprocess.STDOUT)
    assert isinstance(process, forkserver.Forked)
    assert process.stdout.readline() == "ready\n" and process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.communicate(timeout=0.1)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert output.startswith("error\n") and errors is None and process.returncode == -number


@pytest.mark.parametrize(
    ("words", "variables"),
    [(["-u", "a.py"], {}), (["a.py"], {"PYTHONPATH": "folder"}), (["a.py"], {"OMP_X": "1"})],
)
def test_what_needs_a_new_python(words, variables, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "sitecustomize.py").touch()
    options = {"env": environment(**variables), "stderr": subprocess.PIPE}
    assert not forkserver.can_fork(words, options, USUAL)
    assert forkserver.can_fork(words[-1:], options | {"env": environment()}, USUAL)
    assert not forkserver.can_fork(["a.py"], options | {"env": USUAL, "stdin": subprocess.PIPE}, USUAL)


SHOW_CHILD = """
import os, pathlib, signal, sys
environment = pathlib.Path("/proc/self/environ").read_text().split("\\0")
print(sorted(each for each in environment if each and not each.startswith("STARTER=")))
print(pathlib.Path("/proc/self/cmdline").read_text().strip("\\0").split("\\0"), os.getcwd(), sys.argv)
print(signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.getsignal(signal.SIGHUP), sys.stdin.read())
parent, file = map(int, os.environ["STARTER"].split())
print(os.getppid() == parent, os.getpid() == os.getsid(0), "torch" in sys.modules)
os.write(file, b"from the child")
print("error", file=sys.stderr)
sys.exit(7)
"""
STARTER = """
import os, signal, subprocess, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
signal.signal(signal.SIGHUP, signal.SIG_IGN)
reader, writer = os.pipe()
child = subprocess.Popen(
    [sys.executable, "child.py", "--one"], cwd="folder", pass_fds=[writer], start_new_session=SESSION,
    env={**os.environ, "STARTER": f"{os.getpid()} {writer}"}, text=True,
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
)
os.close(writer)
print(*child.communicate("from its parent"), child.returncode, os.read(reader, 100), os.read(reader, 100))
print(subprocess.Popen([sys.executable, "-c", "import os; os.abort()"]).wait())
"""


@pytest.mark.parametrize("session", [True, False])
def test_a_child_of_a_program_sees_what_a_new_python_shows(session, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "child.py").write_text(SHOW_CHILD)
    (tmp_path / "starter.py").write_text(STARTER.replace("SESSION", str(session)))
    words = ("starter.py", "--processes_per_node=1")
    new = finish(start(*words, fresh=True, cwd=tmp_path, env=environment(OMP_NUM_THREADS="1")))
    result = forked(*words, cwd=tmp_path)
    lines = new.stdout.splitlines()
    assert lines[3] == f"True {session} False"
    lines[3] = f"True {session} True"  # a fork has torch
    assert result.stdout.splitlines() == lines and lines[-1] == "-6"
    assert result.stderr == new.stderr == ""


ENDS = """
import functools, os, subprocess, sys, time
sys.path.insert(0, ROOT)
from bootfile.processes import sessions
# both write to one pipe: print() may write a text and its end apart, and the other one's text between
program = "import os, time; os.write(1, b'ready\\\\n'); time.sleep(600)"
child = sessions.start_child([sys.executable, "-c", program])
os.write(1, b"%d\\n" % child.pid)
time.sleep(600)
"""


def test_a_child_ends_with_the_program_that_has_started_it(tmp_path):
    (tmp_path / "starter.py").write_text(f"ROOT = {str(ROOT)!r}{ENDS}")
    process = start("starter.py", "--elastic", cwd=tmp_path)
    assert isinstance(process, forkserver.Forked)
    lines = {process.stdout.readline(), process.stdout.readline()}
    lines.remove("ready\n")
    child = psutil.Process(int(lines.pop()))
    assert child.ppid() == process.pid
    process.kill()
    child.wait(60)

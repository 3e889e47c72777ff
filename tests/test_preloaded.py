"""A script that run() forks sees the same world as one in a new Python."""

import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import CAN_FORK, ROOT, environment, finish
from tests.support.preloaded import Preloaded, Server

pytestmark = pytest.mark.skipif(
    not CAN_FORK, reason="a job that is forked after the import of torch 2.1 aborts"
)

SHOW = """
import __main__, os, psutil, random, signal, sys, tempfile, threading
print(__name__, __file__, __main__.__dict__ is globals(), sys.argv, sys.orig_argv, sys.path)
print(os.getcwd(), sorted(set(os.environ.items()) - {("_", os.environ.get("_"))}), tempfile.gettempdir())
print([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)])
print([file for file in range(100) if os.path.exists(f"/proc/self/fd/{file}")], threading.active_count())
print(os.getppid(), os.getsid(0) == os.getpid(), psutil.Process().environ() == dict(os.environ))
print([(s, s.line_buffering, s.write_through) for s in (sys.stdin, sys.stdout, sys.stderr)])
sys.stdout.reconfigure(errors="backslashreplace")
print(__spec__ and __spec__.name, sys.dont_write_bytecode)
print(sys.stdin.read(), file=sys.stderr)
"""
END = "import atexit; atexit.register(print, 'the end')\n"


@pytest.fixture(scope="module")
def server():
    server = Server.start(environment())
    yield server
    server.close()


@pytest.mark.parametrize(
    ("words", "session"),
    [
        (["show.py", "--one", "two"], False),
        (["show.py", "--one", "two"], True),
        (["-u", "show.py"], False),
        (["-m", "show", "-c"], False),
        (["-m", "package.show", "one"], False),
        (["-c", SHOW.replace("__file__", "0"), "-m", "two"], False),
    ],
)
def test_a_forked_script_sees_what_a_new_python_shows(server, words, session, tmp_path):
    (tmp_path / "package").mkdir()
    for path in (tmp_path / "show.py", tmp_path / "package" / "show.py"):
        path.write_text(SHOW)
    (tmp_path / "tmp").mkdir()
    options = dict(
        cwd=tmp_path, start_new_session=session,
        env=environment(TMPDIR=str(tmp_path / "tmp"), PYTHONPATH=f"lib::{tmp_path}/lib", TORCH_NCCL_X="1",
                        PYTHONDONTWRITEBYTECODE="1"),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    shown, forked = [], Preloaded(server, words, **options)
    assert forked.is_forked
    for process in (forked, subprocess.Popen([sys.executable, *words], **options)):
        output, errors = process.communicate("input", timeout=120)
        assert (process.returncode, errors) == (0, "input\n")
        shown.append(output)
    assert shown[0] == shown[1]


def usual(**options) -> dict:
    return {"env": environment(), "text": True} | options


KILL = END + "import os, signal; os.kill(os.getpid(), signal.SIG{})"


@pytest.mark.parametrize(
    ("script", "code", "output", "error"),
    [
        (END, 0, "the end\n", ""),
        (END + "raise SystemExit(7)", 7, "the end\n", ""),
        (END + "raise SystemExit('x')", 1, "the end\n", "x\n"),
        (END + "import sys; sys.stdout.close()", 0, "", "I/O operation on closed file"),
        (END + "raise ValueError('x')", 1, "the end\n", "ValueError: x"),
        (KILL.format("INT"), -signal.SIGINT, "the end\n", "KeyboardInterrupt"),
        (KILL.format("KILL"), -signal.SIGKILL, "", ""),
    ],
)
def test_exit_codes_and_handlers_at_the_end(server, script, code, output, error, tmp_path):
    (tmp_path / "script.py").write_text(script)
    pipes = usual(cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    forked = Preloaded(server, ["script.py"], **pipes)
    assert forked.is_forked
    result = finish(forked, code)
    assert result.stdout == output and error in result.stderr and bool(error) == bool(result.stderr)


NODE = f"""
import os, subprocess, sys
sys.path.insert(0, {str(ROOT)!r})
import common.entry  # as each job does: it sets GOMP_SPINCOUNT
if "RANK" in os.environ:
    os.write(int(os.environ["PIPE"]), f"{{os.getpid()}} {{os.getppid()}}\\n".encode())
    sys.exit(int(os.environ["RANK"]))
read, write = os.pipe()
children = []
for rank in range(2):
    own = {{"RANK": str(rank), "PIPE": str(write)}}
    command = [sys.executable, *sys.orig_argv[1:]]
    children.append(subprocess.Popen(command, env=os.environ | own, pass_fds=[write]))
print(*[child.wait() for child in children], children[0].is_forked)
os.close(write)
print(*[child.pid for child in children], *os.fdopen(read))
"""


def test_the_ranks_of_a_node_are_forked_too(server, tmp_path):
    """They are children of the job."""
    (tmp_path / "script.py").write_text(NODE)
    pipes = usual(cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    node = Preloaded(server, ["script.py", "--processes_per_node=2"], **pipes)
    codes, numbers = finish(node).stdout.split("\n", 1)
    assert codes == "0 1 True"
    assert node.is_forked
    first, second, *lines = map(int, numbers.split())
    assert sorted(lines) == sorted([first, node.pid, second, node.pid])


def test_a_signal_reaches_it(server, tmp_path):
    (tmp_path / "script.py").write_text("import time; print('up', flush=True); time.sleep(600)")
    process = Preloaded(
        server, ["script.py"], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert process.is_forked
    assert process.stdout.readline() == "up\n" and process.poll() is None
    began = time.monotonic()
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM and time.monotonic() - began < 60
    process.stdout.close()


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["-i"], {}),
        (["script.py"], {"preexec_fn": print}),
        (["script.py"], {"env": environment(PYTHONHASHSEED="1")}),
        (["script.py"], {"env": environment(PYTHONPATH="lib")}),
        (["script.py"], {"env": environment(OMP_NUM_THREADS="17")}),
        (["script.py"], {"env": environment(LONG="x" * 40_000)}),
    ],
)
def test_what_needs_a_new_python_is_refused(server, words, options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "sitecustomize.py").touch()
    process = Preloaded(server, words, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)
    process.wait()
    assert not process.is_forked

"""How the tests start a job: as its users do, in a process of its own."""

import contextlib
import gc
import importlib.metadata
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import forked_program, forkserver

# A signal that is ignored in the background of a shell, or by nohup, would be ignored by every job too.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)

ROOT = Path(__file__).resolve().parent.parent
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of starts would compile the same modules
sys.dont_write_bytecode = False
# Several tests share the cores: threads that wait for each other at every operation would make all slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # each process would start a pool of processes
QUIET = {  # what this machine says of ranks and paths, and what Ray and jobs set in the process of the tests
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH",
    "PYTHONBREAKPOINT", "GOMP_SPINCOUNT",
}  # fmt: skip


# A program that is forked after the import of torch 2.1 aborts at its end; 2.14 was tested.
CAN_FORK = tuple(map(int, importlib.metadata.version("torch").split(".")[:2])) >= (2, 6)
LONG = (
    "test_urls.py", "test_prove.py", "test_new.py", "test_imagenet_exact.py", "test_ray_loader.py",
    "test_documents.py", "test_imagenet.py", "test_start.py", "test_mirror.py", "test_redis_store.py",
    "test_demo.py", "test_benchmarks.py", "test_train_exact.py", "test_gpu_check.py", "test_quickstart.py",
    "test_rendezvous.py", "test_simulate.py", "test_loaders.py", "test_upload.py", "test_train_own.py",
    "test_train_ray.py", "test_kspeed.py", "test_shared_output.py", "test_job_service.py",
    "test_object_store_faults.py", "test_data.py", "test_train_fsdp.py", "test_proofs.py",
    "test_own_loop.py", "test_package.py", "test_elastic.py", "test_fork.py", "test_resume.py",
    "test_audit.py", "test_finetune.py", "test_causes.py", "test_without.py", "test_survivor.py",
    "test_signals.py", "test_process_group.py", "test_user_loops.py", "test_schedule_state.py",
    "test_fix_bits.py", "test_lint_rules.py", "test_guides.py", "test_rooms.py", "test_options.py",
)  # fmt: skip
QUICK = ("--dataset=digits", "--width=8")  # train.py with 176,258 parameters instead of 11 million
LONGEST = 400  # seconds of a job that takes 10 alone: a limit only ends a test that hangs


def environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in QUIET}
    return kept | {"CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"} | extra


# audit events at which --quick skips a test
NOT_QUICK = {"subprocess.Popen", "os.fork", "os.posix_spawn", "socket.bind", "socket.connect"}
USUAL = environment()  # without what tests change later


def cases(values, *thorough) -> list:
    """Return the cases of parametrize(): those in `thorough` run in `make thorough` only. `values` has names
    or other values whose text names them."""
    marks = {True: [pytest.mark.thorough], False: []}
    return [pytest.param(value, marks=marks[str(value) in thorough], id=str(value)) for value in values]


def start(*command, fresh: bool = False, **options) -> subprocess.Popen | forkserver.Forked:
    """Start `python *command` in the repository's root. options: those of Popen.

    It is forked from a process that has imported torch, which saves seconds, if the fork server can do what
    the options ask for. fresh: start a new Python, for a test of imports, of the time or memory of a start,
    or of what /proc shows of the process.
    """
    words = [str(word) for word in command]
    options = {"cwd": ROOT, "env": environment(), "stderr": subprocess.PIPE} | options
    if CAN_FORK and not fresh and forkserver.can_fork(words, options, USUAL):
        return forkserver.start(words, options, USUAL)
    return subprocess.Popen([sys.executable, *words], **options, stdout=subprocess.PIPE, text=True)


def finish(
    process: subprocess.Popen, code: int | None = 0, timeout: float = LONGEST
) -> subprocess.CompletedProcess:
    """Wait, and check the exit code (None: any)."""
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output = errors = "(a child of it still runs, and holds the pipe)"
        with contextlib.suppress(subprocess.TimeoutExpired):
            output, errors = process.communicate(timeout=10)
        pytest.fail(f"no end within {timeout} s: {process.args}\n{output}\n{errors}")
    assert code in (None, process.returncode), f"exit code {process.returncode}\n{output}\n{errors}"
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def run(*command, code: int | None = 0, timeout: float = LONGEST, **options) -> subprocess.CompletedProcess:
    """Run `python *command` to its end, as start() does, and check the exit code (None: any)."""
    return finish(start(*command, **options), code, timeout)


def start_ranks(*command, ranks: int = 2, **options) -> list[subprocess.Popen]:
    """Start a job on several ranks.

    The ranks are forked, with the variables that launchers set: a job that starts its own ranks would start a
    new Python for each. Tests of the launchers themselves use run().
    """
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks))
    return [
        start(*command, env=environment(**shared, RANK=str(rank), LOCAL_RANK=str(rank)), **options)
        for rank in range(ranks)
    ]


def run_ranks(*command, ranks: int = 2, code: int = 0, **options) -> list[subprocess.CompletedProcess]:
    """Run a job on several ranks to its end, as start_ranks() starts it, and return their results."""
    return [finish(job, code) for job in start_ranks(*command, ranks=ranks, **options)]


def refused(*command, **options) -> str:
    """Run a job that is refused, and return its only line of stderr."""
    line, = run(*command, code=2, **options).stderr.splitlines()  # fmt: skip
    assert line.startswith("error: ")
    return line


def names(text: str, *parts: object) -> bool:
    """Return whether a message names all of these values, options, paths or codes; its words are free.

    A number or a word has to stand alone: 3 is not named by "13", nor lr by "lrs".
    """
    return all(re.search(rf"(?<![\w.-]){re.escape(str(part))}(?![\w-]|\.\w)", text) for part in parts)


def start_until(*command, at: str, **options) -> tuple[subprocess.Popen, str, Callable[[], None]]:
    """Start a job that stops itself after its first line that matches: it is not further when a signal comes.

    Return the job, its output up to this line, and a function that lets it continue. A job in a new Python
    (torch before 2.6, fresh) does not stop, and may be further.
    """
    options["env"] = options.get("env", environment()) | {forked_program.STOP_AT: at}
    job = start(*command, **options)
    output = "".join(read_until(job, at))
    if not isinstance(job, forkserver.Forked):
        return job, output, lambda: None
    wait_until(lambda: any(map(is_stopped, (job.pid, *processes_of(job)))), job)
    stopped = next(filter(is_stopped, (job.pid, *processes_of(job))))

    def continue_it() -> None:
        with contextlib.suppress(ProcessLookupError):  # it may have been killed
            os.kill(stopped, signal.SIGCONT)

    return job, output, continue_it


def interrupt(*command, at: str, by: int = signal.SIGKILL, **options) -> str:
    """Start a job, and send it a signal at the first line that matches. Return what it printed after it."""
    job, _, continue_it = start_until(*command, at=at, **options)
    job.send_signal(by)
    continue_it()  # also after SIGKILL: a rank whose launcher is killed gets SIGTERM
    return finish(job, 143 if by == signal.SIGTERM else -by).stdout


def write_program(path: Path, code: str) -> None:
    """Write an executable file of Python code. The kernel refuses `#!PYTHON` if the path has a space: here a
    shell starts Python, which reads the first line as a text."""
    path.write_text(f"""#!/bin/sh
''''exec '{sys.executable}' "$0" "$@" #'''
{code}""")
    path.chmod(0o755)


def wait_until(
    condition: Callable[[], object], job: subprocess.Popen | None = None, timeout: float = LONGEST
) -> None:
    """Wait for something, for example a file that a job writes. Fail if the job ends."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert job is None or job.poll() is None, f"the job ended with {job.returncode}"
        assert time.monotonic() < deadline, f"nothing within {timeout} s"
        time.sleep(0.02)


def wait_for_port(port: int, server: subprocess.Popen) -> None:
    """Wait until a server on this machine accepts connections."""

    def is_open() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return True
        return False

    wait_until(is_open, server, 60)


def is_stopped(pid: int) -> bool:
    """Return whether SIGSTOP has reached the process."""
    with contextlib.suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def records(output_dir) -> list[dict]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (Path(output_dir) / "metrics.jsonl").read_text().splitlines()]


def losses(output_dir) -> list[float]:
    """Return the losses of the reports on training steps, in order."""
    return [line["loss"] for line in records(output_dir) if "loss" in line]


def read_until(process: subprocess.Popen, pattern: str) -> list[str]:
    """Read the output of a job until a line matches, and return it. Fail if the job ends before."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return lines
    pytest.fail(
        f"the job ended before {pattern}\n{''.join(lines)}\n{process.stderr and process.stderr.read()}"
    )


def processes_of(job: subprocess.Popen) -> list[int]:
    """The pids of the processes that a job started for the ranks of its node, in the order of their ranks."""
    children = {}
    for folder in Path("/proc").iterdir():
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            rank = re.search(r"(?:^|\0)RANK=(\d+)\0", (folder / "environ").read_text())
        except (OSError, ValueError, IndexError):  # no process, or one that has just ended
            continue
        if parent == job.pid and rank:
            children[int(rank[1])] = int(folder.name)
    return [children[rank] for rank in sorted(children)]


def free_port() -> int:
    """Return a port that is free now. It is below those that Linux gives to connections (from 32768 on) and
    above those of Ray's workers, so another process seldom takes it meanwhile."""
    while True:
        port = 20000 + secrets.randbelow(12000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="skip tests that start a process or open a socket")


def pytest_configure(config):
    gc.disable()  # what is imported with the tests stays: pytest_collection_finish() enables it
    if config.getoption("quick"):
        sys.addaudithook(_skip_if_not_quick)


def _skip_if_not_quick(event: str, arguments: tuple) -> None:
    """Skip the running test when it starts its first process or opens its first socket.

    Python calls this function with the events of docs.python.org/3/library/audit_events.
    """
    if event in NOT_QUICK and not os.environ.get("PYTEST_CURRENT_TEST", "(teardown)").endswith("(teardown)"):
        pytest.skip(f"--quick: {event}")


def pytest_collection_modifyitems(items):
    """Start the files that take minutes first: a process of xdist that got one last would end alone."""
    order = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONG)))


def pytest_collection_finish():
    """A search for garbage visits only what the tests make: all else took seconds, again and again."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left():
    """Importing a job sets a handler for Ctrl-C. A DALI pipeline in a reference cycle is freed here: in a
    forked worker its destructor never returns."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)
    if "nvidia.dali" in sys.modules:
        gc.collect()
        gc.freeze()  # the next collection need not look at what is left, which took 2.7 s


@pytest.fixture(autouse=True)
def no_end_of_a_job_is_left():
    """A test that uses parts of a job in this process leaves what these do at the end of the job. The entry
    of another job would do it here, and may end the process. The thread that watches a run would print in a
    later test that it is stuck."""
    yield
    stuck = sys.modules.get("bootfile.processes.stuck")
    if stuck:
        stuck.stop()
    endings = sys.modules.get("common.ground.endings")
    if endings:
        for functions in endings._at_end.values():
            functions.clear()


@pytest.fixture(scope="module", autouse=True)
def folders_of_the_module(request, tmp_path_factory):
    """Delete the temporary folders of a file's fixtures at its end, unless a test failed: some are large."""
    base, failed = tmp_path_factory.getbasetemp(), request.session.testsfailed
    before = set(base.iterdir())
    yield
    if request.session.testsfailed == failed:
        for folder in set(base.iterdir()) - before:
            folder.unlink() if folder.is_symlink() else shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def optimizer_hooks():
    """torch 2.1 removes the hooks of all optimizers when a process compiles its first function."""
    import torch

    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if torch.__version__ < "2.2" and dynamo and dynamo.TorchPatcher.patch.cache_info().currsize:
        pytest.skip("a test before has compiled a function, and torch 2.1 has no hooks then")


@pytest.fixture(scope="module")
def server():
    """Return an object store with empty buckets, which runs until the end of the file's tests."""
    from tests.support.object_store_server import ObjectStoreServer

    with ObjectStoreServer("bucket", "data", "runs") as server:
        yield server


@pytest.fixture(scope="module")
def shared_redis(tmp_path_factory):
    from tests.support.redis_server import RedisServer

    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def empty_redis(shared_redis):
    """Return an empty Redis server, which runs until the end of the file's tests."""
    shared_redis.client().flushall()
    shared_redis.client().config_resetstat()
    return shared_redis

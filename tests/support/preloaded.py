"""Start Python by forking a process that has imported torch, which saves seconds.

This file is also a program, the server. It imports PACKAGES and forks for each request. The child executes
the script, the module (`-m`) or the code (`-c`) in a module `__main__`, as Python does. /proc shows its
environment, as it does for a new process. The server imports no module of the project. The child ends after
its exit handlers: to free its modules, as Python does, would take 0.5 s.
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import inspect
import io
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Callable
from typing import Any

PACKAGES = (
    "torch", "torch._dynamo", "torchvision", "torch.utils.tensorboard",
    "sklearn.datasets", "cv2", "simplejpeg", "boto3",
)  # fmt: skip
# beginnings of the names of environment variables that are read when Python or a library starts
_READ_AT_START = (
    "PYTHON",
    "LD_",
    "LC_",
    "LANG",
    "OMP",
    "GOMP",
    "MKL",
    "KMP",
    "OPENBLAS",
    "TORCH",
    "PYTORCH",
    "CUDA",
)
_SET_BY_JOBS = {"GOMP_SPINCOUNT": "1000"}  # before they import torch, if it is not set; the server has it
# of these, what a fork reads itself, and what torch, scikit-learn and OpenCV set when they are imported
_READ_LATER = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "TORCHELASTIC_", "TORCH_NCCL_",
               "TORCHINDUCTOR_CACHE_DIR", "LD_LIBRARY_PATH", "KMP_DUPLICATE_LIB_OK",
               "KMP_INIT_AT_FORK")  # fmt: skip
_USUAL = {  # arguments of Popen._execute_child and their values without an option of Popen
    "shell": False, "gid": None, "gids": None, "uid": None, "umask": -1, "process_group": -1,
}  # fmt: skip
_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)
_LONGEST, _MOST_FILES = 1 << 18, 16  # bytes and files of a request
_STARTS_PYTHON = "jobs/|ddp|processes_per_node|ray"  # in the words of what starts processes of Python
_PATH = list(sys.path)  # without PYTHONPATH, which the server does not get
_exit_codes: list[int] = []  # that of this process, when its script has ended
ROOM = 1 << 15  # bytes for the environment of a child, in the memory that /proc/PID/environ shows


class Preloaded(subprocess.Popen):
    """A process `python *words`, forked from a server if that is like a new Python. options: those of Popen.

    is_forked: whether it was. A forked process is a child of this process, too.
    """

    def __init__(self, server: "Server", words: list[str], **options: Any):
        self._server, self.is_forked = server, False
        super().__init__([sys.executable, *words], **options)

    def _execute_child(self, *values: Any) -> None:
        _execute_or_fork(self, self._server, super()._execute_child, values)


def fork_children(server: "Server") -> None:
    """Let every subprocess.Popen of this process behave as Preloaded."""
    real = subprocess.Popen._execute_child  # type: ignore[attr-defined]

    def execute(process: subprocess.Popen, *values: Any) -> None:
        _execute_or_fork(process, server, functools.partial(real, process), values)

    subprocess.Popen._execute_child = execute  # type: ignore[attr-defined]


def _execute_or_fork(process: Any, server: "Server", execute: Callable, values: tuple) -> None:
    given = inspect.signature(execute).bind(*values).arguments
    if not server.can_start(given):
        execute(*values)
        return
    files = {0: given["p2cread"], 1: given["c2pwrite"], 2: given["errwrite"]}
    files = {number: number if file == -1 else file for number, file in files.items()}
    files |= {file: file for file in given["pass_fds"]}
    request = {
        "words": [os.fspath(word) for word in given["args"][1:]],
        "cwd": os.path.abspath(given["cwd"] or "."),
        "env": dict(given["env"] or os.environ),
        "new_session": given["start_new_session"],
        "dies_with_parent": given["preexec_fn"].args[0] if given["preexec_fn"] else 0,
        "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "files": list(files),
    }
    process.pid = server.fork(request, list(files.values()))
    process._child_created = process.is_forked = True
    names = inspect.signature(process._close_pipe_fds).parameters
    process._close_pipe_fds(*(given[name] for name in names))


class Server:
    """A process with PACKAGES that forks.

    connection: to it.
    env: the environment in which it was started.
    """

    def __init__(self, connection: socket.socket, env: dict[str, str]):
        self._connection, self._read_at_start = connection, _read_at_start(env)
        self._lock = threading.Lock()  # several threads of a process may start children

    @classmethod
    def start(cls, env: dict[str, str], *more: str) -> "Server":
        """Return a new server. It ends with this process, or with close().

        more: packages that it imports besides PACKAGES. They must read no environment that changes.
        """
        connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno()), *PACKAGES, *more]
        with theirs:
            added = _SET_BY_JOBS | {"ROOM": "x" * ROOM}
            subprocess.Popen(command, env=env | added, pass_fds=[theirs.fileno()])
        return cls(connection, env)

    def can_start(self, given: dict[str, Any]) -> bool:
        """Return whether a fork would be like a new Python. given: the arguments of Popen._execute_child."""
        program, *words = given["args"] if isinstance(given["args"], list | tuple) else [""]
        words = words[words[:1] == ["-u"] :]
        if program != sys.executable or given["executable"] not in (None, program) or not words:
            return False
        if not (words[0] in ("-m", "-c") or words[0].endswith(".py")) or not given["close_fds"]:
            return False
        first = given["preexec_fn"]
        if first and not (isinstance(first, functools.partial) and first.func.__name__ == "die_with_parent"):
            return False
        if any(given.get(name, usual) != usual for name, usual in _USUAL.items()):
            return False
        env = given["env"] or os.environ
        entries = env.get("PYTHONPATH", "").split(os.pathsep)
        if any(os.path.exists(os.path.join(entry, "sitecustomize.py")) for entry in entries):
            return False
        return _read_at_start(env) == self._read_at_start and len(_environment_block(env)) < ROOM

    def fork(self, request: dict[str, Any], files: list[int]) -> int:
        """Return the pid of a child of this process that executes the request."""
        with self._lock:
            _adopt_orphans(True)
            try:
                socket.send_fds(self._connection, [json.dumps(request).encode()], files)
                pid = self._connection.recv(_LONGEST)
                self._connection.recv(_LONGEST)
            finally:
                _adopt_orphans(False)
        if not pid:
            raise RuntimeError(f"the server of {__file__} has ended")
        return int(pid)

    def close(self) -> None:
        self._connection.close()


def _read_at_start(env: dict[str, str]) -> dict[str, str]:
    names = [name for name in env if name.startswith(_READ_AT_START) and not name.startswith(_READ_LATER)]
    return _SET_BY_JOBS | {name: env[name] for name in names}


def _environment_block(env: dict[str, str]) -> bytes:
    return b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())


def _show_environment(env: dict[str, str]) -> None:
    """Let /proc/PID/environ show this environment, not that in which the server was started."""
    with open("/proc/self/stat") as file:
        first, end = map(int, file.read().rpartition(")")[2].split()[47:49])  # env_start, env_end
    block = _environment_block(env)
    ctypes.memmove(first, block + bytes(end - first - len(block)), end - first)


def die_with_parent(signal_number: int) -> None:
    """Let the kernel send this process a signal when its parent ends. 0: none."""
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal_number, 0, 0, 0)


def _adopt_orphans(adopt: bool) -> None:
    """Let this process become the parent of its grandchildren whose parents end, or stop that."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def _load_packages(packages: list[str]) -> None:
    for package in packages:
        with contextlib.suppress(ImportError):
            importlib.import_module(package)
    gc.collect()
    gc.freeze()


def _serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork for each request. Return the request in a child, and None when the client has ended."""
    while True:
        content, files, _, _ = socket.recv_fds(connection, _LONGEST, _MOST_FILES)
        if not content:
            return None
        between = os.fork()
        if not between:
            between = os.getpid()
            pid = os.fork()
            if not pid:
                connection.close()
                while os.getppid() == between:
                    time.sleep(0.001)
                request = json.loads(content)
                return request | {"files": dict(zip(request["files"], files, strict=True))}
            connection.send(str(pid).encode())
            os._exit(0)
        os.waitpid(between, 0)  # the child of its child is now one of the client
        connection.send(b"adopted")
        for file in files:
            os.close(file)


def _become(request: dict[str, Any]) -> None:
    """Give this process the files, folder, environment and signals of a new one."""
    above = max(request["files"].values(), default=0) + max(request["files"], default=0) + 1
    copies = {number: fcntl.fcntl(file, fcntl.F_DUPFD, above) for number, file in request["files"].items()}
    for file in request["files"].values():
        os.close(file)
    for number, file in copies.items():
        os.dup2(file, number)
        os.close(file)
    if request["new_session"]:
        os.setsid()
    die_with_parent(request["dies_with_parent"])
    os.chdir(request["cwd"])
    os.environ.clear()
    _show_environment(request["env"])
    os.environ.update(request["env"])
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        setattr(sys, name, _like(getattr(sys, name), number))
        setattr(sys, f"__{name}__", getattr(sys, name))
    tempfile.tempdir = None
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    entries = os.environ.get("PYTHONPATH")
    more = [os.path.abspath(entry) for entry in entries.split(os.pathsep)] if entries else []
    sys.path[:] = [_PATH[0], *dict.fromkeys((*more, *_PATH[1:]))]
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _like(stream: io.TextIOWrapper, number: int) -> io.TextIOWrapper:
    """Return a stream with the settings of one that was opened when this number was another file."""
    raw: Any = io.FileIO(number, "r" if number == 0 else "w", closefd=False)
    raw.name = stream.name
    if number == 0:
        raw = io.BufferedReader(raw)
    elif not stream.write_through:
        raw = io.BufferedWriter(raw)
    by_line = not stream.write_through and (number == 2 or raw.isatty())
    wrapped = io.TextIOWrapper(raw, stream.encoding, stream.errors, None, by_line, stream.write_through)
    wrapped.mode = "r" if number == 0 else "w"
    return wrapped


def _fork_server() -> dict[str, Any] | None:
    """Let this process start processes of its own through a server, forked now: the ranks of a node.

    Return the request in such a process, and None in this one.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # of the job, which may come already
    if not os.fork():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ours.close()
        for number in range(3):
            with open(os.devnull, "r+b") as null:
                os.dup2(null.fileno(), number)
        _show_environment({})  # it is not a process of the job
        return _serve(theirs) or os._exit(0)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    theirs.close()
    with ours:  # a high number, as the first ones are those of the job's files
        ours = socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD_CLOEXEC, 200))
    fork_children(Server(ours, dict(os.environ)))
    return None


def _end() -> None:
    """End this process if its script has ended. The last exit handler."""
    with contextlib.suppress(OSError, ValueError):  # Python shows these
        for code in _exit_codes:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)


def _execute(words: list[str]) -> None:
    """Execute a script, `-m` and a module, or `-c` and code in this process as a new Python would."""
    try:
        _execute_main(words)
        _exit_codes.append(0)
    except SystemExit as error:
        _exit_codes.append(error.code if isinstance(error.code, int) else int(error.code is not None))
        raise
    except Exception:
        _exit_codes.append(1)
        raise


def _execute_main(words: list[str]) -> None:
    sys.orig_argv = [sys.executable, *words]
    words = words[words[:1] == ["-u"] :]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv = list(words)
    if words[0] == "-m":
        sys.path[0], sys.argv = os.getcwd(), ["-m", *words[2:]]
        runpy._run_module_as_main(words[1])
        return
    if words[0] == "-c":
        sys.path[0], sys.argv = "", ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
        return
    main.__file__ = os.path.abspath(words[0])
    sys.path[0] = os.path.dirname(main.__file__)
    with open(words[0], "rb") as file:
        code = compile(file.read(), main.__file__, "exec")
    exec(code, main.__dict__)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    atexit.register(_end)  # the first of them runs last
    _load_packages(sys.argv[2:])
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    while request:  # in a child: a job, and then again in each rank that the job starts
        _become(request)
        words = request["words"]
        several = words[0] == "-m" or any(re.search(_STARTS_PYTHON, word) for word in words)
        request = _fork_server() if several and "RANK" not in os.environ else None
        if not request:
            _execute(words)

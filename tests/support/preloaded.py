"""Start scripts by forking a process that has imported torch: in 0.1 s instead of several seconds.

This file is also a program, the server. It imports PACKAGES and forks for each request. The child executes
the script in a module `__main__`, as `python SCRIPT` does. The server imports no module of the project.
"""

import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
import warnings
from typing import Any

PACKAGES = (
    "torch", "torch._dynamo", "torchvision", "torch.utils.tensorboard",
    "sklearn.datasets", "cv2", "simplejpeg",
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
_OPTIONS = {"cwd", "env", "stdin", "stdout", "stderr", "text", "start_new_session", "pass_fds"}  # of Popen
_SET_CHILD_SUBREAPER = 36  # of prctl(2)
_LONGEST, _MOST_FILES = 1 << 18, 16  # bytes and files of a request


class Preloaded(subprocess.Popen):
    """A process `python SCRIPT ...` that the server has forked. It is a child of this process.

    options: those of Popen in _OPTIONS.
    """

    def __init__(self, server: "Server", words: list[str], **options: Any):
        self._server = server
        super().__init__([sys.executable, *words], **options)

    def _execute_child(self, *values: Any) -> None:
        given = inspect.signature(super()._execute_child).bind(*values).arguments
        files = {0: given["p2cread"], 1: given["c2pwrite"], 2: given["errwrite"]}
        files = {number: file for number, file in files.items() if file != -1}
        files |= {file: file for file in given["pass_fds"]}
        request = {
            "words": given["args"][1:],
            "cwd": os.path.abspath(given["cwd"] or "."),
            "env": dict(given["env"] or os.environ),
            "new_session": given["start_new_session"],
            "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            "files": list(files),
        }
        self.pid = self._server.fork(request, list(files.values()))
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in inspect.signature(super()._close_pipe_fds).parameters))


class Server:
    """A process with PACKAGES that forks.

    connection: to it.
    env: the environment in which it was started.
    """

    def __init__(self, connection: socket.socket, env: dict[str, str]):
        self._connection, self._read_at_start = connection, _read_at_start(env)

    @classmethod
    def start(cls, env: dict[str, str]) -> "Server":
        """Return a new server. It ends with this process, or with close()."""
        connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, str(theirs.fileno())]
        with theirs:
            subprocess.Popen(command, env=env | {"GOMP_SPINCOUNT": "1000"}, pass_fds=[theirs.fileno()])
        return cls(connection, env)

    def can_start(self, words: list[str], options: dict[str, Any]) -> bool:
        """Return whether a Preloaded with these arguments would be like a real `python *words`."""
        if not words or not words[0].endswith(".py") or options.keys() - _OPTIONS:
            return False
        return _read_at_start(options.get("env") or os.environ) == self._read_at_start

    def fork(self, request: dict[str, Any], files: list[int]) -> int:
        """Return the pid of a child of this process that executes the request."""
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
    return {name: value for name, value in env.items() if name.startswith(_READ_AT_START)}


def _adopt_orphans(adopt: bool) -> None:
    """Let this process become the parent of its grandchildren whose parents end, or stop that."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def _load_packages() -> None:
    for package in PACKAGES:
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
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])


def _fork_server() -> dict[str, Any] | None:
    """Let this process start processes of its own through a server, forked now: the ranks of a node.

    Return the request in such a process, and None in this one.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        for number in range(3):
            with open(os.devnull, "r+b") as null:
                os.dup2(null.fileno(), number)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return _serve(theirs) or sys.exit()
    theirs.close()
    server = Server(ours, dict(os.environ))
    real = subprocess.Popen

    def start(command: Any, **options: Any) -> subprocess.Popen:
        if command[0] == sys.executable and server.can_start(command[1:], options):
            return Preloaded(server, command[1:], **options)
        return real(command, **options)

    subprocess.Popen = start  # type: ignore[assignment, misc]
    return None


def _execute(words: list[str]) -> None:
    """Execute a script in this process as a new Python would."""
    gc.unfreeze()
    sys.argv, sys.orig_argv = list(words), [sys.executable, *words]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = os.path.abspath(words[0])
    sys.path[0] = os.path.dirname(main.__file__)
    with open(words[0], "rb") as file:
        code = compile(file.read(), main.__file__, "exec")
    exec(code, main.__dict__)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "This process .* is multi-threaded, use of fork", DeprecationWarning)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _load_packages()
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    while request:  # in a child: a job, and then again in each rank that the job starts
        _become(request)
        words = request["words"]
        several = any("processes_per_node" in word for word in words) and "RANK" not in os.environ
        request = _fork_server() if several else None
        if not request:
            _execute(words)

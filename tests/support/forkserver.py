"""Run a program in a fork of a process that has imported torch, which saves seconds of each start.

The fork server is that of multiprocessing. The program runs as `__main__`, with its own arguments,
environment, folder, session and output. Processes that it starts, as a launcher its ranks, are new Pythons.
"""

import atexit
import contextlib
import functools
import gc
import itertools
import multiprocessing
import multiprocessing.connection
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import types
import weakref
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

_ROOT = Path(__file__).resolve().parent.parent.parent
_PIPES = (subprocess.PIPE, subprocess.STDOUT)
_CONTEXT = multiprocessing.get_context("forkserver")
_PACKAGES = [
    "torch", "torch._dynamo", "torchvision", "torch.utils.tensorboard",
    "sklearn.datasets", "cv2", "simplejpeg", "boto3",
]  # fmt: skip
# Beginnings of the names of variables that Python, torch or OpenMP read when they start.
_READ_AT_START = (
    "PYTHON", "LD_", "LANG", "LC_", "OMP", "GOMP", "MKL", "KMP", "TORCH", "CUDA", "ATEN_", "ONEDNN_", "DNNL_",
    "OPENBLAS_",
)  # fmt: skip
_LEVELS = ("--cpu_level", "--cpu-level")
# Of these, what scikit-learn, OpenCV and torch set in the process of the tests when they are imported.
_SET_BY_IMPORTS = (
    "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "LD_LIBRARY_PATH", "TORCHELASTIC_", "TORCH_NCCL_",
    "TORCHINDUCTOR_CACHE_DIR",
)  # fmt: skip


def can_fork(words: list[str], options: dict, usual: dict[str, str]) -> bool:
    """Return whether start() can run the words: a script, a module or code, with these options of Popen.

    usual: the environment in which the fork server starts. That of the program must have the same values of
    what is read at a start. PYTHONPATH may name this repository, which has nothing that Python imports when
    it starts.
    """
    is_program = words[0] in ("-m", "-c") or words[0].endswith(".py")
    # a level of instructions is set before torch is imported
    is_program = is_program and not any(word.startswith(_LEVELS) for word in words)
    known = not options.keys() - {"cwd", "env", "stderr", "start_new_session"}
    changed = {name for name, _ in options["env"].items() ^ usual.items()}
    if options["env"].get("PYTHONPATH") == str(_ROOT):
        changed.discard("PYTHONPATH")
    return (
        is_program
        and known
        and options["stderr"] in _PIPES
        and not any(
            name.startswith(_READ_AT_START) and not name.startswith(_SET_BY_IMPORTS) for name in changed
        )
    )


class Forked:
    """A program in a fork, with the members of subprocess.Popen that the tests use."""

    def __init__(self, words: list[str], process, stdout, stderr) -> None:
        self.args, self.pid, self._process = words, process.pid, process
        self.stdout, self.stderr = stdout, stderr
        self._texts: dict = {}
        self._readers: list[threading.Thread] = []
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:  # multiprocessing reads the exit code from a pipe, once
            return self._process.exitcode

    returncode = property(poll)

    def wait(self, timeout: float | None = None) -> int:
        multiprocessing.connection.wait([self._process.sentinel], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str | None]:
        """Wait until both outputs are closed and the program has ended, and return the outputs."""
        streams = [stream for stream in (self.stdout, self.stderr) if stream]
        if not self._readers:
            for stream in streams:
                self._readers.append(threading.Thread(target=self._read, args=[stream], daemon=True))
                self._readers[-1].start()
        for reader in self._readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout)
        self.wait(timeout)
        return self._texts[self.stdout], self._texts.get(self.stderr)

    def _read(self, stream) -> None:
        with stream:
            self._texts[stream] = stream.read()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(words: list[str], options: dict, usual: dict[str, str]) -> Forked:
    """Start `python *words` in a fork. The arguments are those of can_fork()."""
    path = _path_of_a_new_python()
    _ensure_server(usual)
    pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(1 if options["stderr"] == subprocess.STDOUT else 2)]
    writers = [pipes[0][1], pipes[-1][1]]
    process = _CONTEXT.Process(target=_run_program, args=(words, options, path, writers))
    process.start()
    streams = [os.fdopen(os.dup(reader.fileno())) for reader, _ in pipes]
    for end in itertools.chain(*pipes):
        end.close()
    return Forked(words, process, *streams, *[None] * (2 - len(streams)))


@atexit.register
def _kill_what_a_test_left() -> None:
    """End the programs that still run: multiprocessing would wait for them at the end of this process."""
    for process in multiprocessing.active_children():
        process.kill()


def _ensure_server(usual: dict[str, str]) -> None:
    _CONTEXT.set_forkserver_preload(_PACKAGES)
    with mock.patch.dict(os.environ, usual | {"GOMP_SPINCOUNT": "1000"}, clear=True):  # as jobs set it
        forkserver.ensure_running()


@functools.cache
def _path_of_a_new_python() -> list[str]:
    code = "import sys; print(*sys.path[1:], sep='\\n')"
    return subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()


def _run_program(words: list[str], options: dict, path: list[str], outputs: list) -> None:
    """Run the program in this process, and end the process as Python ends."""
    gc.freeze()  # a collection need not look at the packages, whose pages would be copied
    atexit.unregister(_kill_what_a_test_left)  # it belongs to the process of the tests
    weakref.finalize._registry.clear()  # at the end torch would remove its operators, which takes 50 ms
    if options.get("start_new_session"):
        os.setsid()
    for number, output in enumerate(outputs, 1):
        os.dup2(output.fileno(), number)
    for output in outputs:
        output.close()
    os.chdir(options["cwd"])
    os.environ.clear()
    os.environ.update(options["env"])
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.set_start_method(None, force=True)
    sys.orig_argv = [sys.executable, *words]
    if "PYTHONPATH" in options["env"]:
        path = [options["env"]["PYTHONPATH"], *path]
    code = 1
    try:
        if words[0] == "-m":
            sys.argv, sys.path[:] = words[1:], [str(options["cwd"]), *path]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv, sys.path[:] = ["-c", *words[2:]], ["", *path]
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(words[1], vars(sys.modules["__main__"]))
        else:
            sys.argv, sys.path[:] = words, [os.path.dirname(os.path.abspath(words[0])), *path]
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the program may have closed it
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)

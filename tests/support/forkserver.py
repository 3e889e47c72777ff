"""Run a program in a fork of a process that has imported torch, which saves seconds of each start.

The fork server is that of multiprocessing. The program runs as `__main__`, with its own arguments,
environment, folder and output. Tests of signals, process groups or imports start a new Python instead.
"""

import atexit
import contextlib
import functools
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

_CONTEXT = multiprocessing.get_context("forkserver")
_PACKAGES = [
    "torch", "torch._dynamo", "torchvision", "torch.utils.tensorboard",
    "sklearn.datasets", "cv2", "simplejpeg", "boto3",
]  # fmt: skip
# Beginnings of the names of variables that Python, torch or OpenMP read when they start.
_READ_AT_START = ("PYTHON", "LD_", "LANG", "LC_", "OMP", "GOMP", "MKL", "KMP", "TORCH", "CUDA")
# Of these, what scikit-learn, OpenCV and torch set in the process of the tests when they are imported.
_SET_BY_IMPORTS = (
    "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "LD_LIBRARY_PATH", "TORCHELASTIC_", "TORCH_NCCL_",
    "TORCHINDUCTOR_CACHE_DIR",
)  # fmt: skip


def can_fork(words: list[str], env: dict[str, str], usual: dict[str, str]) -> bool:
    """Return whether the words are a script or a module, and env has the values that are read at a start.

    usual: the environment in which the fork server starts.
    """
    is_program = words[0] == "-m" or words[0].endswith(".py")
    changed = {name for name, _ in env.items() ^ usual.items()}
    return is_program and not any(
        name.startswith(_READ_AT_START) and not name.startswith(_SET_BY_IMPORTS) for name in changed
    )


def run(
    words: list[str],
    cwd: Path,
    env: dict[str, str],
    usual: dict[str, str],
    timeout: float,
) -> subprocess.CompletedProcess:
    """Run `python *words` to its end. After timeout seconds, kill it and raise subprocess.TimeoutExpired.

    usual: as for can_fork().
    """
    path = _path_of_a_new_python()
    _ensure_server(usual)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / "stdout", Path(folder) / "stderr"]
        process = _CONTEXT.Process(target=_run_program, args=(words, cwd, env, path, files))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(words, timeout, *(file.read_text() for file in files))
        return subprocess.CompletedProcess(words, process.exitcode, *(file.read_text() for file in files))


def _ensure_server(usual: dict[str, str]) -> None:
    _CONTEXT.set_forkserver_preload(_PACKAGES)
    with mock.patch.dict(os.environ, usual | {"GOMP_SPINCOUNT": "1000"}, clear=True):  # as jobs set it
        forkserver.ensure_running()


@functools.cache
def _path_of_a_new_python() -> list[str]:
    code = "import sys; print(*sys.path[1:], sep='\\n')"
    return subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()


def _run_program(
    words: list[str], cwd: Path, env: dict[str, str], path: list[str], files: list[Path]
) -> None:
    """Run the program in this process, and end the process as Python ends."""
    for number, file in enumerate(files, 1):
        with open(file, "wb") as opened:
            os.dup2(opened.fileno(), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.set_start_method(None, force=True)
    sys.orig_argv = [sys.executable, *words]
    code = 1
    try:
        if words[0] == "-m":
            sys.argv, sys.path[:] = words[1:], [str(cwd), *path]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[:] = words, [os.path.dirname(os.path.abspath(words[0])), *path]
            runpy.run_path(words[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the program may have closed it
            stream.flush()
    os._exit(code)

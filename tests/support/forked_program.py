"""Run a program in this process, a fork of one that has imported torch, and end as Python ends."""

import atexit
import contextlib
import gc
import io
import multiprocessing
import multiprocessing.process
import os
import re
import runpy
import signal
import sys
import tempfile
import threading
import types
import weakref
from pathlib import Path

# Beginnings of the names of variables that Python, torch or OpenMP read when they start.
_READ_AT_START = (
    "PYTHON", "LD_", "LANG", "LC_", "OMP", "GOMP", "MKL", "KMP", "TORCH", "CUDA", "ATEN_", "ONEDNN_", "DNNL_",
    "OPENBLAS_",
)  # fmt: skip
# Of these, what scikit-learn, OpenCV and torch set in the process of the tests when they are imported.
_SET_BY_IMPORTS = (
    "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "LD_LIBRARY_PATH", "TORCHELASTIC_", "TORCH_NCCL_",
    "TORCHINDUCTOR_CACHE_DIR",
)  # fmt: skip
_THREADS = "OMP_NUM_THREADS"  # a fork sets them; NumPy's OpenBLAS keeps those of the server
_LEVELS = ("--cpu_level", "--cpu-level")
# Packages of the fork server that tests put doubles of into a folder, or that have other names there.
_IMPORTED = ("torch", "torchvision", "numpy", "sklearn", "cv2", "boto3", "pydantic", "psutil", "torch_npu")
# What jobs set before they import torch, and the hash seed of the fork server of `bootfile prove`.
PRESET = {"GOMP_SPINCOUNT": "1000", "PYTHONHASHSEED": "3"}
# /proc shows the environment of a fork where that of its server stands: the server has room for a longer one
ROOM = {"ROOM_FOR_FORKS": "x" * 100_000}
STOP_AT = "TESTS_STOP_AT"  # a variable: the pattern of a line of its output at which a program stops itself


class _StoppingOutput(io.TextIOWrapper):
    """The standard output of a program that sends SIGSTOP to itself after the first line that matches."""

    pattern = ""
    _line = ""  # the present one

    def write(self, text: str) -> int:
        count = super().write(text)
        lines, end, rest = (self._line + text).rpartition("\n")
        self._line = rest
        if self.pattern and end and re.search(self.pattern, lines, re.MULTILINE):
            self.pattern = ""
            self.flush()
            os.kill(os.getpid(), signal.SIGSTOP)
        return count


def can_run(words: list[str], environment: dict[str, str], usual: dict[str, str]) -> bool:
    """Return whether run() does what `python *words` does in an environment.

    usual: the environment in which torch was imported. What is read at a start must have the same values.
    PYTHONPATH may name folders that have nothing that was imported before.
    """
    is_program = bool(words) and (words[0] in ("-m", "-c") or words[0].endswith(".py"))
    # a level of instructions is set before torch is imported
    is_program = is_program and not any(word.startswith(_LEVELS) for word in words)
    changed = {name for name, _ in (PRESET | environment).items() ^ (usual | PRESET).items()}
    if environment.get(_THREADS, "").isdecimal():
        changed.discard(_THREADS)
    if not any(map(_has_what_a_start_imports, environment.get("PYTHONPATH", "").split(os.pathsep))):
        changed.discard("PYTHONPATH")
    return is_program and not any(
        name.startswith(_READ_AT_START) and not name.startswith(_SET_BY_IMPORTS) for name in changed
    )


def _has_what_a_start_imports(folder: str) -> bool:
    """Return whether a folder of PYTHONPATH has a module that Python imports when it starts, or that this
    process and its forks have imported: a new Python would take it from there."""
    names = {"sitecustomize", "usercustomize", *_IMPORTED}
    return bool(folder) and any(
        os.path.exists(os.path.join(folder, each)) for name in names for each in (name, f"{name}.py")
    )


def show_in_proc(words: list[str], environment: dict[str, str]) -> None:
    """Write the command and the environment where /proc/PID/cmdline and /proc/PID/environ read them.

    Call it when os.environ was cleared: the C library then uses nothing of this memory.
    """
    import ctypes

    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    command = [sys.executable, *words]
    variables = [f"{name}={value}" for name, value in environment.items()]
    for texts, begin, end in ((command, *fields[45:47]), (variables, *fields[47:49])):
        size = int(end) - int(begin)
        data = b"".join(os.fsencode(text) + b"\0" for text in texts)
        if len(data) > size:
            data = data[: size - 1] + b"\0"
        ctypes.memmove(int(begin), data.ljust(size, b"\0"), size)


def run(words: list[str], environment: dict[str, str], folder: str, path: list[str]) -> None:
    """Run `python *words`, and end this process. path: the entries of sys.path after the first one."""
    gc.freeze()  # a collection need not look at the packages, whose pages would be copied
    weakref.finalize._registry.clear()  # at the end torch would remove its operators, which takes 50 ms
    os.chdir(folder)
    multiprocessing.process.ORIGINAL_DIR = folder  # the folder of a program with a relative path
    os.environ.clear()
    show_in_proc(words, environment)
    os.environ.update(environment)
    torch, threads = sys.modules["torch"], environment.get(_THREADS, "")
    if threads.isdecimal() and int(threads) != torch.get_num_threads():
        torch.set_num_threads(int(threads))
    tempfile.tempdir = None
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    multiprocessing.set_start_method(None, force=True)
    sys.orig_argv = [sys.executable, *words]
    if STOP_AT in environment:
        sys.stdout = _StoppingOutput(open(1, "wb", 0, closefd=False), write_through=True)  # noqa: SIM115
        sys.stdout.pattern = environment[STOP_AT]
    if environment.get("PYTHONPATH"):
        path = [*environment["PYTHONPATH"].split(os.pathsep), *path]
    code = 1
    try:
        if words[0] == "-m":
            sys.argv, sys.path[:] = words[1:], [folder, *path]
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

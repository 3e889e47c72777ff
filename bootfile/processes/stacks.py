"""Where threads are: their Python stacks, and the one line of them that tells a user most.

Those of this process are read by its own thread; another process of the node writes its own to a file in
memory when a signal asks for them.
"""

import contextlib
import faulthandler
import fcntl
import itertools
import os
import re
import signal
import sys
import sysconfig
import tempfile
import time
from types import FrameType
from typing import NamedTuple

from bootfile.processes import signals

_LINE = re.compile(r'  File "(.+)", line (\d+) in (.+)')
_LIBRARIES = {sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_LIBRARIES |= {os.path.realpath(folder) + os.sep for folder in _LIBRARIES}
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep  # may be in site-packages
_GROUP = os.path.join("elastic", "group.py")  # it waits for gloo in the place of torch
_WRAPPERS = ("__torch_function__", "__torch_dispatch__")  # functions around an operation that the loop calls
_DEEPEST = 100  # frames of a stack that are shown
_DISTRIBUTED = f"torch{os.sep}distributed{os.sep}"
# its parts that compute, or write files: they wait only where they call a collective themselves
_COMPUTES = tuple(f"{_DISTRIBUTED}{name}{os.sep}" for name in ("algorithms", "checkpoint", "fsdp", "optim"))
_LOADERS = (f"torch{os.sep}utils{os.sep}data{os.sep}", f"bootfile{os.sep}loaders{os.sep}")
_COMPILERS = (f"torch{os.sep}_dynamo{os.sep}", f"torch{os.sep}_inductor{os.sep}")
# a debugger is in one of these functions while its user looks at the program; pydevd is a part of debugpy
_PAUSES = ("pdb.py interaction", "bdb.py trace_dispatch", "pydevd.py _do_wait_suspend")

# free on Linux: the signals of real time have no other use
_SIGNAL = getattr(signal, "SIGRTMAX", 0) - 5
_ANSWER = 1.0  # seconds
_MOST_BYTES = 2**17  # of a file of stacks
_file: int | None = None  # the one of this process

# verbs of a Place
IN = "in"
WAITS = "waits"
HELD = "held"
STOPPED = "stopped"
ENDED = "ended"
SILENT = "silent"


class Frame(NamedTuple):
    """A line of a stack."""

    file: str
    line: int
    function: str


Stack = list[Frame]  # the newest frame first


class Place(NamedTuple):
    """Where a process is. verb: IN; WAITS, if it is for other ranks; HELD, if C code holds its lock of
    Python; or what else keeps it from being asked. name: "all_reduce (loop.py:210)"."""

    verb: str
    name: str


def read(frame: FrameType | None) -> Stack:
    """Return the stack of a thread of this process. frame: that of sys._current_frames()."""
    stack: Stack = []
    while frame is not None and len(stack) < _DEEPEST:
        code = frame.f_code
        stack.append(Frame(code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return stack


def parse(dump: str) -> Stack:
    """Return the stack of the main thread in what faulthandler has written: it comes last."""
    last = re.split(r"\n(?=(?:Current thread|Thread) )", dump)[-1]
    lines = _LINE.findall(last.split("\n\n")[0])
    return [Frame(file, int(line), function) for file, line, function in lines]


def show(name: str, stack: Stack) -> str:
    """Return the lines of the stack of a thread or process, as faulthandler writes them."""
    lines = [f'  File "{frame.file}", line {frame.line} in {frame.function}\n' for frame in stack]
    return f"{name} (newest line first):\n{''.join(lines)}\n"


def find_place(stack: Stack) -> Place:
    """Return the place that a stack shows: a collective or a backward pass, or else the newest function that
    belongs to no library; with the line of the program that it is at."""
    # the newest frames are those of libraries; below them is the line of the program that has called them
    called = list(itertools.takewhile(_is_called, stack))
    newest = (stack[len(called) :] or stack or [Frame("?", 0, "?")])[0]
    line = f"({os.path.basename(newest.file)}:{newest.line})"
    if collectives := [frame.function for frame in called if _is_collective(frame)]:
        # the oldest is the function that the program has called; the others are inside of it
        return Place(WAITS, f"{collectives[-1]} {line}")
    if any(frame.function == "backward" for frame in called):  # DistributedDataParallel waits in it
        return Place(WAITS, f"backward {line}")
    return Place(IN, f"{newest.function} {line}")


def _is_called(frame: Frame) -> bool:
    return _is_library(frame.file) or frame.function in _WRAPPERS


def _is_collective(frame: Frame) -> bool:
    is_part = _DISTRIBUTED in frame.file and not any(part in frame.file for part in _COMPUTES)
    return is_part and frame.function != "wrapper"  # torch's decorator


def waits_for_data(stack: Stack) -> bool:
    """Return whether the loop of a stack waits for a batch."""
    return any(part in frame.file for frame in stack for part in _LOADERS)


def is_compiling(stack: Stack) -> bool:
    """Return whether torch compiles a model."""
    return any(part in frame.file for frame in stack for part in _COMPILERS)


def is_at_rest(stack: Stack) -> bool:
    """Return whether a user holds the thread: a debugger, or a prompt or notebook that runs no cell. The
    watching thread asks before it says that a run is stuck. An empty stack, of a thread that has ended or of
    a dump without lines, says nothing, and so counts as one at rest."""
    # anywhere: a command that the user types there may have newer lines
    if any(f"{os.path.basename(frame.file)} {frame.function}" in _PAUSES for frame in stack):
        return True
    # the kernel runs between two cells, too: then it waits for the user, and nothing is stuck
    in_notebook = any("ipykernel" in frame.function or "ipykernel" in frame.file for frame in stack)
    cells = [frame for frame in stack if "ipykernel_" in frame.file or frame.file.startswith("<ipython")]
    return not stack or (in_notebook and not cells)


def is_idle(stack: Stack) -> bool:
    """Return whether a worker has nothing to do: no line of its stack belongs to a program."""
    return all(_is_library(frame.file) for frame in stack)


def _is_library(file: str) -> bool:
    is_library = "site-packages" in file or file.startswith((*_LIBRARIES, "<frozen")) or file.endswith(_GROUP)
    return is_library and not file.startswith(_OURS)


def make_file(name: str) -> int:
    """Return the descriptor of a file in memory, which other processes of the user open in /proc/PID/fd. What
    is written to it is appended."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create(f"bootfile-{name}")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)
    return descriptor


def write_on_signal() -> int:
    """Let this process, and those that are forked from it, write their stacks to a file in memory at the
    signal of ask(). Return the descriptor of the file, which stays open until the process ends.

    C code writes them, also while other C code holds the lock of Python. If the program uses the signal
    itself, nothing is written.
    """
    global _file
    if _file is None:
        _file = make_file("stacks")
        if sys.platform == "linux" and not signals.catches(os.getpid(), _SIGNAL):
            faulthandler.register(_SIGNAL, file=_file, all_threads=True)
    return _file


def ask(pid: int, owner: int, descriptor: int) -> str:
    """Return the stacks of a process of this node; "" if it does not write them.

    owner, descriptor: a process that has the file of write_on_signal() open, and its descriptor there.
    """
    text = b""
    if not signals.catches(pid, _SIGNAL):  # the signal would end the process
        return ""
    with contextlib.suppress(OSError), open(f"/proc/{owner}/fd/{descriptor}", "r+b", buffering=0) as file:
        file.truncate(0)
        os.kill(pid, _SIGNAL)
        deadline = time.monotonic() + _ANSWER
        # all is written when the file does not grow any more
        while time.monotonic() < deadline and not (text and len(text) == os.fstat(file.fileno()).st_size):
            text = os.pread(file.fileno(), _MOST_BYTES, 0)
            time.sleep(0.02)
    return text.decode(errors="replace")

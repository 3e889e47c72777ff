"""Native crashes of the processes of an elastic job: their signals, and the line of Python that crashed."""

import contextlib
import faulthandler
import linecache
import os
import re
import signal
import sysconfig
from multiprocessing.connection import Connection

# A program sends these signals to itself. SIGKILL comes from outside: from the kernel, a user or a platform.
SIGNALS = {
    "SIGSEGV": signal.SIGSEGV,
    "SIGBUS": signal.SIGBUS,
    "SIGABRT": signal.SIGABRT,
    "SIGFPE": signal.SIGFPE,
    "SIGILL": signal.SIGILL,
}
# Crashes in a row in one step that end the job. One or two may be an accident: a flipped bit, a data race. A
# crash that comes in one of 100 attempts comes three times in a row in one of a million.
MOST = 3
MEANING = "a native crash of a library or of an extension, not a lost machine (guides/trouble.md)"

_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
_LONGEST = 80  # characters of a line of code that are shown
_LIBRARIES = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
_writers: list[Connection] = []  # open as long as the process: faulthandler has only their numbers


def is_crash(reason: str) -> bool:
    """Return whether a process ended by a crash. reason: begins with the name of the signal."""
    return reason.partition(" ")[0] in SIGNALS


def describe(who: str, reason: str, place: str, count: int) -> str:
    """Return the line of a crash that came `count` times in a row and ends the job. who: the last process.
    reason: the signal, and the line of Python if it is known. place: for example "in step 27"."""
    name, _, line = reason.partition(" ")
    where = f", {line}" if line else ""
    return f"{who} ended by {name} {place}, {count} times in a row{where}: {MEANING}"


def report_to(writer: Connection) -> None:
    """Write the Python stacks of this process to a pipe when it crashes. Each fork calls it before main(). If
    the user has enabled faulthandler, it writes them to stderr as before."""
    if faulthandler.is_enabled():
        return
    os.set_blocking(writer.fileno(), False)  # if the pipe is full, the rest of the stacks is dropped
    faulthandler.enable(writer.fileno())
    _writers.append(writer)


def read_place(reader: Connection) -> str:
    """Return the line of Python that has crashed, as find_place() does, and close the pipe. Does not wait.
    The agent calls it for each process that has ended."""
    dump = b""
    with contextlib.suppress(BlockingIOError):  # a worker of the process holds the other end
        os.set_blocking(reader.fileno(), False)
        while True:
            block = os.read(reader.fileno(), 2**16)
            if not block:
                break
            dump += block
    reader.close()
    return find_place(dump.decode(errors="replace"))


def find_place(dump: str) -> str:
    """Return "FILE:LINE (code)" for the stacks that faulthandler has written; "" without one. It is the
    newest line of the crashed thread that belongs to no installed package. If Python does not know the
    thread, as one of OpenMP, it is that of the main thread, which comes last."""
    stacks = re.split(r"\n(?=(?:Current thread|Thread) )", dump)
    current = [stack for stack in stacks if stack.startswith("Current thread 0x")]
    stack = (current or stacks)[-1]
    frames = _FRAME.findall(stack.split("\n\n")[0])  # the newest first
    frames_of_job = [frame for frame in frames if not _is_installed(frame[0])]
    if not frames:
        return ""
    file, line, function = (frames_of_job or frames)[0]
    code = linecache.getline(file, int(line)).strip() or function
    file = file.removeprefix(os.path.join(os.getcwd(), ""))
    return f"{file}:{line} ({code[:_LONGEST]})"


def _is_installed(file: str) -> bool:
    """Return whether a file belongs to Python or to an installed package, not to the job."""
    is_library = any(file.startswith(f"{folder}/") for folder in _LIBRARIES)
    return is_library or "/site-packages/" in file or file.startswith("<")

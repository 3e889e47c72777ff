"""Stop the job on a signal: SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU or SIGPWR from a platform, SIGINT (Ctrl-C) or
SIGHUP (the terminal was closed) from a user. nohup and background jobs of a shell ignore SIGHUP or SIGINT
from the start; they stay ignored. SIGUSR1, SIGXCPU and SIGPWR stay with the job if it handles them itself.

A Python signal handler cannot run while the main thread waits in a collective, for example for a lost peer.
So the C-level handler writes the signal's number to a pipe (signal.set_wakeup_fd), and a thread reads it.
"""

import contextlib
import ctypes
import mmap
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING

from bootfile.ground.errors import INTERRUPTED, leave, print_line, say_error

if TYPE_CHECKING:  # a job imports this module before torch
    from torch._C._distributed_c10d import Store

# signals that a job may use itself: they stop it only if it has no handler for them
_OPTIONAL = {getattr(signal, name) for name in ("SIGUSR1", "SIGXCPU", "SIGPWR") if hasattr(signal, name)}
SIGNALS = (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP, *sorted(_OPTIONAL))
_CODES: dict[int, int] = {number: 128 + number for number in (signal.SIGINT, signal.SIGHUP, *_OPTIONAL)}
SAME_PRESS = 0.5  # seconds: for one Ctrl-C both the terminal and the launcher send SIGINT

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before any fork
_KEY = "stop request"
_POLL = 0.5  # seconds

# the state of this process
_asked = threading.Event()  # the job stops
_watching = threading.Event()  # watch() was called
_followed: list[threading.Thread] = []  # the thread that reads the store, until unfollow()
_grace = 25.0  # seconds from a signal to the end
_said = threading.Event()  # the line that names the signal of this process was printed
_MOST_TO_SAY = 2.0  # seconds that the end of training waits for that line: the log may be blocked
_unwind = 3.0  # seconds for the main thread to end by itself after Ctrl-C when no job is watched
_code = 128 + signal.SIGTERM  # the exit code after the signal
_number = 0  # the signal that this process got
_reason = ""  # why the job stops, if not because of a signal: see ask()
_reader: int | None = None  # the reading end of the pipe
_store: "Store | None" = None  # in which the processes share a request to stop
_rank = 0  # the rank of this process
_token = ""  # only the processes of the job know it
_deferred: Callable[[int], object] | None = None  # the function of defer()
_shared: mmap.mmap  # what its forked children read: forked_signals.ASKED or ENDS


def asked() -> bool:
    """Return whether this process, or another one of the job, was asked to stop."""
    return _asked.is_set()


def wait() -> None:
    """Wait until asked(). A thread calls it (waits.py)."""
    _asked.wait()


def exit_code() -> int:
    """Return the exit code after signal n: 143 for SIGTERM and SIGUSR2, 128 + n for the others."""
    return _code


def code_after(number: int) -> int:
    """Return the exit code of a job that signal n has stopped."""
    return _CODES.get(number, 128 + signal.SIGTERM)


def end_on_interrupt() -> None:
    """Make SIGINT raise KeyboardInterrupt in the main thread, and end the process 3 s later if it still runs,
    or after the seconds of unwind_within().

    Call it in the main thread. entry.run() does before main(); watch() takes its place when training begins.
    """
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        _start()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked by launcher.start()


def unwind_within(seconds: float) -> None:
    """Set the time between Ctrl-C and the end of a process that cleans up first."""
    global _unwind
    _unwind = seconds


def identify(rank: int, token: str) -> None:
    """Set the rank and the token with which this process sends requests to stop. Call it before watch().

    token: a text that only the processes of the job know; a request without it is ignored.
    """
    global _rank, _token
    _rank = rank
    _token = token


def defer(report: Callable[[int], object]) -> None:
    """Call report(number) for a signal, in the thread that reads signals. The job stops at the next call of
    hear(). A member of an elastic job calls it: its agent decides what the signal means."""
    global _deferred
    _deferred = report


def watch(grace: float, store: "Store | None" = None) -> None:
    """Let a signal stop the job at its next step: from now on SIGNALS only set asked().

    The loop calls it on each rank when training begins, in the main thread: in another thread, where Python
    allows no handlers, it prints a warning. Signals that the user ignores or the job handles stay as they
    are. A forked child (a DataLoader's worker) ignores the signals; its parent ends it (forked_signals.py).

    grace: seconds after a signal until the process ends with exit_code() if it still runs. A second SIGINT
        ends it at once.
    store: shared by the processes of the job, which send each other the signal through it. A platform may
        send it to one node only, and ranks that evaluate do not communicate otherwise.
    """
    global _grace, _store
    if threading.current_thread() is not threading.main_thread():
        if not _watching.is_set():  # a notebook may have trained in its main thread before
            print_line("warning: the loop is not in the main thread: a signal ends it without a save")
        return
    _grace = grace
    _store = store
    _start()
    # before the handlers: the thread drops a signal that arrives while nothing is watched
    _watching.set()
    for number in SIGNALS:
        if _is_ours(number):
            signal.signal(number, _note)
            signal.siginterrupt(number, False)  # libraries' system calls are restarted
    if store:
        thread = threading.Thread(target=_follow, args=(store,), name="others' signals", daemon=True)
        _followed.append(thread)
        thread.start()


def unfollow() -> None:
    """End the thread that reads the store, because a process that ends while it reads is aborted. Then wait
    until the line that names the signal was printed. The loop calls it at the end of training."""
    threads = list(_followed)  # several if an exception has ended an earlier loop
    _followed.clear()  # a thread ends when the list is empty
    for thread in threads:
        thread.join()
    if _number and not _deferred:
        _said.wait(_MOST_TO_SAY)


def ignore(numbers: Iterable[int] = SIGNALS) -> None:
    """Ignore the signals of a job in a process that it has started, except those that the job uses itself.
    The process calls this when it begins. Its parent ends it."""
    forget()
    for number in numbers:
        if number not in _OPTIONAL or _is_ours(number):
            signal.signal(number, signal.SIG_IGN)


def _is_ours(number: int) -> bool:
    """Return whether one of SIGNALS stops the job.

    SIGTERM and SIGUSR2 always stop it, SIGINT and SIGHUP unless they are ignored, as by nohup. One of
    _OPTIONAL stops it unless the job ignores it or has a handler for it, in Python or in C (faulthandler).
    """
    handler = signal.getsignal(number)
    if number not in _OPTIONAL:
        return number in (signal.SIGTERM, signal.SIGUSR2) or handler != signal.SIG_IGN
    return handler == _note or (handler == signal.SIG_DFL and not catches(os.getpid(), number))


def catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal, in Python or in C (Linux)."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        caught = next(line for line in file if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
    return False


def forget() -> None:
    """Undo end_on_interrupt(), in a process that handles the signals itself."""
    signal.set_wakeup_fd(-1)


def die_with_parent(number: int) -> None:
    """Make the kernel send this process a signal when its parent ends (Linux). Safe between fork and exec."""
    if _libc:
        PR_SET_PDEATHSIG = 1
        _libc.prctl(PR_SET_PDEATHSIG, number)


def _start() -> None:
    """Start the thread that reads the numbers of signals, once in a process."""
    global _reader, _shared
    if _reader is not None:
        return
    _shared = mmap.mmap(-1, 1)  # one byte that children share, see forked_signals.py
    _reader, writer = os.pipe()
    # a full pipe must not hold the handler of a signal
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    os.register_at_fork(before=_before_fork)
    threading.Thread(target=_listen, args=(_reader,), name="signals", daemon=True).start()


def end_daemons() -> None:
    """Send SIGTERM to the daemonic processes that this one has started, as Python does at its end, but do not
    wait for them. A training that ends by os._exit() calls it: it must not load a module then."""
    if _reader is not None:
        _shared[0] = 2  # forked_signals.ENDS
    for child in multiprocessing.active_children():
        if child.daemon:
            child.terminate()


def _before_fork() -> None:
    """Prepare for a fork: the child must not write to the pipe of this process, and may need handlers."""
    from bootfile.processes import forked_signals  # a process that forks nothing does not load it

    forked_signals.prepare(_shared, _watching, _ignore_others, forget)


def _ignore_others() -> None:
    """Ignore all signals of a job except SIGTERM, in a forked child."""
    ignore(set(SIGNALS) - {signal.SIGTERM})


def _note(number: int, frame: FrameType | None) -> None:
    """Do nothing: the thread has read the signal already when Python calls this handler."""


def _listen(reader: int) -> None:
    """Read the numbers of signals, also while the main thread is in a collective: the thread "signals"."""
    interrupted_at: float | None = None  # the first SIGINT
    while True:
        number = os.read(reader, 1)[0]
        if not number:
            return
        if number == signal.SIGINT:
            now = time.monotonic()
            if interrupted_at is None:
                interrupted_at = now
                if not _watching.is_set():
                    _call_after(_unwind, _end, INTERRUPTED, "interrupted")
            # the first Ctrl-C asks for a checkpoint, the second one for an end at once
            elif now - interrupted_at > SAME_PRESS:
                _end(INTERRUPTED, "interrupted again: exiting without another checkpoint")
        # the pipe gets all signals that Python handles, also those that the job handles itself
        is_of_job = number in _OPTIONAL and signal.getsignal(number) != _note
        is_ours = number in SIGNALS and not is_of_job
        if is_ours and _watching.is_set():
            _shared[0] = _shared[0] or 1  # forked_signals.ASKED: a child that has got it, too, waits for this
            ask(number)


def ask(number: int, reason: str = "") -> None:
    """Stop the job as after this signal, once. reason: one line, in place of its name. For any thread."""
    global _code, _number, _reason
    if _number:
        return
    # before the loop can see the request: it ends with this code, and sends this number to the others
    if not _asked.is_set():  # else the signal of another process has decided
        _code = code_after(number)
    _number = number
    if _deferred:
        _deferred(number)
        return
    if _asked.is_set():  # another process has asked before, and its signal was printed
        _said.set()
        return
    _reason = reason
    _stop()  # before any call that could block or fail: the log may be closed
    if _store:
        from bootfile.processes import texts

        with contextlib.suppress(RuntimeError):  # the store's process has ended: the others end soon
            texts.write(_store, _KEY, f"{_rank} {number:d} {_token}" + (f" {reason}" if reason else ""))
    print_line(f"{reason or signal.Signals(number).name}: stopping at the next step, within {_grace:.0f} s")
    _said.set()


def _stop() -> None:
    """Let the loop stop at its next step, and end the process if it does not within the grace period."""
    _asked.set()
    text = f"not stopped within {_grace:.0f} s: exiting without another checkpoint"
    _call_after(_grace, _end, _code, text)


def _call_after(seconds: float, function: Callable[..., object], *arguments: object) -> None:
    """Call a function after `seconds`, even if other threads are blocked."""
    timer = threading.Timer(seconds, function, arguments)
    timer.daemon = True
    timer.start()


def _end(code: int, text: str) -> None:
    """End the process with the code. A thread calls it: the main thread may be blocked."""
    _call_after(1, os._exit, code)  # should the message block, as on a full pipe
    say_error(text)
    leave(code)


def _follow(store: "Store") -> None:
    """Look twice a second for a request of another process until the job stops, in a thread of watch()."""
    with contextlib.suppress(RuntimeError):  # the store's process has ended
        while not _asked.wait(_POLL) and _followed:
            look(store)


def received() -> tuple[int, str]:
    """Return the number of the signal that this process got, 0 if it got none, and the reason in place of a
    signal, else "". Each rank sends both to the others when the job stops."""
    return _number, _reason


def hear(rank: int, number: int, reason: str = "") -> None:
    """Stop because another rank was asked to, by this signal or reason, unless this process was before.

    Each rank calls it when the job stops: the vote of a step may be faster than the store. look() and a
    member of an elastic job call it when they learn of the signal.
    """
    global _code, _reason
    # the first signal decides: a later one changes neither the code nor the time of the end
    if not _asked.is_set():
        _code, _reason = code_after(number), reason
        _stop()
        if _rank == 0:
            cause = reason or f"{signal.Signals(number).name} at rank {rank}"
            print_line(f"{cause}: stopping at the next step, within {_grace:.0f} s")


def look(store: "Store") -> None:
    """Stop if another process of the job asks for it in the store. The thread of watch() calls it.

    Other users of the node may reach the store: a request without the token is ignored.
    """
    from bootfile.processes import texts  # only several processes have a store

    if match := re.fullmatch(rf"(\d+) (\d+) {_token}(?: (.+))?", texts.read(store, _KEY)):
        hear(int(match[1]), int(match[2]), match[3] or "")

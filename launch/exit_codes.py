"""What the exit code of a node means, in one table."""

import signal

from common.exits import BAD_INPUT, DIVERGED, LOST_CONTACT, NO_RENDEZVOUS, NOT_SAVED

NEVER_FIRED = 3  # of the simulation itself: every node ended with 0, but a fault had no occasion
TIME_LIMIT = 124

_CODES = {
    0: "done",
    1: "an error in the program: its traceback is in the log",
    BAD_INPUT: "bad input: the log has one line `error: ...` with the value",
    NO_RENDEZVOUS: "the processes did not find each other: the log names those that are missing or wrong",
    LOST_CONTACT: "contact with another process was lost: look at the node that failed first",
    NOT_SAVED: "the last results could not be written: the log says which, and why",
    DIVERGED: "training diverged: too many steps in a row without a finite loss and gradient",
    TIME_LIMIT: "ended by a time limit",
    126: "the command cannot be executed",
    127: "the command was not found",
}
_SIGNALS = {
    signal.SIGINT: "interrupted (Ctrl-C)",
    signal.SIGABRT: "aborted by a library: its message is in the log",
    signal.SIGBUS: "bus error: usually /dev/shm is full",
    signal.SIGKILL: "killed, or out of memory",
    signal.SIGSEGV: "segmentation fault",
    signal.SIGTERM: "asked to end",
}


def normalized(code: int) -> int:
    """An exit code as shells and platforms show it: 128 + n where subprocess says -n (ended by signal n)."""
    return code if code >= 0 else 128 - code


def explain(code: int) -> str:
    """One line on an exit code: 0..255, or -n as subprocess gives it.

    Signal n is seen as 128 + n (137: SIGKILL), and as 256 - n where a program called exit(-n) with the code
    that subprocess had given it (247: SIGKILL).
    """
    code = normalized(code)
    if code in _CODES:
        return _CODES[code]
    number = code - 128 if code < 192 else 256 - code
    try:
        name = signal.Signals(number)
    except ValueError:
        return "an exit code of the program's own: see the end of its log"
    return f"{name.name}: {_SIGNALS[name]}" if name in _SIGNALS else name.name

"""Describe exit codes in words: those of errors.py, of jobs, of the commands, and signals."""

import signal

from bootfile.ground.errors import BAD_INPUT, DIVERGED, LOST_CONTACT, NO_RENDEZVOUS, NOT_SAVED

# exit codes of `prove`
DIFFERS = 20
UNVERIFIED = 21
TIME_LIMIT = 124

# After these the same command continues: a scheduler starts it again, a limited number of times. 1 is also
# the code of torchrun, and of a loop that has lost a rank. 128 + n: a signal.
RESTARTED = (1, NO_RENDEZVOUS, LOST_CONTACT, NOT_SAVED, TIME_LIMIT, 129, 134, 137, 138, 143, 152, 158)

_CODES = {
    0: "done",
    1: "an error in the program: its traceback is in the log",
    BAD_INPUT: "bad input: the log has one line `error: ...` with the value",
    NO_RENDEZVOUS: "the processes did not connect to each other: the log names the missing or wrong ones",
    LOST_CONTACT: "contact with another process was lost: look at the node that failed first",
    NOT_SAVED: "the last results could not be written, or files could not be read: the log names the reason",
    DIVERGED: "training diverged: too many steps in a row without a finite loss and gradient",
    DIFFERS: "a run that should equal the reference differs, or gradients of a process (--recheck)",
    UNVERIFIED: "the runs are equal, but they prove nothing",
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


def name_signal(number: int) -> str:
    """Return the name of a signal: "SIGTERM", or "signal 35" for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def normalize(code: int) -> int:
    """Return an exit code as shells and platforms show it: 128 + n instead of subprocess's -n (signal n)."""
    return code if code >= 0 else 128 - code


def explain_exit_code(code: int) -> str:
    """Return one line on an exit code: 0..255, or -n as subprocess gives it.

    Signal n appears as 128 + n (137: SIGKILL), and as 256 - n if a program called exit(-n) with a code from
    subprocess (247: SIGKILL).
    """
    code = normalize(code)
    if code in _CODES:
        return _CODES[code]
    number = code - 128 if code < 192 else 256 - code
    try:
        name = signal.Signals(number)
    except ValueError:
        return "an exit code of the program: see the end of its log"
    return name.name if name not in _SIGNALS else f"{name.name}: {_SIGNALS[name]}"


def explain_end(code: int, error: str) -> str:
    """Return one line on an exit code. error: the error that the log names, or ""."""
    meaning = explain_exit_code(code)
    if not error or normalize(code) not in _CODES or code in (0, TIME_LIMIT):
        return meaning
    return f"{meaning.partition(':')[0]}: {error}"

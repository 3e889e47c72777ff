"""Exit codes and error messages of a job: it ends with one clear line and an exit code.

0        done
1        an error in the program, with its traceback
2        bad input: an argument, a path or a file; no result was written
4        the processes did not connect to each other
5        the connection to another process was lost
6        the last results could not be written
7        training diverged: too many steps in a row without a finite loss and gradient
130      interrupted by Ctrl-C (SIGINT), after a last checkpoint if training had begun
128 + n  signal n ended a process of this node
"""

import contextlib
import importlib
import io
import os
import re
import sys
import time
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

STARTED = time.monotonic()  # a job imports this module before torch
BAD_INPUT, NO_RENDEZVOUS, LOST_CONTACT, NOT_SAVED, DIVERGED = 2, 4, 5, 6, 7
INTERRUPTED = 130
# variable with a file descriptor: errors go to the parent process, which prints a shared error only once
ERROR_PIPE = "BOOTFILE_ERROR_PIPE"

# Names of settings with a secret value: --api_key, HF_TOKEN, my-sk. Some words count only at its end.
SECRET_NAME = re.compile(
    r"(?:passwd|password|pass[_-]?phrase|passcode|secret|credential|authorization|bearer|cookie|webhook)s?(?![a-z])"
    r"|(?:api|access|account|private|secret|auth|encryption|signing|shared|ssh)[_-]?keys?(?![a-z])"
    r"|(?:token|signature|(?<![a-z])(?:ak|sk|sas|sig|pin(?:code)?|t?otp|pat|pwd|pw|pass|jwt|dsn|o?auth|header|key))s?"
    r"(?:[_-]?(?:id|value|env|\d+))*(?![\w-])",
    re.IGNORECASE,
)
_COUNTED = re.compile(r"(?:token|header|key|pass)s?$", re.IGNORECASE)  # with a number: --max_tokens 512
_SPECIAL = re.compile(  # --pad_token, --image_key, --allow_secret PATH
    r"(?:pad|mask|cls|class|[beu]os|unk|sep|special|image|label|target|text|data|sort|group|cache)"
    r"[_-]?(?:token|header|key)s?$|^-*(?:allow|use|no)[_-]",
    re.IGNORECASE,
)
_PLAIN = re.compile(r"true|false|none|[+-]?[\d.]+(?:e[+-]?\d+)?", re.IGNORECASE)
_SETTING = re.compile(  # name=value, and 'name': 'value'
    r"([A-Za-z][\w.-]{0,80})(?:=|[\"']\s*:\s*(?=[\"']))(?![{\[(]\s*[\"'])(\"[^\"]*\"|'[^']*'|[^\s&]+)"
)
_HEADER = re.compile(
    r"((?:\b(?:authorization|cookie)|\bx-[\w-]{0,40}(?:token|key))\s*:\s*)[^\s'\"][^'\"]*"
    r"|(\bbearer\s+)(?=[a-z]*[^a-z\s.,;:)])[^\s'\"]{4,}",
    re.IGNORECASE,
)
_values: set[str] = set()  # of the secret options of this process
# scheme://user:password@hosts/path?query, and user:password@host; only a password may hold spaces
_ADDRESS = re.compile(r"(?<![\w+.-])([\w+.-]*)://((?:(?:(?!\s[^\s@]*://).)*@)?\S*)", re.DOTALL)
_PLACE = re.compile(r"([^/?#;&]*)([^?#;&]*)(.*)", re.DOTALL)
_HOST = re.compile(r"(\[[\da-f:.]*\]|[^\s:\[\]]*)(\[?:(\d{1,5}|port)\]?)?", re.IGNORECASE)
_USER = re.compile(r"(?<!\S)(?!\.*/[^/])([^\s:@]*:)(?!//|\s)(?:(?!\s[^\s@]*://).){1,999}@", re.DOTALL)

# What a job does at its end, in this order.
PLACES = ("results", "upload", "folder", "loaders", "processes")
explanations: list[Callable[[Exception], str]] = []  # of other modules, see explain()
_ONE_VALUE = "Expected more than 1 value per channel when training"  # torch's BatchNorm
_at_end: dict[str, list[Callable[[BaseException | None], object]]] = {place: [] for place in PLACES}


class BadInput(ValueError):
    """An input (argument, file, folder, network) is not usable. The message shows the values."""

    code = BAD_INPUT


class NoRendezvous(BadInput):
    """The processes of a job did not connect to each other in time."""

    code = NO_RENDEZVOUS


class MissingPackage(BadInput, ImportError):
    """A package cannot be imported. The message has the reason and the command that installs it."""


def printable(text: str) -> str:
    """Return the text with a backslash escape for every character that is not printable, so that it is one
    line and cannot control a terminal. Backslashes in the text do not change."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text
    )


def is_secret(name: str, value: object = None) -> bool:
    """Return whether a setting of this name may hold a secret. value: a number or a switch may be none."""
    if not SECRET_NAME.search(name) or _SPECIAL.search(name):
        return False
    if value is None or not _PLAIN.fullmatch(str(value)):
        return True
    return not (_COUNTED.search(name) or str(value).lower() in ("true", "false", "none"))


def hide(value: str) -> None:
    """Show this value of a secret option nowhere: mask() replaces it. Shorter than 3 it is not hidden."""
    if len(value) > 2:
        _values.update((value, repr(value)[1:-1]))


def mask_values(text: str) -> str:
    """Return the text with *** for the values of hide()."""
    for value in sorted(_values, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", "***", text)
    return text


def mask(text: str) -> str:
    """Return the text with *** for the values of hide(), and for the parts of addresses that may be secret:
    user and password, query, path of a cache or of a webhook, hosts that are not host[:port]; also
    for the values of headers and of settings with a name such as token."""
    text = _ADDRESS.sub(_mask_address, _USER.sub(r"\1***@", mask_values(text)))
    text = _HEADER.sub(r"\1\2***", text)
    at = 0
    while match := _SETTING.search(text, at):
        at = match.start(2)
        if is_secret(match[1], match[2].strip("'\"")):
            text, at = f"{text[:at]}***{text[match.end() :]}", at + 3
    return text


def _mask_address(match: re.Match) -> str:
    scheme, (user, _, place) = match[1], match[2].rpartition("@")
    hosts, path, query = _PLACE.fullmatch(place).groups()  # type: ignore[union-attr]  # it matches any text
    are_hosts = all(_HOST.fullmatch(host.rstrip(".,:;)'\"`")) for host in hosts.split(","))
    if not are_hosts or re.search("[?#]", user):  # the @ may belong to a query
        return f"{scheme}://***"
    is_cache = scheme.startswith("redis") and not re.fullmatch(r"(/\d{0,5})?", path)  # a database's number
    is_hook = scheme.startswith("http") and re.search(r"hook|/services/|/bot\d", hosts + path, re.IGNORECASE)
    if is_cache or is_hook:
        path = "/***"
    unsure = "***@" if "/" in user else ""  # the @ may belong to a path
    return f"{scheme}://{unsure}{hosts}{path}{query and '?***'}"


def print_line(line: str) -> None:
    """Print a line at once, with escapes for what is not printable and *** for the values of hide(). A closed
    standard output is ignored."""
    with contextlib.suppress(OSError, ValueError):
        print(printable(mask_values(line)), flush=True)


class _Output(io.FileIO):
    """Standard output or standard error. Text that cannot be written is lost."""

    has_reader = True

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError as error:
            self.has_reader = not isinstance(error, BrokenPipeError)
            return len(data)


def protect_output() -> None:
    """Ignore that standard output or error is closed or full, or has lost its reader. Call it before files
    are opened: they must not get the number of a closed stream."""
    while (null := os.open(os.devnull, os.O_RDWR)) < 3:  # the lowest free number
        os.set_inheritable(null, True)
    os.close(null)
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):  # otherwise a test or a service has replaced it
            file = io.BufferedWriter(_Output(number, "w", closefd=False))
            encoding = stream.encoding if stream else "utf-8"
            setattr(sys, name, io.TextIOWrapper(file, encoding, "backslashreplace", line_buffering=True))


def has_reader() -> bool:
    """Return False if the reader of standard output has ended before the last write, as in `... | head`."""
    return getattr(getattr(getattr(sys.stdout, "buffer", None), "raw", None), "has_reader", True)


def in_one_line(error: BaseException, most: int = 200) -> str:
    """Return the class and the text of an error as one line of at most `most` characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:most]


class Once:
    """A function(line, subject="") that calls say(line) the first time only; of a subject only for its first
    line. It can be pickled if `say` can."""

    def __init__(self, say: Callable[[str], object]):
        self._say, self._said = say, set[str]()

    def __call__(self, line: str, subject: str = "") -> None:
        if (subject or line) not in self._said:
            self._said.add(subject or line)
            self._say(line)


def import_optional(module: str, purpose: str, package: str | None = None) -> ModuleType:
    """Import a module and return it. Raises MissingPackage.

    purpose: begins the message, for example "packs need Arrow". package: its name for pip (default: module).
    """
    try:
        return importlib.import_module(module)
    except Exception as error:  # not only ImportError: it may be built for another NumPy, or lack a library
        reason = in_one_line(error, 1000)
        raise MissingPackage(f"{purpose} ({reason}): pip install {package or module}") from error


def explain(error: Exception) -> str:
    """Return one line for an error that a job's data or options cause deep inside torch; "" for others."""
    if _ONE_VALUE in str(error):
        return f"{error}: BatchNorm needs at least 2 samples in each process: raise --batch_size"
    return next(filter(None, (explanation(error) for explanation in explanations)), "")


def at_end(place: str, function: Callable[[BaseException | None], object]) -> None:
    """Register function(error) for the end of main(): `error` is the exception that ended it, or None.

    place: one of PLACES, whose order is kept. At one place the function that was registered last is called
    first. A function may end the process.
    """
    _at_end[place].append(function)


def at_success(place: str, function: Callable[[], object]) -> None:
    """Register function() as at_end() does, for a main() that ends without an exception."""
    at_end(place, lambda error: None if error else function())


def end(error: BaseException | None) -> None:
    """Call the functions of at_end(), each once: if one raises, the next call continues after it."""
    for functions in _at_end.values():
        while functions:
            functions.pop()(error)


def say_error(text: str) -> None:
    """Print `error: text` as one printable line on stderr. Processes that one parent started send it to the
    parent, which prints it once. Secrets in addresses are masked."""
    line = f"error: {printable(' '.join(mask(text).split()))}\n"
    try:
        os.write(int(os.environ[ERROR_PIPE]), line.encode())
    except (KeyError, OSError, ValueError, OverflowError):  # no parent
        with contextlib.suppress(OSError, ValueError):  # stderr may be closed; that must not stop the process
            sys.stderr.write(line)
            sys.stderr.flush()


def say_traceback(error: BaseException) -> None:
    """Print the traceback of an error on stderr, with *** for the values of hide()."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(mask_values("".join(traceback.format_exception(error))))


def leave(code: int) -> None:
    """End the process at once, without destructors: a communication library may wait for a lost peer in its
    destructor."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def in_group() -> bool:
    """Return whether this process has joined a process group."""
    return bool(_at_end["processes"])

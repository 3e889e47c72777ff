"""Print the logs of all nodes of a job on ModelArts, line by line, with the node's number before each line.

    python -m launch logs JOB            print the current logs
    python -m launch logs JOB -f         also print new lines, until the job ends

JOB: the id that `submit` printed, or its record. With -f the position in each log is saved: after an
interruption the same command continues there (--from_start: from the beginning). The service shows the last
5 MiB of each log; the job's log_url holds the complete logs.

Exit codes: 0 the job is done, or still runs (without -f); 1 it failed or was stopped; 2 it cannot be
read; 130 interrupted: the job continues.
"""

import json
import os
import re
import sys
import time
from typing import NamedTuple

from common.arguments import positive_float
from common.exits import has_reader, printable
from launch import records
from launch.platforms.job import FAILED, OVER, Job, make_parser
from launch.platforms.service import Preview, ServiceError

_LONGEST_WAIT = 60.0  # seconds between two attempts to reach the service
_QUIET = 2  # rounds without a new line after the job's end: logs arrive late
_INTERRUPTED = 130
_CUT = "\N{REPLACEMENT CHARACTER}"  # replaces half a character in the service's JSON
_KEPT = 400  # characters: enough to find the position again


class Place(NamedTuple):
    """A position in a log: `offset` bytes were read; they end with the text `tail`."""

    offset: int = 0
    tail: str = ""


def main(arguments: list[str]) -> int:
    """Print the logs and return the exit code. Raises BadInput."""
    parser = make_parser(__doc__, "logs")
    parser.add_argument("-f", "--follow", action="store_true", help="continue until the job ends")
    parser.add_argument("--from_start", action="store_true", help="with -f: ignore the kept positions")
    parser.add_argument(
        "--interval", type=positive_float, default=5.0, help="seconds between two requests (default: 5)"
    )
    parser.add_argument(
        "--give_up", type=positive_float, default=1800.0, help="seconds without an answer (default: 1800)"
    )
    args = parser.parse_args(arguments)
    job = Job.find(args.job)
    logs = Logs(job, os.path.join(records.FOLDER, f".{job.id}.logs") if args.follow else None)
    try:
        if not args.follow:
            logs.read(last=True)
            return _end(job)
        if args.from_start:
            logs.places = {}
        for task, place in sorted(logs.places.items()):
            text = f"[{_number(task)}] continues after byte {place.offset} (--from_start shows all)"
            print(printable(text), file=sys.stderr)
        return _follow(logs, args.interval, args.give_up)
    except KeyboardInterrupt:
        print("interrupted; the job continues", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # the reader has ended, as in `... | head`
        return 0


class Logs:
    """The logs of one job's nodes. places: the printed position, by task; saved in the file `state` if
    given."""

    def __init__(self, job: Job, state: str | None):
        self.job, self._state = job, state
        self.places = _load(state)

    def read(self, last: bool) -> bool:
        """Print the new lines of every node, and return whether there were any. last: also print an
        unfinished last line. Raises ServiceError, BadInput."""
        printed = False
        for task in self.job.refresh().tasks:
            try:
                preview = self.job.service.read_log(self.job.id, task)
            except ServiceError as error:
                if error.status == 404:  # this node has not written a log yet
                    continue
                raise
            before = self.places.get(task, Place())
            lines, place = lines_after(before, preview, last)
            for line in lines:
                print(printable(f"[{_number(task)}] {line.expandtabs()}"))
            if place != before:
                sys.stdout.flush()  # before the position is saved
                if not has_reader():
                    raise BrokenPipeError
                self.places[task] = place
                if self._state:
                    records.write_private(self._state, self.places)
            printed = printed or bool(lines)
        return printed


def _follow(logs: Logs, interval: float, give_up: float) -> int:
    quiet, wait, answered = 0, interval, time.monotonic()
    while True:
        try:
            ended = logs.job.phase in OVER
            printed = logs.read(last=quiet == _QUIET)
        except ServiceError as error:
            if not error.is_temporary or time.monotonic() - answered > give_up:
                raise
            print(printable(f"{error}; trying again in {wait:.0f} s"), file=sys.stderr, flush=True)
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)
            continue
        wait, answered = interval, time.monotonic()
        if quiet == _QUIET and ended:
            return _end(logs.job)
        quiet = quiet + 1 if ended and not printed else 0
        time.sleep(interval)


def _end(job: Job) -> int:
    """Print the job's phase, and return the exit code for it."""
    for task in job.ended_tasks:
        if task.code:
            print(printable(f"task {task.name} exit_code={task.code}: {task.meaning}"), file=sys.stderr)
    print(printable(f"job {job.phase}"), file=sys.stderr)
    return 1 if job.phase in FAILED else 0


def _load(path: str | None) -> dict[str, Place]:
    try:
        with open(path or os.devnull, encoding="utf-8") as file:
            found = json.load(file)
        return {str(task): Place(int(offset), str(tail)) for task, (offset, tail) in found.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}  # some lines are printed twice, but none is lost


def _number(task: str) -> str:
    return task.rpartition("-")[2] or task


# The service shows a window of a growing log: the last `current_size` of its `full_size` bytes, as text. A
# position is an offset in the whole log and the text before it. Only whole lines are printed, so a character
# that the window cuts in half never is.


def lines_after(place: Place, preview: Preview, last: bool = False) -> tuple[list[str], Place]:
    """Return the lines after a position, and the new position. last: the log has ended, so also return an
    unfinished last line. A line in brackets reports missing bytes or a restarted log."""
    begin = preview.full_size - preview.current_size  # of the window
    data = _window(preview)
    lines: list[str] = []
    if preview.full_size < place.offset or (begin == 0 and place.tail and not _ends_of(place.tail, data)):
        lines.append("[the log starts again]")
        place = Place()
    if place.offset >= begin:
        at = _index(place, data, place.offset - begin)
    else:  # the window begins within a line
        at = data.find(b"\n") + 1
        if at == 0 and not last:
            return [], place
        missing = begin + at - place.offset
        lines.append(f"[{missing} bytes are missing here: the service shows only the end of a log]")
    whole, newline, rest = data[at:].rpartition(b"\n")
    text = (whole + newline).decode(errors="ignore")
    end = rest.decode(errors="ignore") if last else ""
    lines += [line.rstrip("\r") for line in [*text.split("\n")[:-1], *([end] if end else [])]]
    tail = text + end if end else place.tail + text
    return lines, Place(preview.full_size - (0 if last else len(rest)), tail[-_KEPT:])


def _window(preview: Preview) -> bytes:
    """Return the bytes of the window, with placeholders for half characters at its ends. They are longer than
    the window if it contains bytes that are not text: the service replaces each by a longer character."""
    text, size = preview.content, preview.current_size
    inner = text.strip(_CUT).encode()
    around = size - len(inner)
    if len(text.encode()) == size or inner == text.encode() or around < 0:
        return text.encode()
    before, after = (len(text) - len(text.lstrip(_CUT)), len(text) - len(text.rstrip(_CUT)))
    before = min(before, around) if after else around  # Go's JSON encoder writes one for each byte
    return b"\x80" * before + inner + b"\x80" * (around - before)


def _index(place: Place, data: bytes, expected: int) -> int:
    """Return the index of the first unread byte in the window. It is `expected` if the text before it was
    read last, else the end of the closest occurrence of that text."""
    read, tail = data[:expected], place.tail.encode()
    if tail.endswith(read) if len(read) < len(tail) else read.endswith(tail):
        return expected
    ends = _ends_of(place.tail, data) or _ends_of("\n", data)
    return min(ends, key=lambda end: abs(end - expected), default=len(data))


def _ends_of(text: str, data: bytes) -> list[int]:
    return [found.end() for found in re.finditer(re.escape(text.encode()), data)]

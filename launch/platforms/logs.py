"""The logs of all nodes of a job on ModelArts, a line at a time, with the node's number before it.

    python -m launch logs JOB            what is there now
    python -m launch logs JOB -f         and what comes, until the job ends

JOB: the id that `submit` printed, or its record. With -f, what was printed is remembered, byte by byte: after
an interruption the same command goes on where it stopped (--from_start: from the beginning). The service
shows the last 5 MiB of each log; all of it lies at the job's log_url.

Exit codes: 0 the job is done, or still runs (without -f); 1 it has failed or was stopped; 2 it cannot be
read; 130 interrupted: the job goes on.
"""

import json
import os
import sys
import time

from common.arguments import Parser, positive_float
from common.exits import BadInput, printable
from common.files import write_text
from launch.platforms import phases as job_phases
from launch.platforms import records as job_records
from launch.platforms.log_follow import Place, lines_after
from launch.platforms.service import ServiceError

_LONGEST_WAIT = 60.0  # seconds between two attempts to reach the service
_QUIET = 2  # rounds without a new line after the job's end: logs come late
_INTERRUPTED = 130


def main(arguments: list[str]) -> int:
    """Print, and return the exit code. Raises BadInput."""
    parser = Parser(__doc__)
    parser.prog = "python -m launch logs"
    parser.add_argument("job", metavar="JOB", help=job_records.HELP)
    parser.add_argument("-f", "--follow", action="store_true", help="until the job ends")
    parser.add_argument("--from_start", action="store_true", help="with -f: forget what was printed before")
    parser.add_argument(
        "--interval", type=positive_float, default=5.0, help="seconds between two looks (default: 5)"
    )
    parser.add_argument(
        "--give_up", type=positive_float, default=1800.0, help="seconds without an answer (default: 1800)"
    )
    args = parser.parse_args(arguments)
    sys.stdout.reconfigure(errors="replace")
    record = job_records.find(args.job)
    logs = Logs(job_records.service(record), record["id"], _state(record["id"]) if args.follow else None)
    try:
        if not args.follow:
            logs.read(last=True)
            return _end(logs.job)
        if args.from_start:
            logs.places = {}
        for task, place in sorted(logs.places.items()):
            text = f"[{_number(task)}] goes on after byte {place.offset} (--from_start shows all)"
            print(printable(text), file=sys.stderr)
        return _follow(logs, args.interval, args.give_up)
    except KeyboardInterrupt:
        print("interrupted; the job goes on", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:  # nobody reads any more, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


class Logs:
    """The logs of one job's nodes. job: what the service said of it last. places: what was printed, by task;
    kept in the file `state`, if there is one."""

    def __init__(self, service, job_id: str, state: str | None):
        self._service, self._id, self._state = service, job_id, state
        self.job: dict = {}
        self.places = _load(state)

    def read(self, last: bool) -> bool:
        """Print what is new of every node; last: lines without an end, too. Returns whether there was any.
        Raises ServiceError, BadInput."""
        self.job = self._service.show(self._id)
        printed = False
        for task in job_phases.tasks(self.job):
            try:
                preview = self._service.log(self._id, task)
            except ServiceError as error:
                if error.status == 404:  # this node has written none yet
                    continue
                raise
            lines, place = lines_after(self.places.get(task, Place()), preview, last)
            for line in lines:
                print(printable(f"[{_number(task)}] {line.expandtabs()}"))
            if place != self.places.get(task, Place()):
                sys.stdout.flush()  # before it counts as printed
                self.places[task] = place
                _save(self._state, self.places)
            printed = printed or bool(lines)
        return printed


def _follow(logs: Logs, interval: float, give_up: float) -> int:
    quiet, wait, answered = 0, interval, time.monotonic()
    while True:
        try:
            ended = job_phases.phase(logs.job) in job_phases.OVER
            printed = logs.read(last=quiet == _QUIET)
        except ServiceError as error:
            if not error.passing or time.monotonic() - answered > give_up:
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


def _end(job: dict) -> int:
    """Say how a job stands, and return the exit code that says it, too."""
    phase = job_phases.phase(job)
    for task in job_phases.ended_tasks(job):
        if task.code:
            print(printable(f"task {task.name} exit_code={task.code}: {task.meaning}"), file=sys.stderr)
    print(printable(f"job {phase}"), file=sys.stderr)
    return 1 if phase in job_phases.FAILED else 0


def _state(job_id: str) -> str:
    return os.path.join(job_records.FOLDER, f".{job_id}.logs")


def _load(path: str | None) -> dict[str, Place]:
    try:
        with open(path or os.devnull, encoding="utf-8") as file:
            found = json.load(file)
        return {str(task): Place(int(offset), str(tail)) for task, (offset, tail) in found.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}  # it only saves what would be printed twice


def _save(path: str | None, places: dict[str, Place]) -> None:
    if path is None:
        return
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_text(path, json.dumps(places), mode=0o600)
    except OSError as error:
        raise BadInput(f"{path} cannot be written: {error.strerror}") from error


def _number(task: str) -> str:
    return task.rpartition("-")[2] or task

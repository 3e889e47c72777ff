"""Print the logs of all nodes of a job on ModelArts, line by line, with the node's number before each line.

    python -m launch logs JOB            print the current logs
    python -m launch logs JOB -f         also print new lines, until the job ends

JOB: the id that `submit` printed, or its record. The service shows the last 5 MiB of each log;
the job's log_url holds the complete logs.

Exit codes: 0 the job is done, or still runs (without -f); 1 it failed or was stopped; 2 it cannot be
read; 130 interrupted: the job continues.
"""

import sys
import time

from common.console.arguments import positive_float
from common.ground.exits import has_reader, printable
from launch.platforms.job import FAILED, OVER, Job, make_parser
from launch.platforms.service import Preview, ServiceError

_GIVE_UP = 1800.0  # seconds without an answer of the service
_QUIET = 2  # rounds without a new line after the job's end: logs arrive late
_REPLACED = "\N{REPLACEMENT CHARACTER}".encode()


def main(arguments: list[str]) -> int:
    """Print the logs and return the exit code. Raises BadInput."""
    parser = make_parser(__doc__, "logs")
    parser.add_argument("-f", "--follow", action="store_true", help="continue until the job ends")
    parser.add_argument(
        "--interval", type=positive_float, default=5.0, help="seconds between two requests (default: 5)"
    )
    args = parser.parse_args(arguments)
    logs = Logs(Job.find(args.job))
    try:
        if not args.follow:
            logs.read(last=True)
            return _end(logs.job)
        return _follow(logs, args.interval)
    except BrokenPipeError:  # the reader has ended, as in `... | head`
        return 0


class Logs:
    """The logs of one job's nodes. positions: task -> bytes of its log that were printed."""

    def __init__(self, job: Job):
        self.job = job
        self.positions: dict[str, int] = {}

    def read(self, last: bool) -> bool:
        """Print the new lines of every node, and return whether there were any. last: also print an
        unfinished last line. Raises ServiceError."""
        printed = False
        for task in self.job.refresh().tasks:
            try:
                preview = self.job.service.read_log(self.job.id, task)
            except ServiceError as error:
                if error.status == 404:  # this node has not written a log yet
                    continue
                raise
            lines, self.positions[task] = lines_after(self.positions.get(task, 0), preview, last)
            for line in lines:
                print(printable(f"[{task.rpartition('-')[2]}] {line.expandtabs()}"))
            sys.stdout.flush()
            if not has_reader():
                raise BrokenPipeError
            printed = printed or bool(lines)
        return printed


def lines_after(position: int, preview: Preview, last: bool = False) -> tuple[list[str], int]:
    """Return the lines after a position (in bytes of the whole log), and the new position.

    The service shows a window: the end of a growing log. It may begin and end within a character, whose bytes
    become replacement characters. Only whole lines are returned, so they do not contain these.

    last: the log has ended, so also return an unfinished last line. A line in brackets reports missing bytes
    or a restarted log.
    """
    data, begin = preview.content.encode(), preview.full_size - preview.current_size
    if len(data) != preview.current_size:
        data = data.replace(_REPLACED, b"\xff")  # the service writes one for each byte that is not text
    lines = []
    if preview.full_size < position:
        lines, position = ["[the log starts again]"], 0
    start = len(data) - (preview.full_size - position)
    if start < 0:  # the window begins within a line
        start = data.find(b"\n") + 1
        if start == 0 and not last:
            return lines, position
        missing = begin + start - position
        lines.append(f"[{missing} bytes are missing here: the service shows only the end of a log]")
    else:
        start = data.rfind(b"\n", 0, start) + 1 if start < len(data) else start
    end = len(data) if last else data.rfind(b"\n") + 1
    text = data[start:end].decode(errors="replace")
    lines += [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")] if text else []
    return lines, preview.full_size - (len(data) - end)


def _follow(logs: Logs, interval: float) -> int:
    quiet, answered = 0, time.monotonic()
    while True:
        try:
            ended = logs.job.phase in OVER
            printed = logs.read(last=quiet == _QUIET)
        except ServiceError as error:
            if not error.is_temporary or time.monotonic() - answered > _GIVE_UP:
                raise
            print(printable(f"{error}; trying again"), file=sys.stderr, flush=True)
        else:
            answered = time.monotonic()
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

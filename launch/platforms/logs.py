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

from bootfile.ground.errors import printable
from common.console.arguments import positive_float
from common.ground.streams import has_reader
from launch.platforms.job import OVER, Job, make_parser
from launch.platforms.service import Preview, ServiceError, is_temporary

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
    job = Job.find(args.job)
    try:
        if args.follow:
            _follow(job, args.interval)
        else:
            _print_new(job, {}, last=True)
    except BrokenPipeError:  # the reader has ended, as in `... | head`
        return 0
    failed = [line for code, line in job.list_ended() if code]
    print(*map(printable, [*failed, f"job {job.phase}"]), sep="\n", file=sys.stderr)
    return 1 if job.phase in OVER and job.phase != "Completed" else 0


def _follow(job: Job, interval: float) -> None:
    """Print new lines until the job has ended and its logs are quiet. Raises ServiceError."""
    positions: dict[str, int] = {}
    quiet, answered = 0, time.monotonic()
    while True:
        try:
            ended = job.phase in OVER
            printed = _print_new(job, positions, last=quiet == _QUIET)
        except ServiceError as error:
            if not is_temporary(error.status) or time.monotonic() - answered > _GIVE_UP:
                raise
            print(printable(f"{error}; trying again"), file=sys.stderr, flush=True)
        else:
            answered = time.monotonic()
            if quiet == _QUIET and ended:
                return
            quiet = quiet + 1 if ended and not printed else 0
        time.sleep(interval)


def _print_new(job: Job, positions: dict[str, int], last: bool) -> bool:
    """Print the new lines of every node, and return whether there were any. Raises ServiceError.

    positions: task -> bytes of its log that were printed; updated
    last: also print an unfinished last line
    """
    printed = False
    for task in job.refresh().tasks:
        try:
            preview = job.service.read_log(job.id, task)
        except ServiceError as error:
            if error.status == 404:  # this node has not written a log yet
                continue
            raise
        lines, positions[task] = lines_after(positions.get(task, 0), preview, last)
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
    data = preview.content.encode()
    if len(data) != preview.current_size:
        data = data.replace(_REPLACED, b"\xff")  # the service writes one for each byte that is not text
    lines, begin = [], preview.full_size - len(data)
    if preview.full_size < position:
        lines, position = ["[the log starts again]"], 0
    start = position - begin
    if start < 0:  # the window begins within a line
        start = data.find(b"\n") + 1
        if start == 0 and not last:
            return lines, position
        missing = begin + start - position
        lines.append(f"[{missing} bytes are missing here: the service shows only the end of a log]")
    end = len(data) if last else data.rfind(b"\n") + 1
    text = data[start:end].decode(errors="replace")
    lines += [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")] if text else []
    return lines, begin + end

"""Record how the starts of a run ended: ends.jsonl has a line for each start, and one for its end.

    {"start": 1795212080.9}
    {"start": 1795212080.9, "time": 1795212171.3, "step": 411, "code": 143, "reason": "SIGTERM"}

start: the `time` of the start in starts.jsonl.
time: when it ended, in seconds of time.time().
step: the last step that it began.
code: its exit code.
reason: "done", the name of a signal, a notice of preemption, or the error in one line.

A start without the second line was killed, or had no time to write it. If it has several, the last one
counts: a run that is done may still fail to save. step, code and reason are those of rank 0. Earlier versions
wrote no such file. This module imports no torch.
"""

import os
import signal
import time

from bootfile.ground.errors import INTERRUPTED, LOST_CONTACT, BadInput, in_one_line
from bootfile.ground.files import append_json_line
from bootfile.ground.secrets import mask
from bootfile.processes import signals
from bootfile.records import read_lines, read_starts
from common.ground import endings

FILE = "ends.jsonl"  # in a run's output folder
DONE = "done"
KILLED = "not recorded: SIGKILL, full memory, a loss of power, --stuck_exit, or no time after a signal"


def begin(folder: str, time: float) -> None:
    """Note that the end of the start of this time will be recorded. Raises OSError."""
    append_json_line(os.path.join(folder, FILE), {"start": time})


def write(folder: str, step: int, code: int, reason: str, start: float | None = None) -> None:
    """Append the end of a start to FILE in the folder. start: the time of one that is not in starts.jsonl,
    because it has reported nothing; None: the newest one. Raises OSError and BadInput."""
    if start is None:
        known = read_starts(folder)
        if not known:
            return
        start = known[-1].get("time")
    end = {"start": start, "time": round(time.time(), 3), "step": step, "code": code}
    append_json_line(os.path.join(folder, FILE), end | {"reason": mask(reason)})


def read(folder: str) -> dict[float, str]:
    """Return how the starts of a run ended, by the time of the start: DONE, KILLED, or "REASON at step N
    (exit code C)". Raises BadInput."""
    texts: dict[float, str] = {}
    for line in read_lines(folder, FILE):
        code = line.get("code")
        text = f"{line.get('reason')} at step {line.get('step')} (exit code {code})"
        if code is None:
            text = KILLED
        elif code == 0:
            text = DONE
        if type(line.get("start")) is float:
            texts[line["start"]] = text  # the last line of a start counts
    return texts


def describe_last(folder: str) -> str:
    """Return one line on how the training before ended; "" if it was done, or if its end is not known. A
    start calls it on rank 0, before it writes its own lines. Raises BadInput."""
    known = read_starts(folder)
    ends = read(folder)
    if not known or not ends:
        return ""
    newest = [*ends][-1]  # not the greatest time: a clock may have been set back
    is_older = newest < known[-1].get("time", 0)  # version 0.47 has continued the run
    if is_older or ends[newest] == DONE:
        return ""
    return f"the end of the training before: {ends[newest]}"


def of_signal() -> tuple[int, str]:
    """Return the exit code and the reason of a run that a signal, or a notice of preemption, has stopped."""
    number, reason = signals.received()
    name = signal.Signals(number).name if number else "a signal at another rank"
    return signals.exit_code(), reason or name


def of_error(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the reason of a main() that an exception has ended, as entry() gives them."""
    if isinstance(error, BadInput):
        return error.code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    if isinstance(error, SystemExit):
        return error.code & 0xFF if isinstance(error.code, int) else 1, f"sys.exit({error.code!r:.200})"
    if endings.in_group():
        from bootfile.processes.ends import has_lost_contact  # a job of one process has no contact to lose

        if has_lost_contact(error):
            return LOST_CONTACT, f"lost contact with another process: {in_one_line(error)}"
    return 1, in_one_line(error)

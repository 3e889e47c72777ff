"""Record how a run was started, and how each start ended. No file is ever truncated, and no torch imported.

starts.jsonl has one line for each start:

    {"time": 1795212080.9, "step": 40, "steps": 180, "laps": {"set-up": 2.2, ...},
     "lost": {"step": 55, "time": 1795212071.3}, "settings": {...}, "ignored": [...], "environment": {...},
     "script": "/home/me/jobs/train.py", "command": "jobs/train.py --epochs 20", "code": "f00dc0de..."}

time: when training began or continued, in seconds of time.time(). step, steps: the step after which it began,
and the total. laps: the seconds before training, by kind of work.
lost: the last report of the previous start, if it was after `step`.
training data, data backend: the fingerprint of the data; the backend of the loader.
division: how --val_share divided the images (datasets/folders/listing.py), or "".
sampling: the values that determine the ids of each step: sampler, samples, global batch, seed.
best: the metric that chooses best.pth, such as "lowest rmse", if the job names one.
settings, ignored: the job's arguments, without credentials; the names of options that the job did not know.
parent: of a run that begins at a step of another one: the folder of that run, its name, the step, and the
    step of the state that was loaded (common/checkpoint/fork.py). Other runs have none.
script, command: the path of the job on its node; the command line, with *** for credentials.
code: the commit of the script, with -dirty at its end if tracked files differ from it; null without git.
environment: versions, device, nodes (environment.py).

ends.jsonl has a line for each start, with its `time`, and one for its end:

    {"start": 1795212080.9}
    {"start": 1795212080.9, "time": 1795212171.3, "step": 411, "code": 143, "reason": "SIGTERM"}

step: the last step that it began. code: its exit code. reason: "done", the name of a signal, a notice of
preemption, or the error in one line; all three of rank 0. A start without the second line was killed, or had
no time to write it. If it has several, the last one counts: a run that is done may still fail to save.
bootfile/records.py reads both files.
"""

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

from bootfile.console.words import mask_words
from bootfile.ground import git
from bootfile.ground.errors import INTERRUPTED, LOST_CONTACT, BadInput, in_one_line
from bootfile.ground.files import append_json_line, parse_json_lines
from bootfile.ground.secrets import mask
from bootfile.processes import signals
from bootfile.records import STARTS, keep_starts, read_lines, read_starts
from common.console import arguments
from common.ground import endings
from common.run.output import Output

ENDS = "ends.jsonl"
DONE = "done"
KILLED = "not recorded: SIGKILL, full memory, a loss of power, --stuck_exit, or no time after a signal"


def write(folder: str, args: argparse.Namespace, environment: Mapping[str, Any], **facts: Any) -> None:
    """Append a start to the file in the folder. facts: the other entries of the line. Raises OSError."""
    ignored = getattr(args, "ignored", [])  # benchmarks have no parser of a job
    words, _ = mask_words(sys.argv[1:], ignored)
    known = {
        "settings": arguments.settings(args),
        "ignored": ignored,
        "environment": environment,
        "script": os.path.abspath(sys.argv[0]),
        "command": shlex.join([sys.argv[0], *words]),
        "code": git.find_commit(sys.argv[0]),
    }
    append_json_line(os.path.join(folder, STARTS), facts | known)


def read_output(output: Output) -> list[dict]:
    """Return the starts of the run in an output, those at its URL on a new node. Raises BadInput."""
    starts = read_starts(output.folder)
    if not starts and output.url:
        from common.object_store.store import ObjectStore  # a job without a URL imports nothing of it

        starts = keep_starts(parse_json_lines(ObjectStore(output.url).read_version(STARTS)[0]))
    return starts


def check_settings(settings: Mapping[str, Any], kinds: dict[str, Any], folder: str) -> dict[str, Any]:
    """Return the settings of a start that have a type in `kinds`, checked as those of a command line: the
    run's folder may be another user's. Raises BadInput."""
    checked = {}
    for name, kind in kinds.items():
        if settings.get(name) is None:
            continue
        try:
            checked[name] = kind(str(settings[name]))
        except argparse.ArgumentTypeError as error:
            raise BadInput(f"{os.path.join(folder, STARTS)}: {name}: {error!s:.200}") from None
    return checked


def expect_end(folder: str, start: float) -> None:
    """Note that the end of the start of this time will be recorded. Raises OSError."""
    append_json_line(os.path.join(folder, ENDS), {"start": start})


def write_end(folder: str, start: float | None, step: int, code: int, reason: str) -> None:
    """Append the end of the start of this time. Raises OSError."""
    end = {"start": start, "time": round(time.time(), 3), "step": step, "code": code, "reason": mask(reason)}
    append_json_line(os.path.join(folder, ENDS), end)


def read_ends(folder: str) -> dict[float, str]:
    """Return how the starts of a run ended, by the time of the start: DONE, KILLED, or "REASON at step N
    (exit code C)". Raises BadInput."""
    texts: dict[float, str] = {}
    for line in read_lines(folder, ENDS):
        code = line.get("code")  # the first line of a start has none
        text = f"{line.get('reason')} at step {line.get('step')} (exit code {code})"
        if type(line.get("start")) is float:
            known = DONE if code == 0 else text
            texts[line["start"]] = KILLED if code is None else known  # the last line of a start counts
    return texts


def describe_last_end(folder: str) -> str:
    """Return one line on how the training before ended; "" if it was done, or if its end is not known. A
    start calls it on rank 0, before it writes its own lines. Raises BadInput."""
    ends = list(read_ends(folder).items())  # in the order of the file: a clock may have been set back
    starts = read_starts(folder)
    if not ends or not starts:
        return ""
    start, end = ends[-1]
    is_of_newest = start >= starts[-1].get("time", 0)  # a full disk may have kept its line out
    return f"the end of the training before: {end}" if is_of_newest and end != DONE else ""


def end_of_signal() -> tuple[int, str]:
    """Return the exit code and the reason of a run that a signal, or a notice of preemption, has stopped."""
    number, reason = signals.received()
    name = signal.Signals(number).name if number else "a signal at another rank"
    return signals.exit_code(), reason or name


def end_of_error(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the reason of a main() that an exception has ended, as entry() gives them."""
    if isinstance(error, BadInput):
        return error.code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED, "interrupted"
    if isinstance(error, SystemExit):
        return endings.code_of(error), f"sys.exit({error.code!r:.200})"
    if endings.in_group():
        from bootfile.processes.ends import has_lost_contact  # a job of one process has no contact to lose

        if has_lost_contact(error):
            return LOST_CONTACT, f"lost contact with another process: {in_one_line(error)}"
    return 1, in_one_line(error)

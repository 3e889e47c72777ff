"""Record how a run was started: starts.jsonl has one line for each start, and is never truncated.

    {"time": 1795212080.9, "step": 40, "steps": 180, "laps": {"set-up": 2.2, ...},
     "lost": {"step": 55, "time": 1795212071.3}, "settings": {...}, "ignored": [...], "environment": {...},
     "script": "/home/me/jobs/train.py", "command": "jobs/train.py --epochs 20", "code": "f00dc0de..."}

time: when training began or continued, in seconds of time.time().
step, steps: the step after which it began, and the total.
laps: the seconds before training, by kind of work.
lost: the last report of the previous start, if it was after `step`.
training data: the fingerprint of the data.
data backend: the loader's backend; with --data_backend auto, the one that was chosen.
division: how --val_share divided the images (datasets/folders/splits.py), or "". Earlier versions have none.
sampling: the values that determine the ids of each step: sampler, samples, global batch, seed.
best: the metric that chooses best.pth, such as "lowest rmse", if the job names one.
settings: the job's arguments, without credentials.
ignored: the names of the options that the job did not know.
parent: of a run that begins at a step of another one: the folder of that run, its name, the step, and the
    step of the state that was loaded (common/checkpoint/fork.py). Other runs have none.
script: the path of the job on its node.
command: the command line of the job, with *** for credentials.
code: the commit of the script, with -dirty at its end if tracked files differ from it; null without git.
environment: versions, device, nodes (environment.py).

bootfile/records.py reads it. This module imports no torch.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Mapping
from typing import Any

from bootfile.console.words import mask_words
from bootfile.ground import git
from bootfile.ground.errors import BadInput
from bootfile.ground.files import append_json_line, parse_json_lines
from bootfile.records import STARTS, keep_starts, read_starts
from common.console import arguments
from common.run.output import Output


def write(folder: str, args: argparse.Namespace, environment: Mapping[str, Any], **facts: Any) -> None:
    """Append a start to the file in the folder. facts: the other entries of the line. Raises OSError."""
    words, _ = mask_words(sys.argv[1:], getattr(args, "ignored", []))
    known = {
        "settings": arguments.settings(args),
        "ignored": getattr(args, "ignored", []),
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
    for name in [name for name in kinds if settings.get(name) is not None]:
        try:
            checked[name] = kinds[name](str(settings[name]))
        except argparse.ArgumentTypeError as error:
            raise BadInput(f"{os.path.join(folder, STARTS)}: {name}: {error!s:.200}") from None
    return checked

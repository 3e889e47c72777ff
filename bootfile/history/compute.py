"""Compute steps of an old run again, in a folder of their own, with its options and its code."""

# `bootfile prove` starts runs with prove/trial.py: whole runs of any program, also in forks, which are killed
# and start again in their own folder. This starts a job at a state of an old run. Both use sessions.py.

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from bootfile.exact import checked_files, files
from bootfile.exact.forked import Differs
from bootfile.ground.errors import BadInput
from bootfile.ground.exit_codes import DIFFERS, explain_exit_code
from bootfile.ground.heartbeat import Heartbeat
from bootfile.history.parent import Parent
from bootfile.processes import sessions

# a variable: the run begins at the checkpoint of this step, and ends after --at_step
ONLY = "BOOTFILE_ONLY_FROM_STEP"
# what launchers, and jobs that start their processes, set for these
_OF_LAUNCHERS = (
    "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "BOOTFILE_STARTED",
    "BOOTFILE_OUTPUT_HELD", "BOOTFILE_RUN_FOLDER", "BOOTFILE_MEMBER", "BOOTFILE_STORE_IS_PARENTS",
    "BOOTFILE_ERROR_PIPE",
)  # fmt: skip


def compute(parent: Parent, folder: str, script: str, processes: int, options: Sequence[str]) -> str:
    """Compute the steps parent.state + 1 to parent.step in a folder, and return the path of the checkpoint
    with their result. The steps are compared with those of the run on the way.

    The job is started as a program of its own, which begins at the newest checkpoint before the steps. If a
    call before this one was killed, it continues.

    folder: for the results of these steps; its log is folder + ".log".
    script: the job. processes: their number, on this node. options: words for its command line.
    Raises Differs with the first difference, and BadInput with the error in the log if the job fails.
    """
    path = os.path.join(folder, "checkpoints", files.name_of(parent.step))
    # a call before this one has computed them
    if _is_whole(path):
        return path
    command = [sys.executable, script, f"--from={parent.folder}", f"--at_step={parent.step}"]
    command += [f"--output_dir={folder}", *options, *parent.name_processes(processes)]
    # without these: the job would take itself for a rank of the program that calls this
    variables = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    variables[ONLY] = str(parent.state)
    log = f"{folder}.log"
    os.makedirs(os.path.dirname(log), exist_ok=True)
    heartbeat = Heartbeat()
    with open(log, "wb") as output:
        task = sessions.start(command, log, output, variables)
        code = None
        try:
            while code is None:
                heartbeat.beat(f"computing the steps {parent.state + 1}-{parent.step} again ({log})")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = task.wait(1)
        finally:  # also processes that the job has left behind
            sessions.end([task], signal.SIGTERM)
            sessions.kill([task], log)
    if code == DIFFERS:
        raise Differs(_explain(log, code))
    if code or not _is_whole(path):
        raise BadInput(_explain(log, code))
    return path


def _is_whole(path: str) -> bool:
    try:
        checked_files.verify(path)
    except files.Refused:
        return False
    return True


def _explain(log: str, code: int) -> str:
    """Return why the steps were not computed: the error in the log, or the exit code in words."""
    with open(log, encoding="utf-8", errors="replace") as file:
        lines = file.read().splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return [f"the steps were not computed again: {explain_exit_code(code)} ({log})", *errors][-1]

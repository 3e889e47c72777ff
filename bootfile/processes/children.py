"""Start processes that end with this one, and end them: by themselves first, by SIGKILL at the limit.

What starts processes decides what their ends mean: which of them failed first (the launcher of
common/distributed), whether another one takes the place (the agent of common/elastic), or what they have left
behind (sessions.py).
"""

import contextlib
import functools
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any

from bootfile.processes import signals

_LAST = 5.0  # seconds for the end of a killed process


def start(command: list[str], **options: Any) -> "subprocess.Popen[Any]":
    """Start a command in a session of its own, and return it. On Linux it is killed if this process ends.

    options: those of Popen.
    """
    child: subprocess.Popen[Any] = subprocess.Popen(
        command,
        start_new_session=True,
        preexec_fn=functools.partial(signals.die_with_parent, signal.SIGKILL),
        **options,
    )
    return child


def wait_or_kill(children: "Sequence[subprocess.Popen[Any]]", seconds: float) -> None:
    """Wait until all children have ended, and kill those that still run after `seconds`.

    Send them a signal before, or close their input, so that they end by themselves.
    """
    deadline = time.monotonic() + seconds
    for child in children:
        try:
            child.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            # a killed process may wait for a mount that hangs: this one must not wait for it for ever
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_LAST)

"""Start scripts in forks of a process that has PyTorch loaded (fork_server.py)."""

import json
import os
import select
import signal
import subprocess
import sys
from typing import IO, Any

from bootfile.processes import sessions
from bootfile.prove import cases

_SERVER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "fork_server.py")
SEED = 3  # PYTHONHASHSEED of all forks


def are_possible() -> bool:
    """Return whether a fork does what a new process does."""
    return not sessions.why_no_fork()


class Forks:
    """A server of forks. It ends with close(), or with this process."""

    def __init__(self) -> None:
        self._server = sessions.start_child(
            [sys.executable, _SERVER],
            env=cases.environment(seed=SEED),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )

    def start(
        self,
        command: list[str],
        mark: str,
        output: IO[Any],
        environment: dict[str, str],
        cwd: str | None,
    ) -> "Forked":
        """Start a command of Python as sessions.start() does. The fork before it must have ended."""
        request = {
            "words": command[1:],
            "log": output.name,
            "folder": cwd or os.getcwd(),
            "environment": sessions.marked(environment, mark),
        }
        # the server reads it when the fork before has ended: it runs one script at a time
        assert self._server.stdin
        self._server.stdin.write(json.dumps(request).encode() + b"\n")
        return Forked(self._server)

    def close(self) -> None:
        """End the server, and with it a fork that still runs."""
        self._server.kill()
        self._server.communicate()


class Forked:
    """A script in a fork, with the members of subprocess.Popen that `processes` uses."""

    def __init__(self, server: subprocess.Popen[bytes]) -> None:
        assert server.stdout
        self._answers: IO[bytes] = server.stdout
        self.returncode: int | None = None
        self.pid = int(self._answers.readline() or 0)  # it waits until the script has its own session
        if not self.pid:
            raise RuntimeError("the process that has PyTorch loaded has ended")

    def poll(self) -> int | None:
        """Return the exit code; None while the script runs."""
        # trial.run() asks every 5 ms: it must not wait for a script that trains
        if self.returncode is None and select.select([self._answers], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        """Return the exit code of the script when it has ended."""
        if self.returncode is None:
            self.returncode = int(self._answers.readline() or -signal.SIGKILL)
        return self.returncode

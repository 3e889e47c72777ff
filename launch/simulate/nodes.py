"""A simulated node: the folders that a platform makes, its processes, its log."""

import contextlib
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from typing import Any

from bootfile.ground.exit_codes import normalize
from bootfile.processes import sessions
from launch import manifests
from launch.bundle.code_folder import CodeFolder
from launch.profiles import Folders

INPUT, OUTPUT = "data_url_0", "train_url_0"  # as ModelArts names the first input and the first output
_MOST = 2**20  # bytes of a log that are read at a time: a job may print endlessly


@dataclass
class Run:
    """One run of a node's command.

    began, ended: seconds of time.monotonic()
    code: exit code of the first process that failed, 0 if all ended without an error, None before
    note: the reason for its end, if the simulation caused it
    error: the last line of its log that names an error
    """

    began: float
    ended: float = 0.0
    code: int | None = None
    note: str = ""
    error: str = ""


class Node:
    """A container that a platform would start.

    index: the node's rank
    data: a folder that is linked as the first input; a platform would copy it
    restarts: how often it is restarted in place if it fails

    make_folders() makes a new container and start() begins a run in it. Call read() and poll() until poll()
    returns the exit code; kill() ends a run at once. On Linux every process that a run started is found and
    ended, also processes in another session.
    """

    def __init__(self, index: int, folder: str, code: CodeFolder, data: str | None):
        self.index, self.restarts = index, 0
        self.scheduled, self.started = 0, 0  # as MA_SCHEDULE_CNT and MA_PROC_START_CNT count
        self.runs: list[Run] = []
        self._folder, self._code, self._data = folder, code, data
        self._tasks: list[subprocess.Popen] = []

    def make_folders(self, outputs: str | None = None) -> None:
        """Make a new container: the code, and an output folder with a copy of `outputs`."""
        self.scheduled, self.started = self.scheduled + 1, 0
        place = self._folder if self.scheduled == 1 else f"{self._folder}.{self.scheduled}"
        names = (f"user-job-dir/{self._code.name}", "inputs", "outputs", "cache", "logs")
        self.folders = Folders(*(os.path.join(place, name) for name in names))
        for folder in self.folders:
            os.makedirs(folder)
        manifests.write_files(self.folders.code, self._code.files)
        if self._data is None:
            os.mkdir(os.path.join(self.folders.inputs, INPUT))
        else:
            os.symlink(self._data, os.path.join(self.folders.inputs, INPUT))
        os.mkdir(self.output)
        if outputs is not None:
            copy_tree(outputs, self.output)

    @property
    def output(self) -> str:
        """Return the folder that a platform collects at the end."""
        return os.path.join(self.folders.outputs, OUTPUT)

    @property
    def log(self) -> str:
        return os.path.join(self.folders.logs, f"node_{self.index}.log")

    @property
    def running(self) -> bool:
        return bool(self._tasks)

    def start(self, commands: list[tuple[list[str], dict[str, str]]]) -> None:
        """Begin a run: start every (command, environment) as a process in the code folder."""
        self.started += 1
        self.runs.append(Run(time.monotonic()))
        self._unfinished = b""  # the last line
        with open(self.log, "ab") as log:
            self._printed = open(self.log, "rb")  # noqa: SIM115
            self._printed.seek(0, os.SEEK_END)
            for command, environment in commands:
                self._tasks.append(sessions.start(command, self._mark, log, environment, self.folders.code))

    @property
    def pids(self) -> list[int]:
        """Return the running processes that the platform itself started: the boot process, or one for every
        rank."""
        return [task.pid for task in self._tasks if task.returncode is None]

    def read(self, most: int = _MOST) -> list[str]:
        """Return the lines that were printed since the last call. Does not wait."""
        *lines, self._unfinished = (self._unfinished + self._printed.read(most)).split(b"\n")
        return [line.decode(errors="replace").rstrip("\r") for line in lines]

    def poll(self) -> int | None:
        """Return the exit code of a run whose last process has ended, else None. It is that of the first
        process that failed, 128 + n for signal n. The remaining processes of the run are killed."""
        if not self._tasks:
            return None
        run = self.runs[-1]
        for task in self._tasks:
            if task.poll() and run.code is None:
                run.code = normalize(task.returncode)
        if any(task.returncode is None for task in self._tasks):
            return None
        if not run.ended:
            run.code, run.ended = run.code or 0, time.monotonic()
            sessions.kill(self._tasks, self._mark)
        return run.code

    def close(self) -> list[str]:
        """Close the run and return its last lines, after kill() or when poll() returned an exit code. The
        node is then ready for another run."""
        self.poll()
        lines = self.read(-1)
        self._printed.close()
        self._tasks = []
        return lines + [self._unfinished.decode(errors="replace")] * bool(self._unfinished)

    def end(self, number: int) -> None:
        """Send a signal to the living process groups that the platform started."""
        sessions.end(self._tasks, number)

    def kill(self) -> None:
        """Kill all processes of the node, and wait for their end."""
        sessions.kill(self._tasks, self._mark)

    def find(self) -> dict[int, dict[str, Any]]:
        """Return all living processes of the node, as sessions.find() does."""
        return sessions.find(self._mark)

    def ranks(self, count: int) -> dict[int, int]:
        """Return global rank -> process id. count: processes per node.

        A rank's process has RANK and LOCAL_RANK in its environment. Its children have them too, and are not
        counted. Without these variables, a rank is a process that the platform started.
        """
        told, parents = {}, {}
        for pid, facts in self.find().items():
            environment = facts["environ"]
            if "LOCAL_RANK" in environment and environment.get("RANK", "").isdecimal():
                told[pid], parents[pid] = int(environment["RANK"]), facts["ppid"]
        if not told:
            living = [(local, task) for local, task in enumerate(self._tasks) if task.poll() is None]
            return {self.index * count + local: task.pid for local, task in living}
        return {rank: pid for pid, rank in told.items() if told.get(parents[pid]) != rank}

    @property
    def _mark(self) -> str:
        return f"{os.getpid()}.{self.index}"


def copy_tree(source: str, destination: str) -> None:
    """Copy a folder into another one. Files that are deleted meanwhile are skipped."""

    def copy(source: str, target: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            shutil.copy2(source, target)

    shutil.copytree(source, destination, copy_function=copy, dirs_exist_ok=True)

"""A simulated node: the folders that a platform makes, its processes, its log."""

import contextlib
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from typing import Any

from bootfile.ground.exit_codes import normalize
from bootfile.ground.files import write_atomic
from bootfile.processes import sessions
from launch import manifests
from launch.bundle.code_folder import CodeFolder
from launch.profiles import Folders

# as ModelArts names the first input and the first output
INPUT = "data_url_0"
OUTPUT = "train_url_0"
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
    """A container that a platform would start. The simulation calls it from its one thread.

    index: the node's rank
    data: a folder that is linked as the first input; a platform would copy it
    restarts: how often it is restarted if it fails: in place, or in a new container if is_pod is set

    make_folders() makes a new container and start() begins a run in it. Call read() and poll() until poll()
    returns the exit code; kill() ends a run at once. On Linux every process that a run started is found and
    ended, also processes in another session.
    """

    def __init__(self, index: int, folder: str, code: CodeFolder, data: str | None):
        self.index = index
        self.restarts = 0
        self.is_pod = False
        self.scheduled = 0  # containers, as MA_SCHEDULE_CNT counts them
        self.started = 0  # runs in this container, as MA_PROC_START_CNT counts them
        self.runs: list[Run] = []  # of all containers; the last one may still run
        self._folder = folder
        self._code = code
        self._data = data
        self._tasks: list[subprocess.Popen] = []  # what start() started, until close()
        self._mark = f"{os.getpid()}.{index}"  # a variable of the node's processes, and of their forks

    def make_folders(self, outputs: str | None = None) -> None:
        """Make a new container: the code, and an output folder with a copy of `outputs`."""
        self.scheduled += 1
        self.started = 0
        place = f"{self._folder}.{self.scheduled}" if self.scheduled > 1 else self._folder
        names = (f"user-job-dir/{self._code.name}", "inputs", "outputs", "cache", "logs")
        self.folders = Folders(*(os.path.join(place, name) for name in names))
        self.output = os.path.join(self.folders.outputs, OUTPUT)  # what a platform collects at the end
        self.log = os.path.join(self.folders.logs, f"node_{self.index}.log")
        self.slow_data = f"{self.folders.logs}-slow-data"  # for hooks/sitecustomize.py: how slow they are
        for folder in self.folders:
            os.makedirs(folder)
        manifests.write_files(self.folders.code, self._code.files)
        # a link and no copy: the data may be large, and the nodes only read them
        input = os.path.join(self.folders.inputs, INPUT)
        if self._data is None:
            os.mkdir(input)
        else:
            os.symlink(self._data, input)
        os.mkdir(self.output)
        if outputs is not None:
            copy_tree(outputs, self.output)

    def slow_down(self, rank: int | None, delay: float) -> None:
        """Open the files of the input later from now on, as a slow mount does. rank: only in the processes of
        this one; None: of all. delay: seconds; 0: at once again."""
        path = os.path.join(self.slow_data, "all" if rank is None else f"rank-{rank}")
        os.makedirs(self.slow_data, exist_ok=True)
        write_atomic(path, str(delay))  # a process may read it at any time

    @property
    def running(self) -> bool:
        """Return whether a run has begun that was not closed. Its processes may have ended."""
        return bool(self._tasks)

    def start(self, commands: list[tuple[list[str], dict[str, str]]]) -> None:
        """Begin a run: start every (command, environment) as a process in the code folder. The log is opened
        for reading before the first process starts, so that no line is missed."""
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
        """Return the running processes that the platform itself started."""
        return [task.pid for task in self._tasks if task.returncode is None]

    def read(self, most: int = _MOST) -> list[str]:
        """Return the lines that were printed since the last call. Does not wait."""
        *lines, self._unfinished = (self._unfinished + self._printed.read(most)).split(b"\n")
        return [line.decode(errors="replace").rstrip("\r") for line in lines]

    def poll(self) -> int | None:
        """Return the exit code of a run whose last process has ended, else None: that of the first process
        that failed, 128 + n for signal n. Then the processes that they have left behind are killed."""
        if not self._tasks:
            return None
        run = self.runs[-1]
        for task in self._tasks:
            # in the order in which they are seen to fail: the others mostly fail because of the first
            if task.poll() and run.code is None:
                run.code = normalize(task.returncode)
        if any(task.returncode is None for task in self._tasks):
            return None
        if not run.ended:
            run.code = run.code or 0
            run.ended = time.monotonic()
            sessions.kill(self._tasks, self._mark)
        return run.code

    def close(self) -> list[str]:
        """Close the run and return its last lines. The node is then ready for another run."""
        self.poll()
        lines = self.read(-1)
        self._printed.close()
        self._tasks = []
        if self._unfinished:
            lines.append(self._unfinished.decode(errors="replace"))
        return lines

    def end(self, number: int) -> None:
        """Send a signal to the living process groups that the platform started, as a platform ends a job."""
        sessions.end(self._tasks, number)

    def kill(self) -> None:
        """Kill all processes of the node, and wait for their end. close() has to follow."""
        sessions.kill(self._tasks, self._mark)

    def find(self) -> dict[int, dict[str, Any]]:
        """Return all living processes of the node, as sessions.find() does."""
        return sessions.find(self._mark)

    def ranks(self, count: int) -> dict[int, int]:
        """Return global rank -> process id. count: processes per node. A rank's process has RANK and
        LOCAL_RANK in its environment. Its children have them too, and are not counted. Without these
        variables, a rank is a process that the platform started."""
        processes = self.find()
        rank_of = {}  # process id -> the rank in its environment
        for pid, facts in processes.items():
            rank = facts["environ"].get("RANK", "")
            if "LOCAL_RANK" in facts["environ"] and rank.isdecimal():
                rank_of[pid] = int(rank)
        if not rank_of:
            tasks = enumerate(self._tasks, self.index * count)
            return {rank: task.pid for rank, task in tasks if task.poll() is None}
        # workers of a rank have its variables, and it as their parent
        return {rank: pid for pid, rank in rank_of.items() if rank_of.get(processes[pid]["ppid"]) != rank}


def copy_tree(source: str, destination: str) -> None:
    """Copy a folder into another one, without files that nodes which still run delete meanwhile."""

    def copy(source: str, target: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            shutil.copy2(source, target)

    shutil.copytree(source, destination, copy_function=copy, dirs_exist_ok=True)

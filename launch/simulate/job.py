"""The job of a simulation: its nodes, what they have printed so far, and the commands that start them."""

import argparse
import contextlib
import os
import random
import shlex
import shutil
import socket
import subprocess
import sys
import time

from bootfile.console.words import get_option, mask_words, split_option
from bootfile.ground.errors import BadInput
from bootfile.ground.log_lines import END, PROGRESS
from bootfile.machine.cores import available_cores
from bootfile.processes.sessions import GENERATION
from common.object_store.location import SCRATCH
from launch.profiles import VARIABLES, find_pod_grace, make_rank_table, make_starts
from launch.simulate.faults import HANGS
from launch.simulate.nodes import INPUT, Node

_LONGEST = 300  # characters of an error that are shown
_HOOKS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hooks")  # its sitecustomize.py


class Commands:
    """A builder of the nodes' commands. `launch simulate` makes one, before the nodes have folders.

    args: of `simulate`. code: the uploaded files. device: "cuda" or "cpu". pod_grace: seconds from SIGTERM to
    SIGKILL of the fault evict.
    """

    def __init__(self, args: argparse.Namespace):
        self._args = args
        self.code = args.code
        gpus = _visible_gpus() if get_option(args.job_arguments, "--enable_gpu") != "false" else []
        # ids, at least one for every process of all nodes; else empty
        self._gpus = gpus if len(gpus) >= args.nodes * args.processes else []
        self.pod_grace = 0
        if any(fault.kind == "evict" for fault in args.faults):
            self.pod_grace = find_pod_grace(get_option(args.job_arguments, "--grace") or "")
        self.device = "cuda" if self._gpus else "cpu"
        # Linux has all addresses of 127.0.0.0/8
        self._hosts = [f"127.0.{node // 254}.{node % 254 + 1}" for node in range(args.nodes)]
        self._port = _free_port()
        # that of this process, without what a platform or Bootfile has set in it
        self._environment = {"PYTHONUNBUFFERED": "1"} | {
            name: value
            for name, value in os.environ.items()
            if not VARIABLES.fullmatch(name) and not name.startswith("BOOTFILE_")
        }
        if not self._gpus:  # all nodes share the cores of this machine
            threads = max(1, available_cores() // (args.nodes * args.processes))
            self._environment.setdefault("OMP_NUM_THREADS", str(threads))

    def build(self, node: Node) -> list[tuple[list[str], dict[str, str], dict[str, str]]]:
        """Return (command, environment, the platform's part of it) of each process that it starts."""
        args = self._args
        processes = args.processes
        # the nodes share this machine: each sees its own GPUs only
        gpus = self._gpus[node.index * processes :][:processes]
        starts = make_starts(
            args.platform, node.index, args.nodes, processes, self._hosts, self._port, node.folders, len(gpus)
        )
        # without a launcher the job starts the other processes itself, and without GPUs it cannot count them
        is_own_launcher = len(starts) == 1 and not starts[0].prefix
        needs_count = is_own_launcher and not gpus
        job = os.path.join(node.folders.code, args.code.job_path)
        commands = []
        for start in starts:
            added_words = [word for word in start.arguments if not self._is_mounted(word.partition("=")[0])]
            job_words = self._complete_arguments(node, added_words, needs_count)
            command = [sys.executable, *start.prefix, job, *job_words, *added_words]
            added = dict(start.environment)
            # the platform writes this file before it starts the processes
            if "RANK_TABLE_FILE" in added:
                with open(added["RANK_TABLE_FILE"], "w", encoding="utf-8") as file:
                    file.write(make_rank_table(self._hosts, processes))
            if "MA_SCHEDULE_CNT" in added:
                added["MA_SCHEDULE_CNT"] = str(node.scheduled)
                added["MA_PROC_START_CNT"] = str(node.started + 1)  # with the start that follows
            of_node = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), SCRATCH: node.folders.scratch}
            environment = self._environment | of_node | added
            if any(fault.delay or fault.kind in HANGS for fault in args.faults):
                environment["BOOTFILE_SLOW_DATA"] = f"{node.slow_data}{os.pathsep}{node.folders.inputs}"
                # Python imports its sitecustomize.py, which imports the next one itself
                paths = [_HOOKS, environment.get("PYTHONPATH", "")]
                environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            commands.append((command, environment, added))
        return commands

    def _is_mounted(self, name: str) -> bool:
        """Return whether the user passes a URL for this option, or a folder for results, which stands for one
        that is mounted on every node. A platform then passes no folder."""
        given = get_option(self._args.job_arguments, name) or ""
        return "://" in given or (name == "--train_url" and bool(given))

    def _complete_arguments(self, node: Node, added_words: list[str], needs_count: bool) -> list[str]:
        """Return the user's arguments on a node. A job of Bootfile gets missing ones. added_words: those
        that the platform adds. needs_count: whether the job has to be told the number of its processes."""
        args = self._args
        words = list(args.job_arguments)
        if args.data is not None:
            _, words = split_option(words, "--data_url")
            words.append(f"--data_url={os.path.join(node.folders.inputs, INPUT, *args.below)}")
        if not args.code.is_repository:  # another script may not accept these options
            return words
        options = [*args.job_arguments, *added_words]
        if get_option(options, "--train_url", "--output_dir") is None:
            words.append(f"--train_url={node.output}")
        if needs_count and args.processes > 1 and get_option(options, "--processes_per_node") is None:
            words.append(f"--processes_per_node={args.processes}")
        if args.faults and get_option(options, "--report_every") is None:
            words.append("--report_every=1")
        return words


def _free_port() -> int:
    """Return a port below those of outgoing connections, so that it is still free when a node restarts."""
    for port in random.SystemRandom().sample(range(20000, 30000), 100):
        with contextlib.suppress(OSError):
            socket.create_server(("127.0.0.1", port)).close()
            return port
    raise BadInput("no free port among 100 in 20000..29999 on 127.0.0.1")


def _visible_gpus() -> list[str]:
    """Return ids for CUDA_VISIBLE_DEVICES, without importing torch, which takes seconds."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [gpu for gpu in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if gpu not in ("", "-1")]
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    result = subprocess.run(query, capture_output=True, text=True)
    return [] if result.returncode else result.stdout.split()  # the tool may be there without a driver


def log(line: str) -> None:
    """Print a line of the simulation itself."""
    print(f"[simulate] {line}", flush=True)


class Job:
    """The nodes of a job that is simulated.

    nodes: all of them, which have their folders and were not started. commands: build the commands of a node
        before each start.
    processes: of every node.
    `step`: the last one that any node has printed. Only the node of rank 0 prints steps.
    """

    def __init__(self, nodes: list[Node], commands: Commands, processes: int):
        self.nodes = nodes
        self.processes = processes
        self.step = 0
        self.commands = commands
        self._began = time.monotonic()
        self._members: list[int] = []  # process ids by rank, if the job prints them

    @property
    def seconds(self) -> float:
        """Return the time since the first node was started, in seconds."""
        return time.monotonic() - self._began

    @property
    def running(self) -> list[Node]:
        """Return the nodes whose run has begun and was not closed."""
        return [node for node in self.nodes if node.running]

    def start(self, node: Node) -> None:
        """Start the processes of a node and print their commands."""
        # again for each start: the count of starts is in the environment
        processes = self.commands.build(node)
        node.start([(command, environment) for command, environment, _ in processes])
        for (command, _, added), pid in zip(processes, node.pids, strict=True):
            variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(added.items()))
            line = f"node {node.index}: pid={pid} {variables} {shlex.join(mask_words(command)[0])}"
            log(" ".join(line.split()))

    def read(self) -> None:
        """Print the new lines of the nodes. Does not wait."""
        for node in self.running:
            self._show(node, node.read())

    def _show(self, node: Node, lines: list[str]) -> None:
        """Print lines of a node, and note what they tell: the step, the processes by rank, an error. A line
        may be read long after it was printed: the job may be further than the step here."""
        for line in lines:
            print(f"[node {node.index}] {line}")
            if progress := PROGRESS.match(line):
                self.step = int(progress["step"])
            # an elastic job replaces its processes, and prints who they are now
            if generation := GENERATION.fullmatch(line):
                self._members = [*map(int, generation[2].split())]
            end = END.match(line)
            hang = end and end["hang"]  # it may move again, unless this is an error
            error = end and (end["error"] or hang)
            if error and (not hang or hang.startswith("error: ")):
                node.runs[-1].error = error[:_LONGEST]
        if lines:
            sys.stdout.flush()

    def find_ranks(self) -> dict[int, tuple[Node, int]]:
        """Return global rank -> (node, process id) of the living processes, at the moment of a fault."""
        ranks: dict[int, tuple[Node, int]] = {}
        # An elastic job prints its processes, whose ranks may change. Others have theirs in the environment.
        members = {pid: rank for rank, pid in enumerate(self._members)}
        for node in self.running:
            if members:
                node_ranks = {members[pid]: pid for pid in node.find() if pid in members}
            else:
                node_ranks = node.ranks(self.processes)
            ranks |= {rank: (node, pid) for rank, pid in node_ranks.items()}
        return ranks

    def finish(self, node: Node, note: str = "") -> int:
        """Print the last lines of a run that has ended, and return its exit code. note: what ended it."""
        self._show(node, node.close())
        run = node.runs[-1]
        run.note = run.note or note
        return run.code or 0

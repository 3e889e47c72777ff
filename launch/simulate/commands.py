"""Build the commands of simulated nodes: the platform's arguments, the user's, and a clean environment."""

import argparse
import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys

from bootfile.console.words import get_option, split_option
from bootfile.ground.errors import BadInput
from bootfile.machine.cores import available_cores
from common.object_store.location import SCRATCH
from launch.profiles import VARIABLES, find_pod_grace, make_rank_table, make_starts
from launch.simulate import slow_data
from launch.simulate.faults import HANGS
from launch.simulate.nodes import INPUT, Node

_HOOKS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hooks")  # its sitecustomize.py


class Commands:
    """A builder of the nodes' commands. `launch simulate` makes one, before the nodes have folders.

    args: of `simulate`. code: the uploaded files. device: "cuda" or "cpu". pod_grace: seconds from SIGTERM to
    SIGKILL of the fault evict.
    """

    def __init__(self, args: argparse.Namespace):
        self._args = args
        self.code = args.code
        self._gpus: list[str] = []  # ids, at least one for every process of all nodes; else empty
        if get_option(args.job_arguments, "--enable_gpu") != "false":
            gpus = _visible_gpus()
            if len(gpus) >= args.nodes * args.processes:
                self._gpus = gpus
        self.pod_grace = 0
        if any(fault.kind == "evict" for fault in args.faults):
            self.pod_grace = find_pod_grace(get_option(args.job_arguments, "--grace") or "")
        self.device = "cuda" if self._gpus else "cpu"
        # Linux has all addresses of 127.0.0.0/8
        self._hosts = [f"127.0.{node // 254}.{node % 254 + 1}" for node in range(args.nodes)]
        self._port = _free_port()
        # that of this process, without what a platform or Bootfile has set in it
        self._environment = {"PYTHONUNBUFFERED": "1"}
        for name, value in os.environ.items():
            if not VARIABLES.fullmatch(name) and not name.startswith("BOOTFILE_"):
                self._environment.setdefault(name, value)
        if not self._gpus:  # all nodes share the cores of this machine
            threads = max(1, available_cores() // (args.nodes * args.processes))
            self._environment.setdefault("OMP_NUM_THREADS", str(threads))

    def build(self, node: Node) -> list[tuple[list[str], dict[str, str], dict[str, str]]]:
        """Return (command, environment, the platform's part of it) of every process that the platform starts
        on a node, in the order of local ranks. The simulation calls it before each start of a node: the
        counts of starts and the folders change."""
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
            table = added.get("RANK_TABLE_FILE")
            if table:
                with open(table, "w", encoding="utf-8") as file:
                    file.write(make_rank_table(self._hosts, processes))
            if "MA_SCHEDULE_CNT" in added:
                added["MA_SCHEDULE_CNT"] = str(node.scheduled)
                added["MA_PROC_START_CNT"] = str(node.started + 1)  # with the start that follows
            of_node = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), SCRATCH: node.folders.scratch}
            environment = self._environment | of_node | added
            if any(fault.delay for fault in args.faults):
                environment["BOOTFILE_SLOW_DATA"] = slow_data.prepare(node.folders)
            if any(fault.delay or fault.kind in HANGS for fault in args.faults):
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
        """Return the user's arguments on a node. A job of Bootfile gets missing ones: folder for results,
        number of processes, report interval.

        added_words: the arguments that the platform adds. needs_count: whether the job has to be told the
        number of its processes.
        """
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
    if result.returncode:  # the tool is there without a driver
        return []
    return result.stdout.split()

"""The job of a simulation: its nodes, and what they have printed so far."""

import shlex
import sys
import time

from bootfile.console.words import mask_words
from bootfile.ground.log_lines import END, PROGRESS
from bootfile.processes.sessions import GENERATION
from launch.simulate.commands import Commands
from launch.simulate.nodes import Node

_LONGEST = 300  # characters of an error that are shown


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
        """Start the processes of a node and print their commands: first when the simulation begins, later
        after a fault or a failure."""
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
            progress = PROGRESS.match(line)
            if progress:
                self.step = int(progress["step"])
            # an elastic job replaces its processes, and prints who they are now
            generation = GENERATION.fullmatch(line)
            if generation:
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
        ranks = {}
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
        """Print the last lines of a run that has ended, and return its exit code. note: the reason for its
        end, if the simulation caused it."""
        self._show(node, node.close())
        run = node.runs[-1]
        run.note = run.note or note
        return run.code or 0

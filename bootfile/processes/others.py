"""The other ranks of a run, as one rank sees them: where they are, and why they end. A Watch (stuck.py) of
several ranks has one. It is made before the first step: a rank that has lost another one loads nothing."""

import contextlib
import os
import re
import secrets
from collections.abc import Callable
from typing import Any

from bootfile.ground import errors
from bootfile.ground.errors import print_line
from bootfile.processes import board, ends, host_names, node, ranks, roll_call
from bootfile.processes.report import Clock, Report


class Others:
    """The ranks of a run of several processes. Make one on every rank: they exchange facts about each.

    clock, report, files, find_place: of the Watch, and of its Pulse. tells_ends: print why a rank has died.
    `local`: rank -> node.Seen, of the other ranks of this node.
    """

    def __init__(
        self,
        clock: Clock,
        report: Report,
        files: dict[str, Any],
        find_place: Callable[..., Any],
        tells_ends: bool,
    ):
        machine = ""
        with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
            machine = file.read() + os.readlink("/proc/self/ns/pid")
        rank = ranks.rank()
        facts = ranks.gather_objects((machine, secrets.token_hex(8), files))
        self._report = report
        self._tells_ends = tells_ends
        self._nodes = host_names.find_nodes()
        near = [other for other, fact in enumerate(facts) if fact[0] == machine and other != rank]
        self.local = {other: node.Seen(facts[other][2]) for other in near if machine}
        store = ranks.store()
        assert store is not None  # there are several ranks
        self._board = board.Board(store, f"bootfile ranks {facts[0][1]}")
        self._calls = roll_call.RollCall(rank, len(facts), self.local, self._board, clock, report, find_place)
        processes = {other: seen.process for other, seen in self.local.items()}
        [ranks_of_node] = [node.ranks for node in self._nodes if rank in node.ranks]

        def name(other: int) -> str:
            return f"{self.name([other])} (pid {facts[other][2]['pid']})"

        self.ends = ends.RankEnds(rank, processes, ranks_of_node, self._board, name)
        descriptors = [process.descriptor for process in processes.values()]
        # each is readable when a rank of this node has ended
        self.descriptors = [descriptor for descriptor in descriptors if descriptor is not None]

    def name(self, members: list[int]) -> str:
        """Return ranks in words: "rank 3 on node b", or "ranks 0-2, 4" if the job has only one node or they
        are on several."""
        nodes = [node.name for node in self._nodes if set(members) <= set(node.ranks)]
        return " on node ".join([ranks.show(members), *(nodes if len(self._nodes) > 1 else [])])

    def look(self, now: float) -> None:
        """Print what is due. The thread of the Watch calls it repeatedly."""
        if self._tells_ends:
            self.ends.look(now)
        self._calls.look(now)

    def explain(self, error: BaseException, at_loss: Callable[[], object]) -> None:
        """Tell the other ranks about an error that ends this one. If the error may come from the end of
        another rank, wait for the reason of that and print it. at_loss: called then."""
        if not ends.has_lost_contact(error):
            if isinstance(error, Exception):
                self.ends.announce(f"with {errors.in_one_line(error)}")
            return
        self.ends.announce_loss()  # before the save: the others then know that this rank is alive
        at_loss()  # at once: a launcher may end this process after some seconds
        if self._report.line and re.search("time(d )?out", str(error), re.IGNORECASE):
            print_line(self._report.line)
        elif self._tells_ends:
            number = self._calls.call()  # the threads of all ranks answer it
            if not self.ends.explain() and number:
                self.ends.tell_silent(self._calls.find_silent(number), self.name)

    def leave(self, is_early: bool) -> None:
        """Tell the other ranks that this one ends. is_early: before the run does."""
        if is_early:
            self.ends.announce("by itself, before the others", is_early=True)
        else:
            self._board.write(f"left/{ranks.rank()}", "done")
        self._board.close()

    def close(self) -> None:
        """Close what was opened of the other processes, when the thread has ended."""
        for seen in self.local.values():
            seen.process.close()

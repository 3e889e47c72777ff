"""Where each rank of a run is, when it does not move.

A rank whose line is due raises a number in the store. Each rank then writes its place there; for one that
cannot, because it is stopped or its lock of Python is held, another rank of its node does. The rank that has
asked reads all places and prints the line; rank 0 asks first. Needed are a clock and a report, and no thread.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from bootfile.processes.board import Board
from bootfile.processes.node import PAUSED, Seen
from bootfile.processes.report import Clock, Report
from bootfile.processes.stacks import ENDED, HELD, SILENT, STOPPED, Place

_TURN = 1.5  # seconds that the next rank waits for the one before it to ask
_MOST_TURNS = 5
_SILENCE = 5.0  # seconds without a beat, when the run does not move: Python does not run
DONE = "done"  # at left/RANK in the store: its loop has ended


@dataclasses.dataclass
class RollCall:
    """The calls of a run, in which each rank writes its place."""

    rank: int
    count: int  # of ranks
    local: Mapping[int, Seen]  # the other ranks of this node
    board: Board
    clock: Clock
    report: Report
    here: Callable[[float], tuple[Place, bool]]  # for a time: (the place of this rank, whether it moves)
    _number: int = 0  # the number of the last call
    _asked: int = 0  # the number of the last call that this rank has made
    _opened_at: float | None = None  # when this rank has learnt of the last call; None: it has ended
    _moved_at: float = 0.0  # when the run had moved last before that
    _silent_since: float | None = None  # since when the store does not answer
    # ranks of this node whose places this rank has written in this call
    _answered_for: set[int] = dataclasses.field(default_factory=set)

    def look(self, now: float) -> None:
        """Answer a call, or make one if the run does not move. The watching thread calls it repeatedly."""
        number = self.board.count("call")
        if number is None:
            self._look_alone(now)
            return
        self._silent_since = None
        turn = _TURN * min(self.rank, _MOST_TURNS)
        if number == self._number and self._opened_at is None and self.clock.is_due(now, turn):
            number = self._asked = self.call() or number
        if number != self._number:
            self._number = number
            self._opened_at = now
            self._moved_at = self.clock.at
            self._answered_for.clear()
            self._answer(self.rank, *self.here(now), now)
        if self._opened_at is None:
            return
        self._answer_for_others(now)
        if self._asked == number:
            result = self._conclude(now - self._opened_at > self.clock.patience)
        else:
            [result] = self.board.read(f"result/{number}") or [""]
        if result:
            self._end_call(now, result == "moves")
        elif now - self._opened_at > 2 * self.clock.patience:  # the rank that has made the call has stopped
            self._opened_at = None

    def call(self) -> int | None:
        """Ask all ranks where they are, and return the number of the call; None without an answer."""
        return self.board.count("call", 1)

    def find_silent(self, number: int) -> list[int]:
        """Return the ranks of other nodes that have not answered a call and have not left."""
        near = {self.rank, *self.local, *self._read_answers(number)}
        return [rank for rank, text in self._read("left").items() if not text and rank not in near]

    def _read(self, name: str) -> dict[int, str]:
        """Return the text NAME/RANK of each rank; {} without an answer."""
        texts = self.board.read(*(f"{name}/{rank}" for rank in range(self.count)))
        return dict(enumerate(texts or []))

    def _read_answers(self, number: int) -> dict[int, dict[str, Any]]:
        """Return the answers of the ranks to a call or a later one."""
        states = {rank: json.loads(text) for rank, text in self._read("state").items() if text}
        return {rank: state for rank, state in states.items() if state["call"] >= number}

    def _answer(self, rank: int, place: Place, moves: bool, now: float, dump: str = "") -> None:
        """Write where a rank is. dump: its stacks, if it is another one (default: those of this process)."""
        state = {"call": self._number, "verb": place.verb, "name": place.name, "moves": moves}
        self.board.write(f"state/{rank}", json.dumps(state | {"idle": self.clock.idle(now)}))
        if not moves and (dump or rank == self.rank):
            self.report.write_stacks(rank, self.clock, now, dump)

    def _is_first(self) -> bool:
        """Return whether this is the first rank of its node whose Python runs."""
        return not any(seen.runs(_SILENCE) for rank, seen in self.local.items() if rank < self.rank)

    def _answer_for_others(self, now: float) -> None:
        """Write where the ranks of this node are that cannot do it themselves."""
        if not self._is_first():
            return
        for rank in self.local.keys() - self._answered_for:
            place = self.local[rank].look(_SILENCE)
            if place is None:
                continue
            self._answered_for.add(rank)
            if rank not in self._read_answers(self._number):  # else it was only slow, and has answered itself
                self._answer(rank, place, place == PAUSED, now, self.local[rank].dump)

    def _conclude(self, is_late: bool) -> str:
        """Print the line unless a rank still moves. Return the result of the call, "moves" or "stuck", or ""
        to wait for more answers. is_late: do not wait; ranks that have not answered are silent."""
        answers = self._read_answers(self._number)
        left = self._read("left")
        if not answers or not left:  # the store does not answer any more
            return ""
        silent = Place(SILENT, "")
        places = dict.fromkeys(range(self.count), silent)
        places |= {rank: Place(answer["verb"], answer["name"]) for rank, answer in answers.items()}
        # a loop that has ended, also since its answer: it may evaluate, or wait for the others
        places |= {rank: Place(ENDED, "its loop") for rank, how in left.items() if how == DONE}
        # the answers may be some seconds old: a step may have ended since
        if self.clock.at > self._moved_at or any(answer["moves"] for answer in answers.values()):
            result = "moves"
        elif silent in places.values() and not is_late:
            return ""
        else:
            result = "stuck"
            self.report.show(self.clock, max(answer["idle"] for answer in answers.values()), places)
        self.board.write(f"result/{self._number}", result)
        return result

    def _end_call(self, now: float, moves: bool) -> None:
        """Choose the time of the next line, and end the process if the run is stuck and the user wants it."""
        self._opened_at = None
        if moves:
            self.clock.postpone(now)
            return
        self.clock.end_call(now)
        if self.report.exits:
            for seen in self.local.values():
                place = seen.look(_SILENCE)
                if place and place.verb in (STOPPED, HELD):  # it cannot end itself
                    seen.kill()
        self.report.end_call()

    def _look_alone(self, now: float) -> None:
        """Print the line of this node if the store does not answer: its process is stopped or cut off."""
        self._silent_since = self._silent_since or now
        if not self.clock.is_due(now) or now - self._silent_since < self.clock.patience:
            return
        place, moves = self.here(now)
        if not moves:
            self.report.write_stacks(self.rank, self.clock, now)
        if not moves and self._is_first():
            # a rank of this node whose Python runs writes its place to the store only: the line lacks it
            looks = {rank: seen.look(_SILENCE) for rank, seen in self.local.items()}
            places = dict.fromkeys(range(self.count), Place(SILENT, "")) | looks | {self.rank: place}
            known = {rank: each for rank, each in places.items() if each}
            self.report.show(self.clock, self.clock.idle(now), known)
        self._end_call(now, moves)

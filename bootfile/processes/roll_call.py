"""Where each rank of a run is, when it does not move.

A rank whose line is due raises a number in the store. Each rank then writes its place there; for one that
cannot, because it is stopped or its lock of Python is held, another rank of its node does. The rank that has
asked reads all places and prints the line; rank 0 asks first. Needed are a clock and a report, and no thread.
"""

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


class RollCall:
    """The calls of a run, in which each rank writes its place.

    count: the number of ranks.
    local: the other ranks of this node.
    here: returns (the place of this rank, whether it moves). It gets the time.
    """

    def __init__(
        self,
        rank: int,
        count: int,
        local: Mapping[int, Seen],
        board: Board,
        clock: Clock,
        report: Report,
        here: Callable[[float], tuple[Place, bool]],
    ):
        self._rank = rank
        self._count = count
        self._local = local
        self._board = board
        self._clock = clock
        self._report = report
        self._here = here
        self._number = 0  # the number of the last call
        self._asked = 0  # the number of the last call that this rank has made
        self._opened_at: float | None = None  # when this rank has learnt of the last call; None: it has ended
        self._moved_at = 0.0  # when the run had moved last before that
        self._answered_for = set[int]()  # ranks of this node whose places this rank has written in this call
        self._silent_since: float | None = None  # since when the store does not answer

    def look(self, now: float) -> None:
        """Answer a call, or make one if the run does not move. The watching thread calls it repeatedly."""
        number = self._board.count("call")
        if number is None:
            self._look_alone(now)
            return
        self._silent_since = None
        turn = _TURN * min(self._rank, _MOST_TURNS)
        if number == self._number and self._opened_at is None and self._clock.is_due(now, turn):
            number = self._asked = self.call() or number
        if number != self._number:
            self._number = number
            self._opened_at = now
            self._moved_at = self._clock.at
            self._answered_for.clear()
            self._answer(self._rank, *self._here(now), now)
        if self._opened_at is None:
            return
        self._answer_for_others(now)
        if self._asked == number:
            result = self._conclude(now - self._opened_at > self._clock.patience)
        else:
            [result] = self._board.read(f"result/{number}") or [""]
        if result:
            self._end_call(now, result == "moves")
        elif now - self._opened_at > 2 * self._clock.patience:  # the rank that has made the call has stopped
            self._opened_at = None

    def call(self) -> int | None:
        """Ask all ranks where they are, and return the number of the call; None without an answer."""
        return self._board.count("call", 1)

    def find_silent(self, number: int) -> list[int]:
        """Return the ranks of other nodes that have not answered a call and have not left."""
        near = {self._rank, *self._local, *self._read_answers(number)}
        return [rank for rank, text in self._read("left").items() if not text and rank not in near]

    def _read(self, name: str) -> dict[int, str]:
        """Return the text NAME/RANK of each rank; {} without an answer."""
        texts = self._board.read(*(f"{name}/{rank}" for rank in range(self._count)))
        return dict(enumerate(texts or []))

    def _read_answers(self, number: int) -> dict[int, dict[str, Any]]:
        """Return the answers of the ranks to a call or a later one."""
        states = {rank: json.loads(text) for rank, text in self._read("state").items() if text}
        return {rank: state for rank, state in states.items() if state["call"] >= number}

    def _answer(self, rank: int, place: Place, moves: bool, now: float, dump: str = "") -> None:
        """Write where a rank is. dump: its stacks, if it is another one (default: those of this process)."""
        state = {"call": self._number, "verb": place.verb, "name": place.name, "moves": moves}
        self._board.write(f"state/{rank}", json.dumps(state | {"idle": self._clock.idle(now)}))
        if not moves and (dump or rank == self._rank):
            self._report.write_stacks(rank, self._clock, now, dump)

    def _is_first(self) -> bool:
        """Return whether this is the first rank of its node whose Python runs."""
        return not any(seen.runs(_SILENCE) for rank, seen in self._local.items() if rank < self._rank)

    def _answer_for_others(self, now: float) -> None:
        """Write where the ranks of this node are that cannot do it themselves."""
        if not self._is_first():
            return
        for rank in self._local.keys() - self._answered_for:
            place = self._local[rank].look(_SILENCE)
            if place is None:
                continue
            self._answered_for.add(rank)
            if rank not in self._read_answers(self._number):  # else it was only slow, and has answered itself
                self._answer(rank, place, place == PAUSED, now, self._local[rank].dump)

    def _conclude(self, is_late: bool) -> str:
        """Print the line unless a rank still moves. Return the result of the call, "moves" or "stuck", or ""
        to wait for more answers. is_late: do not wait; ranks that have not answered are silent."""
        answers = self._read_answers(self._number)
        left = self._read("left")
        if not answers or not left:  # the store does not answer any more
            return ""
        places = {}
        for rank in range(self._count):
            # a loop that has ended may evaluate, or wait for the others
            places[rank] = Place(ENDED, "its loop") if left[rank] == DONE else Place(SILENT, "")
            if answer := answers.get(rank):
                places[rank] = Place(answer["verb"], answer["name"])
        # the answers may be some seconds old: a step may have ended since
        if self._clock.at > self._moved_at or any(answer["moves"] for answer in answers.values()):
            result = "moves"
        elif not is_late and Place(SILENT, "") in places.values():
            return ""
        else:
            result = "stuck"
            self._report.show(self._clock, max(answer["idle"] for answer in answers.values()), places)
        self._board.write(f"result/{self._number}", result)
        return result

    def _end_call(self, now: float, moves: bool) -> None:
        """Choose the time of the next line, and end the process if the run is stuck and the user wants it."""
        self._opened_at = None
        if moves:
            self._clock.postpone(now)
            return
        self._clock.end_call(now)
        if self._report.exits:
            looks = [(seen, seen.look(_SILENCE)) for seen in self._local.values()]
            for seen, place in looks:
                if place and place.verb in (STOPPED, HELD):  # it cannot end itself
                    seen.kill()
        self._report.end_call()

    def _look_alone(self, now: float) -> None:
        """Print the line of this node if the store does not answer: its process is stopped or cut off."""
        self._silent_since = self._silent_since or now
        if not self._clock.is_due(now) or now - self._silent_since < self._clock.patience:
            return
        place, moves = self._here(now)
        if not moves:
            self._report.write_stacks(self._rank, self._clock, now)
        if not moves and self._is_first():
            # a rank of this node whose Python runs writes its place to the store only: the line lacks it
            looks = {rank: seen.look(_SILENCE) for rank, seen in self._local.items()}
            places = {rank: Place(SILENT, "") for rank in range(self._count) if rank not in self._local}
            places |= {rank: blocked for rank, blocked in looks.items() if blocked}
            places[self._rank] = place
            self._report.show(self._clock, self._clock.idle(now), dict(sorted(places.items())))
        self._end_call(now, moves)

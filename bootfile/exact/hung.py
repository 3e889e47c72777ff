"""Watch whether a run moves (bootfile/processes/stuck.py)."""

from bootfile.exact.due import Due
from bootfile.exact.plugins import Parts, Plugin
from bootfile.processes import stuck


class Hung(Plugin):
    """Says where each rank is if no step ends for some time. after, exits: see stuck.start()."""

    def __init__(self, after: float, exits: bool):
        self._after = after
        self._exits = exits

    def begin(self, parts: Parts, step: int) -> None:
        self._parts = parts
        watch = stuck.start(
            parts.saver.folder, step, self._after, self._exits, tells_ends=not parts.may_change
        )
        self._clock = watch.clock
        self._clock.model = parts.model
        watch.at_loss = self._note_loss

    def _note_loss(self) -> None:
        for save in self._parts.at_loss:
            save()

    def ended(self, step: int, due: Due) -> None:
        # an evaluation or a save may follow: the threads that look for a stuck run then wait longer
        self._clock.note(step, is_longer=due.save or self._parts.ends_part(step))

    def saved(self, step: int) -> None:
        self._clock.touch()

    def close(self, error: BaseException | None) -> None:
        stuck.stop()

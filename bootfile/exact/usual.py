"""The plugins of a run that says nothing else, in their order."""

from bootfile.exact.due import Due
from bootfile.exact.plugins import Parts, Plugin
from bootfile.ground.errors import BadInput
from bootfile.processes import ranks, stuck


def usual(
    survivors: str = "first",
    stuck_after: float = 60.0,
    stuck_exit: bool = False,
    slow_rank: float = 0.1,
    is_job: bool = False,
) -> list[Plugin]:
    """Return the plugins of a run, when the process group is there.

    survivors: "first": rank 0 saves the last step when another rank is lost (survivor.py). "any": another one
        does if rank 0 is lost; it needs a folder that all nodes see, and rank 0 sends the buffers of the
        model to the others at the end of each step. "": no rank saves without the others.
    stuck_after: seconds without the end of a step after which a line says where each rank is (stuck.py); 0:
        never. stuck_exit: end the run then.
    slow_rank: the share of the time from which on a line names the rank that costs it, with a report.
    is_job: nothing but an evaluation follows a save.
    Raises BadInput for another value of `survivors`.
    """
    if survivors not in ("", "first", "any"):
        raise BadInput(f'survivors is "first" or "any", not {survivors!r}')
    plugins: list[Plugin] = []
    # The order is that in which a step ends. The survivor keeps the step first: each collective after it may
    # fail, and so the ranks are compared, timed, and the receipt is extended, after it. The clock of a stuck
    # run is last: it begins to count when all of these are done.
    if ranks.world_size() > 1:
        from bootfile.exact.pace import Pace  # a run of one process has no other rank
        from bootfile.exact.replicas import Replicas
        from bootfile.exact.survivor import LateRecords, Survivor

        survivor = Survivor(survivors)
        plugins += [survivor, Replicas(), Pace(slow_rank, says_lost=not is_job), LateRecords(survivor)]
    if not is_job:
        from bootfile.exact.after_save import AfterSave  # a job has no code there

        plugins.append(AfterSave())
    return [*plugins, Hung(stuck_after, stuck_exit)]


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

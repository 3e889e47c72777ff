"""The plugins of a run that says nothing else, in their order."""

import functools

import torch

from bootfile.exact import digest
from bootfile.exact.due import Due
from bootfile.exact.marks import read_mark
from bootfile.exact.plugins import Parts, Plugin
from bootfile.ground.errors import BadInput
from bootfile.processes import ranks, stuck, waits


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


class AfterSave(Plugin):
    """Names what a loop of one's own changes between a save and its next batch, on rank 0: a restart does not
    do it again."""

    def begin(self, parts: Parts, step: int) -> None:
        self._parts = parts
        self._compares = parts.writes and ranks.is_first() and not parts.state.is_sharded

    def saved(self, step: int) -> None:
        if self._compares:
            waits.before_next[:] = [functools.partial(self._compare, step, self._outline())]

    def close(self, error: BaseException | None) -> None:
        waits.before_next.clear()

    def _outline(self) -> list[tuple[str, str]]:
        """Return (name, text) of the calls of the schedule and of each value of torch's objects; a value that
        was changed in place has another text (marks.py)."""
        state = self._parts.state
        # an object of the user may count seconds, or hold long lists; so may the extra state of a module
        of_torch = (torch.nn.Module, torch.optim.Optimizer)
        try:
            parts = {
                key: each.state_dict() for key, each in state.objects.items() if isinstance(each, of_torch)
            }
            outline = [("the scheduler", repr(state.schedule.state()["calls"]))]
            leaves = [(name, leaf) for name, leaf in digest.leaves(parts) if "_extra_state" not in name]
            for name, leaf in leaves:
                outline.append((name, read_mark(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf)))
        except Exception:  # a state_dict() may work only around a save
            self._compares = False
            return []
        return outline

    def _compare(self, step: int, before: list[tuple[str, str]]) -> None:
        """Print a warning if the state is not the one that was saved after a step. before: the outline then.
        The digest decides: an evaluation may have put other weights in, and the right ones back."""
        after = self._outline()
        if after == before or not self._compares:
            return
        self._compares = False  # to compute a digest of the state after each save would take long
        names = {name for name, _ in set(after) - set(before)}
        changed = "the scheduler" if "the scheduler" in names else self._find_changed(step, names)
        if changed:
            self._parts.say(
                f"warning: the loop has changed {changed} after run.save() of step {step}: the checkpoint "
                "lacks it, and a restart will not be exact. Call end_step() and save() at the end of the "
                "loop's body"
            )

    def _find_changed(self, step: int, names: set[str]) -> str:
        """Return the first of these names whose value differs from the checkpoint of a step, or ""."""
        saver = self._parts.saver
        saver.collect(wait=True)
        newest = saver.newest
        if newest is None or newest["step"] != step:  # the write has failed
            return ""
        parts = digest.summarize(step, self._parts.state.capture(step)["objects"])["parts"]
        changed = [name for name in parts if name in names and parts[name] != newest["parts"].get(name)]
        return changed[0] if changed else ""

"""Name what a loop of one's own changes between a save and its next batch: a restart does not do it again."""

import functools

from bootfile.exact import digest
from bootfile.exact.plugins import Parts, Plugin
from bootfile.processes import ranks, waits


class AfterSave(Plugin):
    """Compares the state after a save with the state when the loop asks for the next batch, on rank 0."""

    def begin(self, parts: Parts, step: int) -> None:
        self._parts = parts
        self._compares = parts.writes and ranks.is_first() and not parts.state.is_sharded

    def saved(self, step: int) -> None:
        if self._compares:
            waits.before_next[:] = [functools.partial(self._compare, step, self._outline())]

    def close(self, error: BaseException | None) -> None:
        waits.before_next.clear()

    def _outline(self) -> list[tuple[str, str]]:
        try:
            return self._parts.state.outline()
        except Exception:  # a state_dict() may work only around a save
            self._compares = False
            return []

    def _compare(self, step: int, before: list[tuple[str, str]]) -> None:
        """Print a warning if the state is not the one that was saved after a step. before: the outline then.

        Another outline shows that something was changed; the digest decides, because an evaluation may have
        put other weights in, and the right ones back.
        """
        after = self._outline()
        if after == before or not self._compares:
            return
        self._compares = False  # to compute a digest of the state after each save would take long
        names = {name for name, _ in set(after) - set(before)}
        changed = "the scheduler"
        if changed not in names:
            changed = self._find_changed(step, names)
        if changed:
            self._parts.say(
                f"warning: the loop has changed {changed} after run.save() of step {step}: the checkpoint "
                "lacks it, and a restart will not be exact. Call end_step() and save() at the end of the "
                "loop's body"
            )

    def _find_changed(self, step: int, names: set[str]) -> str:
        """Return the first of these names whose value differs from the checkpoint of a step; "" without
        one."""
        saver = self._parts.saver
        saver.collect(wait=True)
        newest = saver.newest
        if newest is None or newest["step"] != step:  # the write has failed
            return ""
        saved = newest["parts"]
        state = self._parts.state.capture(step)
        for name, part in digest.summarize(step, state["objects"])["parts"].items():
            if name in names and part != saved.get(name):
                return str(name)
        return ""

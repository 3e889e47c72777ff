"""A plugin of a loop of one's own: name what the loop changes between a save and its next batch."""

import functools

import torch

from bootfile.exact import digest
from bootfile.exact.plugins import Parts, Plugin
from bootfile.exact.tensor_mark import read_mark
from bootfile.processes import ranks, waits


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
        was changed in place has another text (tensor_mark.py)."""
        state = self._parts.state
        # an object of the user may count seconds, or hold long lists; so may the extra state of a module
        of_torch = (torch.nn.Module, torch.optim.Optimizer)
        try:
            parts = {
                key: each.state_dict() for key, each in state.objects.items() if isinstance(each, of_torch)
            }
            outline = [("the scheduler", repr(state.schedule.state()["calls"]))]
            for name, leaf in digest.leaves(parts):
                if "_extra_state" not in name:
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

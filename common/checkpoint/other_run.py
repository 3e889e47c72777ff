"""A run with --from or --without: it begins at a step of another run, or its batches lack some samples."""

from collections.abc import Callable
from typing import Any

from bootfile.exact.forked import Forked
from bootfile.exact.plugins import Parts
from bootfile.exact.state import RunState
from common.run.run import Run


class OtherRun:
    """The Fork of --from, the Without of --without, or both. The Checkpointer has one on each rank of such a
    job.

    objects: those of the job. write_sums: writes what --recheck has kept of the steps so far.
    `plugin`: does what the two want. Raises BadInput.
    """

    def __init__(self, run: Run, loader: Any, objects: dict[str, Any], say: Any, write_sums: Callable | None):
        self._without: Any = None
        self._fork: Any = None
        self._write_sums = write_sums
        if run.args.without:
            from common.checkpoint.without import Without

            forward = objects.get("forward")
            if forward is None:
                forward = objects["model"]
            self._without = Without(run.args.without, loader, forward)
        if run.args.from_run:
            from common.checkpoint.fork import Fork

            self._fork = Fork(run, say, self._without)
        self.plugin = Forked(self._check if self._fork else None)

    def _check(self, step: int, line: dict[str, Any]) -> str:
        """Return the first difference from the old run up to a step; see Forked."""
        if self._write_sums:
            self._write_sums()  # the check reads them
        difference: str = self._fork.check(step, line)
        return difference

    def choose(self, wanted: str, state: RunState) -> str:
        """Return what to continue from, on rank 0. wanted: what --resume says."""
        if self._without:
            self._without.identify(state)
        if self._fork:
            wanted = self._fork.choose(wanted, state)
        return wanted

    def settle(self, parts: Parts, step: int, folder: str | None) -> dict[str, Any]:
        """Tell the plugin what it has to do, on every rank, when the state after `step` is restored. Return
        the facts about the other run. folder: of the results, None if nothing is written."""
        if self._without:
            self._without.settle(parts, self.plugin, folder)
        if not self._fork:
            return {}
        self._fork.settle(parts, self.plugin, step)
        facts: dict[str, Any] = self._fork.facts
        return facts

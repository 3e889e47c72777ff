"""The processes of a run, as its loop knows them."""

from typing import TYPE_CHECKING

from bootfile.exact.due import Due
from bootfile.exact.plugins import Parts, Plugin
from bootfile.processes import ranks

if TYPE_CHECKING:  # a build of torch may have no torch.distributed
    from torch._C._distributed_c10d import Store


class Processes(Plugin):
    """The processes of a run, which stay the same until it ends. A loop of your own needs none.

    An elastic job has a subclass, whose processes leave and come between two steps
    (common/elastic/memory.py). The loop calls the methods on every rank.

    `may_change`: whether processes may leave and come.
    `has_restored`: whether restore() has restored a state.
    `is_changing`: whether all ranks have agreed that others come or leave after this step.
    `due`: what the last step had still to do when this process joined.
    """

    may_change = False
    has_restored = False
    is_changing = False
    due = Due(False, False)

    def restore(self, parts: Parts) -> int | None:
        """Restore the state of processes that are alive, and return its step. None: there are none, and the
        run continues from a checkpoint."""
        return None

    def announce(self, step: int) -> None:
        """Print which processes continue after `step` steps."""

    def check(self) -> None:
        """Stop a step that cannot end, because a process is lost. Called between the parts of a step."""

    def signal_store(self) -> "Store | None":
        """Return the store in which a process tells others that it was asked to stop; None without one."""
        return ranks.store()

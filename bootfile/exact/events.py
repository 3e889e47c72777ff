"""What a program around an Exact adds to a run: where it continues from, and what it says when it stops."""

from bootfile.ground.errors import BadInput, print_line
from bootfile.processes import ranks


class Events:
    """Exact calls these methods. A job has a subclass (common/checkpoint/checkpointer.py)."""

    def choose_checkpoint(self) -> str:
        """Return what the run continues from: "auto" for its own newest checkpoint, "never", or a path.

        Called on rank 0 before a checkpoint is read; the other ranks wait in wait_for_first(). Raises
        BadInput.
        """
        return "auto"

    def wait_for_first(self, error: BadInput | None) -> None:
        """Wait until rank 0 has read the checkpoint. Called on every rank. error: that of rank 0, which every
        rank raises."""
        # all ranks meet here before each of them changes its objects
        ranks.raise_on_all(error)

    def repeat_report(self) -> None:
        """Report what the last step of an elastic job had still to report. Called on every rank, before the
        first step of the processes that continue."""

    def leaving(self) -> None:
        """Release what the process holds: it exits at once. Called on every rank, after stopping()."""

    def stopping(self, step: int, saved: int) -> None:
        """Say that the run stops after a step, because it was asked to. Called on every rank, when the
        newest checkpoint, that of the step `saved`, is on the disk."""
        if ranks.is_first():
            print_line(stopped_line(step, saved))


def stopped_line(step: int, saved: int) -> str:
    """Return the line of a run that stops after a step. saved: the step of its newest checkpoint."""
    return f"stopped as asked after step {step}; the newest checkpoint is that of step {saved}"

"""Intervals between saves or reports: in steps, seconds or epochs."""

from typing import NamedTuple

UNITS = ("step", "s", "epoch")


class Interval(NamedTuple):
    """An interval between saves or reports. number: of the unit. unit: "step", "s" (seconds) or "epoch"."""

    number: float
    unit: str = "step"

    def steps(self, steps_per_epoch: int) -> int:
        """Return the interval in steps, at least one; 0 if it counts seconds, or is 0."""
        steps = int(self.number * {"step": 1, "epoch": steps_per_epoch, "s": 0}[self.unit])
        return max(steps, 1) if self.number > 0 and self.unit != "s" else steps

    def ends_at(self, step: int, steps_per_epoch: int) -> bool:
        """Return whether an interval that counts steps or epochs ends at this step."""
        every = self.steps(steps_per_epoch)
        return every > 0 and step % every == 0

    def has_passed(self, seconds: float) -> bool:
        """Return whether an interval that counts seconds has passed."""
        return self.unit == "s" and seconds >= self.number

    def __str__(self) -> str:
        return f"{self.number:g}{self.unit}"

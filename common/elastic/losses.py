"""Losses of members in a row, without a further step: too many end an elastic job, which would never end."""

import itertools
import signal
import statistics
from dataclasses import dataclass, field

from common.elastic import crash

_MOST = 20  # losses in a row that end the job: machines may be lost many times in a long step
_TOGETHER = 1.0  # seconds: losses of one generation count once, and of those before it has begun


@dataclass
class _Loss:
    """Members that were lost together. at: time.monotonic(). members: the rank and the reason of each."""

    at: float
    members: list[tuple[str, str]] = field(default_factory=list)

    def is_crash(self) -> bool:
        """Return whether all members have crashed: after another loss a library may abort in the others."""
        return all(crash.is_crash(reason) for _, reason in self.members)


class Losses:
    """The losses in a row, while no generation begins after a further step than any before."""

    def __init__(self) -> None:
        self._losses: list[_Loss] = []
        self._counted = 0  # of them: those before the last begin of a generation
        self._furthest = -1  # the last step after which a generation has begun

    def add(self, who: str, reason: str, now: float) -> tuple[int, str] | None:
        """Add the loss of a member, and return the exit code and the line with which the job ends, if too
        many generations in a row are lost before they begin. now: time.monotonic()."""
        # a node dies with several members: they are one loss
        if len(self._losses) == self._counted or now - self._losses[-1].at > _TOGETHER:
            self._losses.append(_Loss(now))
        self._losses[-1].members.append((who, reason))
        is_begun = self._furthest >= 0
        place = f"after step {self._furthest}, before another one" if is_begun else "before its first step"
        return _find_end(self._losses[self._counted :], place)

    def begin(self, step: int, has_survivors: bool) -> tuple[int, str] | None:
        """Note that a generation has begun after `step`, and return the exit code and the line with which the
        job ends. has_survivors: it has members of the one before; else it has loaded a checkpoint."""
        if step > self._furthest:  # the losses before the last begin were in an earlier step
            self._losses = self._losses[self._counted :]
            self._furthest = step
        self._counted = len(self._losses)
        is_known = has_survivors and step == self._furthest
        return _find_end(self._losses, f"in step {step + 1}" if is_known else f"after step {self._furthest}")


def _find_end(losses: list[_Loss], place: str) -> tuple[int, str] | None:
    """Return the exit code and the line with which the job ends after these losses; None if it continues."""
    # a crash comes again in the same step, so few are enough
    crashes = [*itertools.takewhile(_Loss.is_crash, reversed(losses))]  # the newest first
    if len(crashes) >= crash.MOST:
        who, reason = crashes[0].members[0]
        number = crash.SIGNALS[reason.partition(" ")[0]]
        return 128 + number, crash.describe(who, reason, place, len(crashes))
    if len(losses) < _MOST:
        return None
    # a step that needs longer than the time between two losses never ends
    every = statistics.median(later.at - earlier.at for earlier, later in itertools.pairwise(losses))
    return 128 + signal.SIGKILL, (
        f"processes were lost {len(losses)} times in a row {place}, every {every:.1f} s (median): the job "
        "ends; a step and its new generation must be shorter than this time: use more processes, or look for "
        "what ends them, such as a lack of memory (dmesg -T)"
    )

"""Compute steps of an old run again, and compare them with what it has recorded: `launch audit`.

An interval is what lies between two states that the run has kept. Its steps are computed from the first state
by the same job, with the options of the run, in a folder of their own. The samples of each step and each
recorded digest of a state are compared, that of the second state too.
"""

import contextlib
import dataclasses
import math
import os
import random
import tempfile
from collections.abc import Iterator, Sequence

from bootfile.console import outputs
from bootfile.exact import digest_lines, files
from bootfile.exact.forked import Differs
from bootfile.ground.errors import BadInput, print_line
from bootfile.ground.exit_codes import DIFFERS, UNVERIFIED
from bootfile.history import compute
from bootfile.history.parent import Parent, read_starts
from bootfile.receipt import origins


@dataclasses.dataclass
class Interval:
    """Steps that can be computed from a state. before: the step of the state. last: the last step.

    states: digests of the run in it, that of `last` too. difference: the first one, in words; "" without one;
    None if it was not computed. again: the difference when it was computed a second time, after a first one.
    altered: how the state before its steps is not the one that the run recorded, in words, or "".
    code: how the commit of the script is not that of the run, in words, or "".
    """

    before: int
    last: int
    states: int
    difference: str | None = None
    again: str | None = None
    altered: str = ""
    code: str = ""

    @property
    def cause(self) -> str:
        """Return what may have caused its difference, in words; "" without one."""
        # the most certain one first: a file that was altered needs no other explanation
        if self.altered:
            return self.altered
        if not self.difference:
            return ""
        if self.again == self.difference:
            text = (
                "the same difference twice: an error of the hardware of the run, a file that was altered, "
                "code or data that changed, or another kind of machine; not an error of this machine now"
            )
            if self.code:
                text += f". {self.code}"
            return text
        if not self.again:
            return "equal when it was computed again: an error of this machine, the first time"
        return f"another difference when it was computed again, so this machine has errors: {self.again}"

    def __str__(self) -> str:
        return f"steps {self.before + 1}-{self.last}"


def find_intervals(folder: str) -> list[Interval]:
    """Return the intervals of a run, in order. Only whole checkpoints count. Raises BadInput."""
    known = read_starts(folder)
    digests = digest_lines.read(folder)
    begins = [0]
    if origins.parent_of(known) or min(start["step"] for start in known) > 0:
        begins = []  # its first state is that of another run
    for path in reversed(files.list_newest_first(os.path.join(folder, "checkpoints"))):
        with contextlib.suppress(files.Refused):
            files.verify(path)
            begins.append(files.step_of(path))
    last = max([0, *digests, *begins])
    intervals = []
    # from each state to the next one, and from the last one to the last recorded step
    for place, before in enumerate(begins):
        end = last
        if place + 1 < len(begins):
            end = begins[place + 1]
        if end > before:
            states = sum(1 for step in digests if before < step <= end)
            intervals.append(Interval(before, end, states))
    if not intervals:
        raise BadInput(
            f"{folder} has no state from which steps can be computed, and a later record of a state"
        )
    return intervals


def draw(intervals: Sequence[Interval], share: float, seed: int) -> list[Interval]:
    """Return a share of the intervals, at least one, in order."""
    count = max(1, math.ceil(share * len(intervals)))
    drawn = random.Random(seed).sample(range(len(intervals)), min(count, len(intervals)))
    return [intervals[place] for place in sorted(drawn)]


def choose(intervals: Sequence[Interval], first: int, last: int, folder: str) -> list[Interval]:
    """Return the intervals that have a step of first..last, the last one cut after `last`. Raises
    BadInput."""
    chosen = []
    for interval in intervals:
        if interval.last >= first and interval.before < last:
            end = min(interval.last, last)
            states = sum(1 for step in digest_lines.read(folder) if interval.before < step <= end)
            chosen.append(Interval(interval.before, end, states))
    if not chosen:
        begin = intervals[0].before + 1
        raise BadInput(f"--steps {first}-{last}: {begin}-{intervals[-1].last} of {folder} can be computed")
    return chosen


def audit(
    folder: str,
    chosen: Sequence[Interval],
    keep: str | None,
    job: str | None,
    processes: int | None,
    options: Sequence[str],
) -> None:
    """Compute intervals of a run again, print a line for each, and set its `difference`.

    keep: a new folder for the steps; None: a temporary one. job: the script, if it is not where it was.
    processes: their number, if it may be another one. options: words for the job. Raises BadInput.
    """
    with _place(keep) as place:
        for interval in chosen:
            parent = Parent(folder, interval.last, interval.before)
            # the run may still train, and delete old states
            if parent.state != interval.before:
                raise BadInput(f"the state of step {interval.before} of {folder} is gone")
            script = job or str(parent.start.get("script", ""))
            if not os.path.isfile(script):
                raise BadInput(f"{script}: no such file: name the job of the run with --job FILE")
            size = processes or parent.world_size
            is_exact = parent.settings.get("exact_shards") is not None
            if size != parent.world_size and not is_exact:
                raise BadInput(
                    f"--processes {size}: {folder} had {parent.world_size} in these steps, and without "
                    "--exact_shards sums are rounded differently"
                )
            results = os.path.join(place, f"steps-{interval.before + 1}-{interval.last}")
            # first: steps that are computed from a changed state differ, and the machine is not to blame
            interval.altered = parent.find_alteration()
            interval.code = parent.compare_code(script)
            interval.difference = _compute(parent, results, script, size, options)
            if interval.difference and not interval.altered:  # an error of this machine does not come twice
                interval.again = _compute(parent, f"{results}-again", script, size, options)
            print_line(f"{interval}: {interval.difference or _describe_equal(interval)}")
            if interval.cause:
                print_line(f"{interval}: {interval.cause}")


def _compute(parent: Parent, folder: str, script: str, processes: int, options: Sequence[str]) -> str:
    """Compute steps again in a folder, and return the first difference in words; "" without one. Raises
    BadInput."""
    try:
        compute.compute(parent, folder, script, processes, options)
    except Differs as difference:
        return str(difference)
    return ""


def conclude(chosen: Sequence[Interval], every: Sequence[Interval]) -> tuple[str, int]:
    """Return the verdict in words, and the exit code. every: all intervals of the run."""
    different = [interval for interval in chosen if interval.difference or interval.altered]
    states = sum(interval.states for interval in chosen)
    share = find_share(chosen, every)
    if different:
        first = different[0]
        text = f"differs: {len(different)} of {len(chosen)} intervals, first {first}: {first.cause}"
        return text, DIFFERS
    # equal samples alone do not show that the bits are the same
    if not states:
        return (
            "unverified: the run has recorded no state in these steps: only samples were compared",
            UNVERIFIED,
        )
    text = (
        f"equal: {len(chosen)} of {len(every)} intervals, {_count(states)}. They have {share:.1%} of the "
        "steps: so likely is it that they would show a fault in one step"
    )
    return text, 0


def find_share(chosen: Sequence[Interval], every: Sequence[Interval]) -> float:
    """Return the share of the steps that can be computed again and were."""
    total = sum(interval.last - interval.before for interval in every)
    return sum(interval.last - interval.before for interval in chosen) / total


def _describe_equal(interval: Interval) -> str:
    return f"equal: the samples of each step, and {_count(interval.states)}"


def _count(states: int) -> str:
    if states == 1:
        return "1 state"
    return f"{states} states"


@contextlib.contextmanager
def _place(keep: str | None) -> Iterator[str]:
    if keep:
        outputs.make_empty(keep)
        yield os.path.abspath(keep)
        return
    with tempfile.TemporaryDirectory(prefix="bootfile-audit-") as folder:
        yield folder

"""Compute steps of an old run again, and compare them with what it has recorded: `launch audit`.

An interval is what lies between two states that the run has kept. Its steps are computed from the first state
by the same job, with the options of the run, in a folder of their own. The samples of each step and each
recorded digest of a state are compared, that of the second state too.
"""

import dataclasses
import itertools
import math
import os
import random
import tempfile
from collections.abc import Callable, Sequence

from bootfile.console import outputs
from bootfile.exact import files, recorded
from bootfile.exact.forked import Differs
from bootfile.ground.errors import BadInput, print_line
from bootfile.ground.exit_codes import DIFFERS, UNVERIFIED
from bootfile.ground.numbers import counted
from bootfile.ground.results import CHECKPOINTS
from bootfile.histories import parent_of, read_states, read_weights
from bootfile.history import compute
from bootfile.history.parent import NOT_THE_SAME, Parent, describe_steps, read_starts_of_job


@dataclasses.dataclass
class Interval:
    """Steps that can be computed from a state."""

    before: int  # the step of the state
    last: int  # the last step
    # audit() sets the others:
    states: int = 0  # the number of states that the run has recorded, that of `last` included
    samples: int = 0  # the number of steps whose samples the run has recorded
    unknown: str = ""  # the steps whose samples the run has not recorded, such as "11-20"
    difference: str | None = None  # the first difference in words; "" without one
    again: str | None = None  # the difference when it was computed a second time, after a first difference
    changes: str = ""  # what was not as in the run when it was computed (Parent.find_changes())

    @property
    def cause(self) -> str:
        """Return what may have caused its difference, in words; "" without one."""
        if not self.difference:
            return ""
        # hardware is named last: two results on one machine, with the same code, data, engine and options
        if self.changes:
            return f"not as in the run: {self.changes}"
        if self.again == self.difference:
            return (
                "the same difference twice, with all that the run has recorded: an error of the hardware of "
                "the run, or a record that was altered; not an error of this machine now"
            )
        if not self.again:
            return "equal when it was computed again: an error of this machine, the first time"
        return f"another difference when it was computed again, so this machine has errors: {self.again}"

    def __str__(self) -> str:
        return f"steps {self.before + 1}-{self.last}"


@dataclasses.dataclass
class Records:
    """What a run has kept. intervals: in order. altered: each kept file that is not the one that the run has
    recorded, with the reason."""

    intervals: list[Interval]
    altered: list[str]


def read_records(folder: str) -> Records:
    """Read the states and files of weights that a run has kept, and compare them with its records. Only
    states that are equal begin an interval. Raises BadInput, also for a damaged line in the records."""
    known = read_starts_of_job(folder, whole=True)
    altered = []

    def is_recorded(check: Callable[[str], object], path: str) -> bool:
        try:
            check(path)
        except files.Refused as reason:
            # the run may still train, and delete old states
            if os.path.exists(path):
                altered.append(f"{path}: {reason}")
            return False
        return True

    paths = reversed(files.list_newest_first(os.path.join(folder, CHECKPOINTS)))
    begins = [files.step_of(path) for path in paths if is_recorded(recorded.verify, path)]
    # a run that begins with the state of another run has no steps from 1 on
    if not parent_of(known) and not min(start["step"] for start in known):
        begins.insert(0, 0)
    for path in [os.path.join(folder, name) for name in sorted(read_weights(folder))]:
        if os.path.exists(path):
            is_recorded(recorded.check_weights, path)
    # from each state to the next one, and from the last one to the last recorded step
    ends = [*begins[1:], max([0, *read_states(folder, whole=True), *begins])]
    intervals = [Interval(*pair) for pair in zip(begins, ends, strict=False) if pair[0] < pair[1]]
    if not intervals:
        refusal = f"{folder} has no state from which steps can be computed, and a later record of a state"
        raise BadInput(": ".join([refusal, *altered]))
    return Records(intervals, altered)


def draw(intervals: Sequence[Interval], share: float, seed: int) -> list[Interval]:
    """Return a share of the intervals, at least one, in order."""
    count = max(1, math.ceil(share * len(intervals)))
    drawn = random.Random(seed).sample(range(len(intervals)), min(count, len(intervals)))
    return [intervals[place] for place in sorted(drawn)]


def choose(intervals: Sequence[Interval], steps: frozenset[int], folder: str) -> list[Interval]:
    """Return the intervals that have one of these steps, the last one cut after the last step. Raises
    BadInput."""
    last = max(steps)
    chosen = [
        Interval(interval.before, min(interval.last, last))
        for interval in intervals
        if not steps.isdisjoint(range(interval.before + 1, interval.last + 1))
    ]
    if not chosen:
        begin = intervals[0].before + 1
        shown = f"--steps {describe_steps(steps)}"
        raise BadInput(f"{shown}: {begin}-{intervals[-1].last} of {folder} can be computed")
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
    if keep:
        outputs.make_empty(keep)
        keep = os.path.abspath(keep)
    with tempfile.TemporaryDirectory(prefix="bootfile-audit-") as temporary:
        for interval in chosen:
            parent = Parent(folder, interval.last, interval.before)
            # the run may still train, and delete old states
            if parent.state != interval.before:
                raise BadInput(f"the state of step {interval.before} of {folder} is gone")
            script = parent.find_script(job)
            size = processes or parent.world_size
            if size != parent.world_size and not parent.is_exact:
                raise BadInput(
                    f"--processes {size}: {folder} had {parent.world_size} in these steps, and without "
                    "--exact_shards sums are rounded differently"
                )
            results = os.path.join(keep or temporary, f"steps-{interval.before + 1}-{interval.last}")
            interval.samples, interval.states = parent.compared
            interval.unknown = parent.unrecorded
            interval.difference, interval.changes = _compute(parent, results, script, size, options)
            if interval.difference and not interval.changes:  # an error of this machine does not come twice
                interval.again, _ = _compute(parent, f"{results}-again", script, size, options)
            equal = _describe(_name_compared(interval.samples, interval.states), interval.unknown)
            print_line(f"{interval}: {interval.difference or equal}")
            if interval.cause:
                print_line(f"{interval}: {interval.cause}")


def _compute(
    parent: Parent, folder: str, script: str, processes: int, options: Sequence[str]
) -> tuple[str, str]:
    """Compute steps again in a folder, and return the first difference in words, and what was not as in the
    run then; "" and "" without a difference. Raises BadInput."""
    try:
        compute.compute(parent, folder, script, processes, options)
    except Differs as difference:
        text, _, changes = str(difference).partition(NOT_THE_SAME)
        return text, changes
    return "", ""


def conclude(chosen: Sequence[Interval], records: Records) -> tuple[str, int]:
    """Return the verdict in words, and the exit code."""
    different = [interval for interval in chosen if interval.difference]
    reasons = [*records.altered]  # a file that was altered needs no other explanation
    if different:
        first = different[0]
        reasons.append(f"{len(different)} of {len(chosen)} intervals, first {first}: {first.cause}")
    if reasons:
        return f"differs: {'; '.join(reasons)}", DIFFERS
    states = sum(interval.states for interval in chosen)
    unknown = ",".join(filter(None, (interval.unknown for interval in chosen)))
    compared = _name_compared(sum(interval.samples for interval in chosen), states)
    if unknown:
        return _describe(compared, unknown), UNVERIFIED
    if not states:  # equal samples alone do not show that the bits are the same
        equal = compared and f"; equal: {compared}"
        return f"unverified: the run has recorded no state in these steps{equal}", UNVERIFIED
    text = (
        f"equal: {len(chosen)} of {len(records.intervals)} intervals, {compared}. They have "
        f"{find_share(chosen, records.intervals):.1%} of the steps: so likely is it that they would show a "
        "fault in one step"
    )
    return text, 0


def find_share(chosen: Sequence[Interval], every: Sequence[Interval]) -> float:
    """Return the share of the steps of all intervals that the chosen ones have."""
    total = sum(interval.last - interval.before for interval in every)
    return sum(interval.last - interval.before for interval in chosen) / total


def _name_compared(samples: int, states: int) -> str:
    """Return what was compared, in words: "the samples of 3 steps and 1 state"; "" if nothing was."""
    names = [f"the samples of {counted(samples, 'step')}", counted(states, "state")]
    return " and ".join(itertools.compress(names, (samples, states)))


def _describe(compared: str, unknown: str) -> str:
    """Return the result of steps without a difference. compared: as _name_compared(). unknown: as in an
    Interval."""
    if not unknown:
        return f"equal: {compared}"
    return f"not known: steps {unknown} have no record{compared and f'; equal: {compared}'}"

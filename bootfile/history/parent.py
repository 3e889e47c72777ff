"""An old run from which another one begins, or of which steps are computed again. It is only read."""

import contextlib
import itertools
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from bootfile.exact import checked_files, files, other_start, recorded
from bootfile.ground.errors import BadInput, print_line
from bootfile.ground.numbers import find_ranges, part_of
from bootfile.ground.results import CHECKPOINTS
from bootfile.histories import read_shards, read_states, start_of, world_size_of
from bootfile.machine.differences import find_differences, in_words
from bootfile.receipt.reading import read_records
from bootfile.receipt.records import PARTS
from bootfile.records import STARTS, read_starts

# between a difference and its causes, in the error of a program that computes steps again
NOT_THE_SAME = ". Not as in the run: "
# facts of a start on which no bit of a step depends; the processes are compared before the steps
_WITHOUT_EFFECT = {
    "job", "system", "device", "cores", "nodes", "processes per node", "world size", "backend",
}  # fmt: skip

_RANGE = re.compile(r"([1-9]\d{0,14})(?:-([1-9]\d{0,14}))?")
_MOST = 10**6  # steps


def parse_steps(option: str, text: str) -> frozenset[int]:
    """Return the steps in the value of an option: "400-420" or "7,400-420". Raises BadInput."""
    steps: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        chosen = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
        if not 0 < len(chosen) <= _MOST:
            raise BadInput(f"{option} {text}: expected steps such as 400-420 or 7,400-420, counted from 1")
        steps.update(chosen)
    return frozenset(steps)


def describe_steps(steps: Iterable[int]) -> str:
    """Return steps as a text that parse_steps() reads; "" without steps."""
    return ",".join(find_ranges(sorted(steps)))


def read_starts_of_job(folder: str, whole: bool = False) -> list[dict[str, Any]]:
    """Return the starts of a run of a job, at least one. whole: as for read_starts(). Raises BadInput."""
    known = read_starts(folder, whole)
    if not known:
        raise BadInput(f"{folder}: no run of a job there ({STARTS} is missing): expected its output folder")
    return known


class Parent:
    """The records in the output folder of a run of a job, up to a step.

    step: None for that of its newest state that can be read.
    newest: the last step whose checkpoint may be `state`; None: `step`.
    `state`, `path`: the step and the path of its newest checkpoint at or before `step`; 0 and "" without one.
    `start`: the line of starts.jsonl of the start that has made `step`, with its options in `settings`.
    Raises BadInput if the folder has no such run, or the run no such step.
    """

    def __init__(self, folder: str, step: int | None = None, newest: int | None = None):
        self.folder = os.path.realpath(folder)
        self._known = read_starts_of_job(self.folder)
        self._records: dict[int, np.ndarray] = {}  # step -> uint64 [3]
        with contextlib.suppress(BadInput):  # its steps have no record then, which is told
            records = read_records(self.folder)
            self._records = dict(zip(records["step"].tolist(), records["sums"], strict=True))
        self._digests = read_states(self.folder)
        # a start without --recheck may have computed the step again, and then its sums are old
        self._shards = {
            number: sums
            for number, sums in read_shards(self.folder).items()
            if start_of(self._known, number)["settings"].get("recheck")
        }
        paths = files.list_newest_first(os.path.join(self.folder, CHECKPOINTS))
        last = max([0, *self._records, *self._digests, *map(files.step_of, paths)])
        if step is not None and not 0 <= step <= last:
            raise BadInput(f"--at_step {step}: {folder} has the steps 1-{last}")
        if newest is None:
            newest = last if step is None else step
        self.path, self.state, self.run = self._find_state(paths, newest)
        if step is None and not self.path:
            raise BadInput(f"--from {folder}: no checkpoint can be used: name the step with --at_step N")
        self.step = self.state if step is None else step
        # a restart may have changed options: those of the start that made this step count
        self.start = start_of(self._known, max(1, self.step))

    def _find_state(self, paths: list[str], step: int) -> tuple[str, int, str]:
        """Return (path, step, run) of the newest whole checkpoint at or before a step; ("", 0, "") without
        one. A state that is damaged, or that the run has not recorded so, is printed and passed over."""
        for path in [path for path in paths if files.step_of(path) <= step]:
            try:
                return path, files.step_of(path), str(recorded.verify(path).get("run", ""))
            except files.Refused as reason:
                print_line(f"checkpoint refused: {path}: {reason}")
        return "", 0, ""

    @property
    def settings(self) -> dict[str, Any]:
        """Return the options of the start that has made `step`."""
        settings: dict[str, Any] = self.start["settings"]
        return settings

    @property
    def is_exact(self) -> bool:
        """Return whether its steps have the same bits at any number of processes."""
        return self.settings.get("exact_shards") is not None

    @property
    def world_size(self) -> int:
        """Return the number of processes of that start."""
        return world_size_of(self.start)

    def name_processes(self, count: int) -> list[str]:
        """Return the option for this number of processes, also for one, because the default is the number of
        GPUs. A job of one process does not have it."""
        is_known = count > 1 or "processes_per_node" in self.settings
        return [f"--processes_per_node={count}"] if is_known else []

    def find_script(self, job: str | None) -> str:
        """Return the script of the run. job: where it is now, if it was moved. Raises BadInput."""
        script = job or str(self.start.get("script", ""))
        if not os.path.isfile(script):
            raise BadInput(f"{script}: no such file: name the job of the run with --job FILE")
        return script

    @property
    def points(self) -> list[int]:
        """Return the steps after `state` whose state can be compared, and `step`, for the receipt."""
        return [number for number in sorted({*self._digests, self.step}) if self.state < number <= self.step]

    @property
    def skipped(self) -> list[int]:
        """Return the steps up to `step` that the run has left out."""
        return [step for step, sums in self._records.items() if step <= self.step and not sums.any()]

    @property
    def unrecorded(self) -> str:
        """Return the steps after `state` whose samples the receipt does not have, such as "11-20"."""
        return describe_steps({*range(self.state + 1, self.step + 1)} - self._records.keys())

    @property
    def compared(self) -> tuple[int, int]:
        """Return the numbers of steps whose samples are compared, and of states."""
        steps = range(self.state + 1, self.step + 1)
        return len(self._records.keys() & steps), len(self._digests.keys() & steps)

    def read_code(self) -> dict[str, str]:
        """Return the digests of the modules with which the run has made the steps after `state`; {}
        if no checkpoint has them."""
        # a checkpoint after these steps is of the start that made them; that of `state` may be of another one
        paths = reversed(files.list_newest_first(os.path.join(self.folder, CHECKPOINTS)))
        later = [path for path in paths if files.step_of(path) > self.state]
        for path in filter(None, [*later, self.path]):
            with contextlib.suppress(files.Refused):
                if modules := checked_files.read(path, whole=False).get("code"):
                    return dict(modules)
        return {}

    def find_changes(self, now: Mapping[str, Any]) -> list[str]:
        """Return in words what differs between the start of the old run that made the steps and this start,
        the most likely cause first; [] if all that is recorded is the same.

        now: "modules", as program.digest_modules(), and as in starts.jsonl: "code" (the commit), "training
        data", "data backend", "settings" (those that may change the training) and "environment".
        """
        changes = []
        modules = self.read_code()
        if changed_code := other_start.describe_changes(modules, now["modules"]):
            changes.append(changed_code)
        # (name, value in the run, value here); the commits are compared in place of unknown modules
        facts = [] if modules else [("commit", self.start.get("code"), now["code"])]
        for name in ("training data", "data backend"):
            facts.append((name, self.start.get(name) or now[name], now[name]))
        for name, here in now["settings"].items():
            facts.append((f"--{name}", self.settings.get(name, here), here))
        changes += [f"{name} {old} in the run, {new} here" for name, old, new in facts if old != new]
        differences = find_differences(self.start["environment"], now["environment"])
        return changes + [
            f"{in_words(name, old)} in the run, {in_words(name, new)} here"
            for name, old, new in differences
            if name not in _WITHOUT_EFFECT
        ]

    def check(self, folder: str, step: int, line: dict[str, Any]) -> str:
        """Return the first difference of the steps that were computed again up to a step, in words, or "".

        folder: of the receipt with these steps. line: the digest of the state after them.
        """
        title = f"the steps {self.state + 1}-{self.step} of {self.folder} were computed again, and differ:"
        now = read_records(folder)
        for record in now[(now["step"] > self.state) & (now["step"] <= step)]:
            number = int(record["step"])
            # a step without a record, as of a run whose receipt was deleted, cannot differ
            is_other = self._records.get(number, record["sums"]) != record["sums"]
            for part in itertools.compress(PARTS, is_other):
                return f"{title} step {number} had other samples ({part}): data or code changed"
        known = self._digests.get(step)
        changed = recorded.describe_change(known, line) if known else ""
        shards, shards_differ = self._compare_shards(folder, step)
        if not changed and not shards_differ:
            return ""
        result = f"another one ({changed})" if changed else "the same"
        state = f"the state after step {step} is {result}" if known else ""
        # shards that differ are the earlier fact
        facts = filter(None, [shards, state] if shards_differ else [state, shards])
        return f"{title} {', and '.join(facts)}. Without the steps between: --at_step {self.state}"

    def _compare_shards(self, folder: str, step: int) -> tuple[str, bool]:
        """Return (the result in words; "" if the shards cannot be compared, whether shards of a step up to
        `step` had other gradients). folder: of the steps that were computed again."""
        steps = range(self.state + 1, step + 1)
        now = read_shards(folder)
        both = sorted({*steps} & now.keys() & self._shards.keys())
        both = [number for number in both if len(now[number]) == len(self._shards[number])]
        for number in both:
            pairs = enumerate(zip(self._shards[number], now[number], strict=True))
            if shards := [shard for shard, (old, new) in pairs if old != new]:
                return f"{self._name_shards(number, shards)} had other gradients", True
        # a step that could not be compared may have differed
        if len(both) < len(steps):
            return "", False
        return f"all shards of the steps {self.state + 1}-{step} had the same gradients", False

    def _name_shards(self, step: int, shards: list[int]) -> str:
        """Return shards of a step in words, with the ranks that have computed them in the old run."""
        count = len(self._shards[step])
        if len(shards) == count:
            return f"all {count} shards of step {step}"
        start = start_of(self._known, step)
        size = world_size_of(start)
        names = [str(shard) for shard in shards]
        if not start["settings"].get("elastic"):  # its processes come and leave within a start
            ranks = {shard: rank for rank in range(size) for shard in part_of(count, rank, size)}
            names = [f"{shard} (rank {ranks[shard]} of {size})" for shard in shards]
        return f"{'shards' if len(names) > 1 else 'shard'} {', '.join(names)} of step {step}"

"""An old run from which another one begins, or of which steps are computed again. It is only read."""

import os
from typing import Any

import numpy as np

from bootfile.exact import digest_lines, files, recorded
from bootfile.ground.errors import BadInput, print_line
from bootfile.ground.numbers import part_of
from bootfile.history import ranges
from bootfile.receipt import origins, shard_lines, starts
from bootfile.receipt.reading import read_records
from bootfile.receipt.records import PARTS


def read_starts(folder: str) -> list[dict[str, Any]]:
    """Return the starts of a run of a job, at least one. Raises BadInput."""
    known = [start for start in starts.read(folder) if isinstance(start.get("step"), int)]
    if not known:
        raise BadInput(
            f"--from {folder}: no run of a job there ({starts.FILE} is missing): expected its output folder"
        )
    return known


def _find_world_size(start: dict[str, Any]) -> int:
    """Return the number of processes of a start."""
    size = start["environment"].get("world size", 1)
    return size if isinstance(size, int) else 1


class Parent:
    """The records in the output folder of a run of a job, up to a step.

    step: None for that of its newest state that can be read.
    newest: the last step whose checkpoint may be `state`; None: `step`.
    `state`, `path`: the step and the path of its newest checkpoint at or before `step`; 0 and "" without one.
    `start`: the line of starts.jsonl of the start that has made `step`.
    Raises BadInput if the folder has no such run, or the run no such step.
    """

    def __init__(self, folder: str, step: int | None = None, newest: int | None = None):
        self.folder = os.path.realpath(folder)
        known = read_starts(self.folder)
        self._records = self._read_records()  # step -> uint64 [3]
        self._digests = digest_lines.read(self.folder)
        self._known = known
        self._shards = self._read_shards()
        checkpoints = os.path.join(self.folder, "checkpoints")
        paths = files.list_newest_first(checkpoints)
        last = max([0, *self._records, *self._digests, *map(files.step_of, paths)])
        if step is not None and not 0 <= step <= last:
            raise BadInput(f"--at_step {step}: {folder} has the steps 1-{last}")
        if newest is None:
            newest = step if step is not None else last
        # this verifies files until one is right: a state that is damaged, or that the run has not recorded
        # so, is passed over, and printed
        self.path, self.state, self.run = self._find_state(paths, newest)
        if step is None and not self.path:
            raise BadInput(f"--from {folder}: no checkpoint can be used: name the step with --at_step N")
        self.step = self.state
        if step is not None:
            self.step = step
        # a restart may have changed options: those of the start that made this step count
        self.start = origins.start_of(known, max(1, self.step))

    def _read_records(self) -> dict[int, np.ndarray]:
        try:
            records = read_records(self.folder)
        except BadInput:  # nothing is compared
            return {}
        return dict(zip(records["step"].tolist(), records["sums"], strict=True))

    def _find_state(self, paths: list[str], step: int) -> tuple[str, int, str]:
        """Return (path, step, run) of the newest whole checkpoint at or before a step; ("", 0, "") without
        one."""
        for path in paths:
            if files.step_of(path) > step:
                continue
            try:
                facts = recorded.verify(path)
            except files.Refused as reason:
                print_line(f"checkpoint refused: {path}: {reason}")
                continue
            return path, files.step_of(path), str(facts.get("run", ""))
        return "", 0, ""

    @property
    def settings(self) -> dict[str, Any]:
        """Return the options of the start that has made `step`."""
        settings: dict[str, Any] = self.start["settings"]
        return settings

    @property
    def world_size(self) -> int:
        """Return the number of processes of that start."""
        return _find_world_size(self.start)

    @property
    def points(self) -> list[int]:
        """Return the steps after which the state can be compared, from the one after `state` on, and `step`,
        for the receipt."""
        points = [number for number in self._digests if self.state < number <= self.step]
        if self.step > self.state:
            points.append(self.step)
        return sorted(set(points))

    @property
    def skipped(self) -> list[int]:
        """Return the steps up to `step` that the run has left out."""
        return [step for step, sums in self._records.items() if step <= self.step and not sums.any()]

    @property
    def unrecorded(self) -> str:
        """Return the steps from the one after `state` to `step` whose samples the receipt does not have, such
        as "11-20"; "" without any."""
        steps = range(self.state + 1, self.step + 1)
        return ranges.describe(step for step in steps if step not in self._records)

    @property
    def compared(self) -> tuple[int, int]:
        """Return the numbers of steps whose samples are compared, and of states."""
        steps = [number for number in self._records if self.state < number <= self.step]
        states = [number for number in self._digests if self.state < number <= self.step]
        return len(steps), len(states)

    def read_code(self) -> dict[str, str]:
        """Return the digests of the modules with which the run has made the steps after `state` (code.py); {}
        if no checkpoint has them."""
        # a checkpoint after these steps is of the start that made them; that of `state` may be of another one
        paths = reversed(files.list_newest_first(os.path.join(self.folder, "checkpoints")))
        for path in [*(path for path in paths if files.step_of(path) > self.state), self.path]:
            if not path:
                continue
            try:
                code = files.read(path, whole=False).get("code")
            except files.Refused:
                continue
            if code:
                return dict(code)
        return {}

    def check(self, folder: str, step: int, line: dict[str, Any]) -> str:
        """Return the first difference of the steps that were computed again up to a step, in words, or "".

        folder: of the receipt with these steps. line: the digest of the state after them.
        """
        now = read_records(folder)
        for record in now[(now["step"] > self.state) & (now["step"] <= step)]:
            number = int(record["step"])
            sums = self._records.get(number)
            # a step without a record, as of a run whose receipt was deleted, cannot differ
            if sums is None or np.array_equal(sums, record["sums"]):
                continue
            for part, before, after in zip(PARTS, sums, record["sums"], strict=True):
                if before != after:
                    return f"{self._title} step {number} had other samples ({part}): data or code changed"
        changed = self._find_changed(step, line)
        shards, shards_differ = self._compare_shards(folder, step)
        if not changed and not shards_differ:
            return ""
        facts = []
        if changed:
            facts.append(f"the state after step {step} is another one ({changed})")
        elif step in self._digests:
            facts.append(f"the state after step {step} is the same")
        if shards_differ:  # the earlier one
            facts.insert(0, shards)
        elif shards:
            facts.append(shards)
        return f"{self._title} {', and '.join(facts)}. Without the steps between: --at_step {self.state}"

    def _read_shards(self) -> dict[int, list[int]]:
        """Return the sums of the shards by step, of the steps whose start has recorded them: a start without
        --recheck may have computed steps of an earlier one again."""
        recorded = {}
        for step, sums in shard_lines.read(self.folder).items():
            if origins.start_of(self._known, step)["settings"].get("recheck"):
                recorded[step] = sums
        return recorded

    def _compare_shards(self, folder: str, step: int) -> tuple[str, bool]:
        """Return the first step up to `step` in which shards had other gradients, and the shards, in words;
        "" without a comparison. And whether there is such a step. folder: of the steps that were computed
        again."""
        compared = []
        for number, sums in shard_lines.read(folder).items():
            before = self._shards.get(number)
            is_wanted = self.state < number <= step
            if not is_wanted or before is None or len(before) != len(sums):
                continue
            compared.append(number)
            different = [shard for shard in range(len(sums)) if sums[shard] != before[shard]]
            if different:
                return f"{self._name_shards(number, different, len(sums))} had other gradients", True
        # a step without a record may be the one
        if compared == list(range(self.state + 1, step + 1)):
            return f"all shards of the steps {self.state + 1}-{step} had the same gradients", False
        return "", False

    def _name_shards(self, step: int, shards: list[int], count: int) -> str:
        """Return shards of a step in words, with the ranks that have computed them in the old run."""
        if len(shards) == count:
            return f"all {count} shards of step {step}"
        word = "shard" if len(shards) == 1 else "shards"
        start = origins.start_of(self._known, step)
        if start["settings"].get("elastic"):  # its processes come and leave within a start
            return f"{word} {', '.join(map(str, shards))} of step {step}"
        size = _find_world_size(start)
        names = []
        for rank in range(size):
            part = part_of(count, rank, size)
            of_rank = [str(shard) for shard in shards if shard in part]
            if of_rank:
                names.append(f"{', '.join(of_rank)} (rank {rank} of {size})")
        return f"{word} {' and '.join(names)} of step {step}"

    def _find_changed(self, step: int, line: dict[str, Any]) -> str:
        """Return which parts of a state differ from those recorded after a step, in words; "" if none does,
        or if nothing comparable was recorded. line: the digest of the state."""
        known = self._digests.get(step)
        return "" if known is None else recorded.describe_change(known, line)

    @property
    def _title(self) -> str:
        return f"the steps {self.state + 1}-{self.step} of {self.folder} were computed again, and differ:"

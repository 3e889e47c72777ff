"""The records of a run: the steps of its receipt, its starts, and the order of its samples."""

import itertools
import operator
import os
from typing import Any

import numpy as np

from bootfile.ground.errors import BadInput
from bootfile.ground.numbers import part_of
from bootfile.histories import start_of
from bootfile.receipt.reading import read_records
from bootfile.receipt.receipt import batch_sums
from bootfile.receipt.records import PARTS
from bootfile.records import STARTS, read_starts
from bootfile.sampling.removal import read_removed
from bootfile.sampling.sampler import BatchSampler, WholeBatchSampler

_SAMPLERS: dict[str, type[BatchSampler]] = {kind.__name__: kind for kind in (BatchSampler, WholeBatchSampler)}


class Run:
    """The records in the output folder of a run.

    `records`: of its receipt. `starts`: lines of starts.jsonl. `removed`: the ids that its batches lack.
    Raises BadInput, also if a line of starts.jsonl cannot be read: the rank of a sample would be wrong.
    """

    def __init__(self, folder: str):
        self.folder = folder
        self.views = 1  # of each sample in a batch
        self.path = os.path.join(folder, STARTS)
        self.records = read_records(folder)
        self.starts = read_starts(folder, whole=True)
        if not self.starts:  # the ids of a step follow from the seed, which only a start has
            raise BadInput(f"{self.path} has no start that can be read: seed and world size are unknown")
        self.removed = read_removed(folder)  # int64 [n]
        self.first, self.last = self.records["step"][[0, -1]].tolist()
        self._left_out = {*self.records["step"][~self.records["sums"].any(axis=1)].tolist()}

    def start_of(self, step: int) -> dict[str, Any]:
        """Return the start that made a step."""
        return start_of(self.starts, step)

    def ranks(self, sampler: BatchSampler, step: int) -> np.ndarray:
        """Return the rank of each sample of a step, int64 [n], in the order of ids(). Raises BadInput."""
        ids = sampler.batch(step - 1)
        start = self.start_of(step)
        size = start["environment"].get("world size")
        if not isinstance(size, int) or size < 1:
            raise BadInput(f"{self.path}: the world size of a start is {size!r}")
        # as BatchSampler.split(): the batch is divided among shards, and these among the ranks
        shards = start["settings"].get("exact_shards") or size
        counts = [len(part_of(shards, rank, size)) * len(ids) // shards for rank in range(size)]
        return np.repeat(np.arange(size), counts)[np.isin(ids, self.removed, invert=True)]

    def check(self, step: int, sums: np.ndarray) -> None:
        """Raise BadInput if the receipt has no such step, or other sums of the first PARTS."""
        recorded = self.records[self.records["step"] == step]
        if not len(recorded):
            raise BadInput(f"{self.folder} has no step {step}: its receipt has {self.first}-{self.last}")
        if self.is_left_out(step):
            raise BadInput(f"step {step} of {self.folder} was {self.name_left_out()}: it has no samples")
        for part, before, now in zip(PARTS, recorded["sums"][0], sums.view("u8"), strict=False):
            if before != now:
                changed = f"{part} {before:016x}, and now {now:016x}: data, options or code changed"
                raise BadInput(f"the receipt of {self.folder} has another digest for step {step}: {changed}")

    def is_left_out(self, step: int) -> bool:
        """Return whether the run has left out a step (--skip_steps), or all samples of it (--without)."""
        return step in self._left_out

    def name_left_out(self) -> str:
        """Return "left out" and, in brackets, the options that may be the reason, for an error message."""
        reason = ", or --without has all its samples" if len(self.removed) else ""
        return f"left out (--skip_steps{reason})"

    def sampler(self, step: int, weights: np.ndarray | None = None) -> BatchSampler:
        """Return the batch sampler of all ranks, whose next and last batch is that of a step. Raises
        BadInput."""
        facts = self.start_of(step).get("sampling") or {}
        if facts.get("weighted") and weights is None:
            raise BadInput(f"{self.folder} drew its samples with weights: expected --step N of imagenet.py")
        try:
            # the line may be of another version, or edited: a value of another type ends in the error below
            kind = _SAMPLERS[facts["sampler"]]
            sampler = kind(
                operator.index(facts["samples"]),
                operator.index(facts["global batch"]),
                operator.index(facts["seed"]),
                max_steps=step,
                epoch_steps=facts.get("epoch steps"),
                weights=weights,
            )
            self.views = operator.index(facts["views"])
            shuffle = bool(facts["shuffle"])
        except (KeyError, TypeError) as error:
            raise BadInput(f"{self.path} does not describe the order of the samples: {facts}") from error
        if isinstance(sampler, WholeBatchSampler):
            sampler.shuffle = shuffle
        sampler.seek(step - 1)
        return sampler

    def ids(self, sampler: BatchSampler, step: int) -> np.ndarray:
        """Return the ids of a step over all ranks, after they were compared with the receipt."""
        ids = self._take_rest(sampler.batch(step - 1))
        self.check(step, self.sum_ids(sampler, ids))
        return ids

    def sum_ids(self, sampler: BatchSampler, ids: np.ndarray) -> np.ndarray:
        """Return the receipt's sum of the ids of a step, int64 [1]."""
        images = np.concatenate([ids + view * sampler.size for view in range(self.views)])
        return batch_sums(images, images, (), np.array([len(images)]))[0, :1]

    def _take_rest(self, ids: np.ndarray) -> np.ndarray:
        return ids[np.isin(ids, self.removed, invert=True)]

    def find_steps(self, ids: np.ndarray, last: int) -> dict[int, np.ndarray]:
        """Return step -> ids, int64 [n], for the steps up to `last` to whose batches some of these samples
        belong, also if they were removed. Raises BadInput if a sample does not exist, or if samples were
        drawn with weights."""
        sampler = self.sampler(max(1, last))
        if len(ids) and ids.max() >= sampler.size:
            raise BadInput(f"sample {ids.max()} is not in 0..{sampler.size - 1}, those of {self.folder}")
        # computed for each sample and all epochs at once: nothing is searched
        epochs = np.arange(1, -(-last // len(sampler)) + 1)
        steps: dict[int, list[int]] = {}
        for id in ids.tolist():
            for step in (sampler.find(id, epochs) + 1).tolist():
                steps.setdefault(step, []).append(id)
        # step 0 stands for an epoch without the sample
        return {step: np.array(steps[step], np.int64) for step in sorted(steps) if 0 < step <= last}

    def find_uses(self, ids: np.ndarray, last: int) -> dict[int, np.ndarray]:
        """Return find_steps() without the steps that were left out, and without the samples that the run has
        removed itself."""
        steps = self.find_steps(np.setdiff1d(ids, self.removed), last)
        return {step: used for step, used in steps.items() if not self.is_left_out(step)}

    def sum_removed(self) -> dict[int, tuple[int, int]]:
        """Return the steps that lack samples: step -> (number of these, sum of their hashes as the receipt's
        sum of the ids). Raises BadInput."""
        sampler = self.sampler(self.last)
        removed = {}
        for step, ids in self.find_steps(self.removed, self.last).items():
            is_empty = len(ids) == len(sampler.batch(step - 1))  # --without took all of its samples
            was_skipped = self.is_left_out(step) and not is_empty  # by --skip_steps
            if not was_skipped:
                removed[step] = len(ids), int(self.sum_ids(sampler, ids).view("u8")[0])
        return removed

    def find_other_samples(self) -> int:
        """Return the first step that had other samples than those that follow from (seed, epoch, step); 0 if
        there is none. Raises BadInput if the records do not have what these follow from."""
        # each start has a line of facts of its own: the steps that it made are checked by these
        for _, records in itertools.groupby(self.records, lambda record: self.start_of(record["step"])):
            # the receipt may lack a step: it was deleted while the job ran. A sum of 0 was left out.
            known = {int(record["step"]): record["sums"][0] for record in records}
            sampler = self.sampler(max(known))
            step = min(known)
            while step <= max(known):
                sampler.seek(step - 1)
                for ids in sampler:  # to the end of the epoch
                    rest = self._take_rest(ids)
                    if known.get(step) and self.sum_ids(sampler, rest).view("u8")[0] != known[step]:
                        return step
                    step += 1
        return 0

"""The records of a run: the steps of its receipt, its starts, and the order of its samples."""

import itertools
import operator
import os
from typing import Any

import numpy as np

from bootfile.ground.errors import BadInput
from bootfile.ground.numbers import part_of
from bootfile.receipt import origins, starts
from bootfile.receipt.reading import read_records
from bootfile.receipt.receipt import batch_sums
from bootfile.receipt.records import PARTS
from bootfile.sampling.sampler import BatchSampler, WholeBatchSampler

_SAMPLERS: dict[str, type[BatchSampler]] = {kind.__name__: kind for kind in (BatchSampler, WholeBatchSampler)}


class Run:
    """The records in the output folder of a run: `records` of its receipt, and `starts`. Raises BadInput,
    also if a line of starts.jsonl cannot be read: the rank of a sample would be wrong."""

    def __init__(self, folder: str):
        self.folder = folder
        self.path = os.path.join(folder, starts.FILE)
        self.records = read_records(folder)
        known = starts.read(folder, whole=True)
        self.starts = [start for start in known if isinstance(start.get("step"), int)]
        if not self.starts:  # the ids of a step follow from the seed, which only a start has
            raise BadInput(f"{self.path} has no start that can be read: seed and world size are unknown")
        self.first, self.last = self.records["step"][[0, -1]].tolist()

    def start_of(self, step: int) -> dict[str, Any]:
        """Return the start that made a step: the last one before it, which made later steps again."""
        return origins.start_of(self.starts, step)

    def ranks(self, step: int, count: int) -> np.ndarray:
        """Return the rank of each of the `count` samples of a step, int64 [count]. Raises BadInput."""
        start = self.start_of(step)
        size = start["environment"].get("world size")
        if not isinstance(size, int) or size < 1:
            raise BadInput(f"{self.path}: the world size of a start is {size!r}")
        shards = start.get("settings", {}).get("exact_shards") or size
        counts = [len(part_of(shards, rank, size)) * count // shards for rank in range(size)]
        return np.repeat(np.arange(size), counts)

    def check(self, step: int, sums: np.ndarray) -> None:
        """Raise BadInput if the receipt has no such step, or other sums of the first PARTS."""
        recorded = self.records[self.records["step"] == step]
        if not len(recorded):
            raise BadInput(f"{self.folder} has no step {step}: its receipt has {self.first}-{self.last}")
        if self.is_left_out(step):
            raise BadInput(f"step {step} of {self.folder} was left out (--skip_steps): it has no samples")
        for part, before, now in zip(PARTS, recorded["sums"][0], sums.view("u8"), strict=False):
            if before != now:
                changed = f"{part} {before:016x}, and now {now:016x}: data, options or code changed"
                raise BadInput(f"the receipt of {self.folder} has another digest for step {step}: {changed}")

    def is_left_out(self, step: int) -> bool:
        """Return whether the run has left out a step (--skip_steps)."""
        recorded = self.records[self.records["step"] == step]
        return len(recorded) > 0 and not recorded["sums"].any()

    def sampler(self, step: int, weights: np.ndarray | None = None) -> BatchSampler:
        """Return the batch sampler of all ranks before a step, its last one. Raises BadInput."""
        facts = self.start_of(step).get("sampling") or {}
        if facts.get("weighted") and weights is None:
            raise BadInput(f"{self.folder} drew its samples with weights: expected --step N of imagenet.py")
        try:
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
        ids = sampler.batch(step - 1)
        self.check(step, self.sum_ids(sampler, ids))
        return ids

    def sum_ids(self, sampler: BatchSampler, ids: np.ndarray) -> np.ndarray:
        """Return the receipt's sum of the ids of a step, int64 [1]."""
        images = np.concatenate([ids + view * sampler.size for view in range(self.views)])
        return batch_sums(images, images, (), np.array([len(images)]))[0, :1]

    def find_other_samples(self) -> int:
        """Return the first step that had other samples than those of (seed, epoch, step), 0 if there is none.
        Raises BadInput if the records do not tell which these are."""

        def start_of(record: np.void) -> dict[str, Any]:
            return self.start_of(record["step"])

        for _, records in itertools.groupby(self.records, start_of):
            known = {int(record["step"]): record["sums"][0] for record in records}
            step = min(known)
            last = max(known)
            sampler = self.sampler(last)
            while step <= last:
                sampler.seek(step - 1)
                for ids in sampler:  # to the end of the epoch
                    # the receipt may lack a step: it was deleted while the job ran
                    is_known = step in known and known[step] != 0  # 0: it was left out
                    if is_known and self.sum_ids(sampler, ids).view("u8")[0] != known[step]:
                        return step
                    step += 1
        return 0

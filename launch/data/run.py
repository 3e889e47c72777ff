"""The records of a run: the steps of its receipt, its starts, and the order of its samples."""

import glob
import operator
import os
from typing import Any

import numpy as np

from common.ground.exits import BadInput
from common.run import output, starts
from datasets.folders import image_folder
from datasets.folders.image_folder import ImageFolderIndex
from datasets.sampling import receipt
from datasets.sampling.sampler import BatchSampler, WholeBatchSampler
from launch.report import runs

_SAMPLERS = {kind.__name__: kind for kind in (BatchSampler, WholeBatchSampler)}
_CAUSES = {  # part of the receipt: what can have changed
    "ids": "another seed, batch size or number of samples",
    "labels": "other labels or targets",
    "augmentation": "other options of the augmentation, or images of other sizes",
}


class Run:
    """The records in the output folder of a run.

    folder: that of the run.
    `records`: result of receipt.read().
    `starts`: lines of starts.jsonl.
    Raises BadInput, also if a line of starts.jsonl cannot be read: the process of a sample would be wrong.
    """

    def __init__(self, folder: str):
        if not os.path.isdir(folder):
            raise BadInput(f"no run at {folder}: not a folder")
        self.folder, self.records = folder, receipt.read(folder)
        known = starts.read(folder, whole=True)
        self.starts = [start for start in known if isinstance(start.get("step"), int)]
        if not self.starts:
            path = os.path.join(folder, starts.FILE)
            raise BadInput(f"{path} has no start that can be read: seed, options and world size are unknown")

    @property
    def last(self) -> int:
        """Return the last step of the receipt."""
        return int(self.records["step"][-1])

    def has(self, step: int) -> bool:
        """Return whether the receipt has a record of a step, counted from 1."""
        return bool((self.records["step"] == step).any())

    def start_of(self, step: int) -> dict:
        """Return the start that made a step: the last one that began before it, because a restart makes
        the steps after its checkpoint again."""
        return [start for start in self.starts if start["step"] < step or start is self.starts[0]][-1]

    def world_size(self, step: int) -> int:
        """Return the number of processes that made a step. Raises BadInput if it is not known."""
        size = self.start_of(step)["environment"].get("world size")
        if not isinstance(size, int) or size < 1:
            raise BadInput(f"{os.path.join(self.folder, starts.FILE)}: the world size of a start is {size!r}")
        return size

    def check(self, step: int, sums: np.ndarray) -> None:
        """Raise BadInput if the receipt has another digest for a step, or none. sums: uint64, of the first
        parts of receipt.PARTS, none of them to ask for the step only."""
        recorded = self.records[self.records["step"] == step]
        if not len(recorded):
            first = int(self.records["step"][0])
            raise BadInput(f"{self.folder} has no step {step}: its receipt has the steps {first}-{self.last}")
        for part, theirs, ours in zip(receipt.PARTS, recorded["sums"][0], sums, strict=False):
            if theirs != ours:
                raise BadInput(
                    f"the receipt of {self.folder} has another digest for step {step}: {part} {theirs:016x}, "
                    f"and now {ours:016x}: the data changed ({_CAUSES[part]})"
                )

    def sampler(self) -> tuple[Any, int]:
        """Return (the batch sampler of all ranks, views per sample). Raises BadInput."""
        facts = self.starts[-1].get("sampling") or {}
        if facts.get("weighted"):
            raise BadInput(f"{self.folder} drew its samples with weights: expected --step N or --around")
        try:
            numbers = [operator.index(facts[name]) for name in ("samples", "global batch", "seed", "views")]
            sampler = _SAMPLERS[facts["sampler"]](*numbers[:3])
        except (KeyError, TypeError) as error:
            path = os.path.join(self.folder, starts.FILE)
            raise BadInput(
                f"{path} does not describe the order of the samples: sampling is {facts}"
            ) from error
        if isinstance(sampler, WholeBatchSampler):
            sampler.shuffle = bool(facts["shuffle"])
        return sampler, numbers[3]

    def find_index(self, cache_dir: str | None) -> ImageFolderIndex | None:
        """Return the index of the run's images from `cache_dir`, or from the folders that the run used; None
        if there is none. Files are not compared with it."""
        fingerprint, *_ = (self.starts[-1].get("training data") or "").split("+")  # without that of weights
        given = cache_dir or self.starts[-1]["settings"].get("cache_dir")
        folders = [given, *(os.path.join(each, "index") for each in (self.folder, output.PARENT))]
        for folder in filter(None, folders):
            for path in sorted(glob.glob(os.path.join(glob.escape(folder), "train-*", "index.json"))):
                try:
                    index = image_folder.open_index(os.path.dirname(path))
                except BadInput:  # another one may be whole
                    continue
                if index.fingerprint == fingerprint:
                    return index
        return None

    def find_jump(self, around: int, count: int) -> tuple[str, list[int]]:
        """Return (a line about a jump of the loss, up to `count` steps that led to it).

        around: a step of it; 0: the largest increase from one report to the next. Raises BadInput.
        """
        read = runs.read(self.folder, self.folder)
        steps, losses = read.figures.get("loss", (np.zeros(0), np.zeros(0)))
        path = os.path.join(self.folder, runs.METRICS)
        if len(steps) < 2:
            damaged = "".join(f" ({note})" for note in read.notes if note.startswith(f"{runs.METRICS}:"))
            raise BadInput(f"{path} has {len(steps)} reports with a loss; expected at least 2{damaged}")
        if not around:  # a loss that is not finite is the greatest
            place = 1 + int(np.diff(np.nan_to_num(losses, nan=1e300, posinf=1e300)).argmax())
        elif 0 < around <= steps[-1]:
            place = int(np.searchsorted(steps, around))
        else:
            raise BadInput(f"{path} has no report of step {around}: the last one is of step {steps[-1]:.0f}")
        end, before = int(steps[place]), int(steps[place - 1]) if place else 0
        earlier = f"{losses[place - 1]:g} at step {before}" if place else "no report"
        line = f"loss {losses[place]:g} at step {end}, before it {earlier}"
        line += "" if around else ": the largest jump of the run"
        if end - before > 1:
            line += f"; it is the mean of the steps {before + 1}-{end}"
        recorded = [step for step in range(max(1, end - count + 1), end + 1) if self.has(step)]
        if not recorded:
            raise BadInput(f"{line}; the receipt has none of the {count} steps up to {end}")
        return line, recorded

"""--without FILE: a run whose batches never have some samples, from its first step on.

The other samples keep their batch, their crops and their seeds; sums and means are over what is left. A step
that has no sample left is left out, as one of --skip_steps. The ids are kept in OUT/removed.txt, and their
digest in each checkpoint: a restart with other ones is refused.

It takes a file of ids of the training set, and a Loader with a BatchSampler. The gradient of a step must be a
mean over its samples: one process, or exact shards. Outside are --evaluate, --elastic, --mixup, --cutmix and
--accumulate, and a state of another run that was trained with one of the samples.
"""

import argparse
import os
from typing import Any

import numpy as np

from bootfile.exact.state import RunState
from bootfile.ground.errors import BadInput
from bootfile.ground.numbers import counted
from bootfile.history.parent import Parent
from bootfile.processes import ranks
from bootfile.receipt import recorded_run
from bootfile.sampling.removal import (
    REMOVED,
    Removal,
    describe_removed,
    parse_ids,
    read_removed,
    write_removed,
)
from bootfile.sampling.sampler import BatchSampler

_REMOVED = "list of removed samples"  # a name in the identity
_REFUSED = ("evaluate", "elastic", "mixup", "cutmix", "accumulate")


def check(args: argparse.Namespace) -> None:
    """Raise BadInput for options that contradict --without."""
    for name in _REFUSED:
        value = vars(args).get(name)
        if value and (name != "accumulate" or value > 1):
            raise BadInput(
                f"--without: expected a training without --{name} {value}: each step is a mean over the "
                "samples that are left"
            )


class Without:
    """The samples that a run leaves out. The Checkpointer has one on each rank.

    path: of the file with their ids. loader: that of the training. forward: the module that the loop calls.
    `ids`: int64 [n], ascending. Raises BadInput if the job cannot leave them out exactly.
    """

    def __init__(self, path: str, loader: Any, forward: Any):
        self.ids = parse_ids("--without", path)
        self._loader = loader
        if ranks.world_size() > 1 and not hasattr(forward, "exact_shards"):
            raise BadInput(
                f"--without: with {ranks.world_size()} processes it needs --exact_shards (train_exact.py): "
                "otherwise the mean of a step is not over what is left; expected one process"
            )
        sampler = loader.plan.sampler
        if not isinstance(sampler, BatchSampler) or not hasattr(loader, "removal"):
            raise BadInput(
                "--without: expected a Loader with a BatchSampler, which knows the samples of each step, got "
                f"{type(sampler).__name__}"
            )
        # an id of another data set would remove nothing, and no error would tell it
        if self.ids[-1] >= sampler.size:
            raise BadInput(f"--without {path}: sample {self.ids[-1]} is not in 0..{sampler.size - 1}")
        loader.removal = Removal(self.ids)

    def takes_all(self, step: int) -> bool:
        """Return whether a step has no sample left."""
        return not any(self._loader.removal.count(self._loader.plan.sampler, step))

    def identify(self, state: RunState, parent: Parent | None = None) -> None:
        """Set which samples a checkpoint must lack to be loaded: those of this run, or if the run begins at a
        step of `parent`, those that the parent lacks. Called on rank 0 before a checkpoint is chosen, and
        without a parent on every rank after it was restored. Raises BadInput if the parent had one of the
        samples up to its step."""
        state.identity.pop(_REMOVED, None)
        expected = self._compare(parent) if parent else self.ids
        if len(expected):
            state.identity[_REMOVED] = describe_removed(expected)

    def write(self, folder: str) -> None:
        """Write the ids to the folder of the results, on rank 0."""
        os.makedirs(folder, exist_ok=True)
        write_removed(folder, self.ids)

    def _compare(self, parent: Parent) -> np.ndarray:
        """Return the samples that another run lacks, int64 [n]. Raises BadInput if it had one of ours."""
        has_list = parent.settings.get("without")
        before = read_removed(parent.folder) if has_list else np.zeros(0, np.int64)
        # the state was trained without these samples: they cannot come back in the middle of a run
        missing = np.setdiff1d(before, self.ids)
        if len(missing):
            raise BadInput(
                f"--without: {parent.folder} never had {counted(len(before), 'sample')}, and the list lacks "
                f"{_name(missing)} of them: add the ids of {os.path.join(parent.folder, REMOVED)}"
            )
        added = np.setdiff1d(self.ids, before)
        has_steps = len(added) and parent.step
        used = recorded_run.Run(parent.folder).find_uses(added, parent.step) if has_steps else {}
        if used:
            step = min(used)
            raise BadInput(
                f"--without: {_name(used[step])} is in step {step} of {parent.folder} already: begin at step "
                f"{step - 1} or before it (`launch replay` does), not at {parent.step}"
            )
        return before


def _name(ids: np.ndarray) -> str:
    """Return ids in words: "sample 17", "sample 17 and 3 more"."""
    return f"sample {ids[0]}" + (f" and {len(ids) - 1} more" if len(ids) > 1 else "")

"""What a job adds to the exact state in its checkpoints: its scores, and the weights it began with. Also the
names of the tensors in the files of weights that the scores choose."""

import contextlib
import math
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch

from bootfile.ground.errors import Unavailable
from bootfile.processes import ranks

BEST = "best.pth"
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")  # in names of tensors
_SAVED = ("best", "best_of", "highest", "epochs_not_better", "best_at", "validation_data")


class Scores:
    """The scores of a job's evaluations, the same on every rank.

    initial_weights: the file of weights with which the run began, or None.
    best, best_of: the score of best.pth, and the metric of which it is (Metrics.best_of).
    highest, epochs_not_better: the best score of all evaluations, and the evaluations since.
    best_at: the figure and the epoch of the best one, in words; "" without one.
    validation_data: the digest of the validation set of all these scores; "" if it is not known.
    """

    def __init__(self, initial_weights: str | None):
        self.initial_weights = initial_weights
        self.best = -math.inf
        self.best_of = ""
        self.highest = -math.inf
        self.epochs_not_better = 0
        self.best_at = ""
        self.validation_data = ""

    def note(self, score: float, best_of: str, text: str = "") -> None:
        """Record the score of an evaluation, and count the evaluations since the best one. text: for
        `best_at`. If the job named another metric before the restart, the best score is reset."""
        if best_of != self.best_of:
            self._forget()
            self.best_of = best_of
        if score > self.highest:
            self.highest = score
            self.best_at = text
            self.epochs_not_better = 0
        else:  # also a NaN
            self.epochs_not_better += 1

    def begin(self, validation_data: str) -> bool:
        """Continue with the validation set of this digest, the same on every rank, when the checkpoint is
        loaded. Return whether the restored scores are those of another set; then they are forgotten. "" if
        the set is not known: the scores and the digest stay, because a later start may know it again."""
        before = self.validation_data
        self.validation_data = validation_data or before
        is_other = before not in ("", self.validation_data)
        if is_other:
            self._forget()
        return is_other

    def _forget(self) -> None:
        """Forget the scores: the next evaluation is the best one, and early stopping counts from it."""
        self.best = -math.inf
        self.highest = -math.inf
        self.best_at = ""
        self.epochs_not_better = 0

    def settle(
        self, folder: str, at_url: Collection[str], writes: bool, say: Callable[[str], object]
    ) -> None:
        """Let the next evaluation write best.pth, whatever its score, if the folder lacks this file: only
        checkpoints/ was copied, or --resume PATH began a new folder. Called on every rank.

        at_url: names of results at the URL of the folder. writes: whether this start writes best.pth.
        """
        is_lost = False
        if ranks.is_first() and writes and math.isfinite(self.best) and BEST not in at_url:
            from bootfile.ground.again import is_file  # a first start has no score

            with contextlib.suppress(Unavailable):  # the mount does not answer: the file may be there
                is_lost = not is_file(os.path.join(folder, BEST))
        if ranks.broadcast_object(is_lost):
            say(
                f"{folder} has no {BEST} (the best evaluation so far: {self.best_at or self.best}): the next "
                "one writes it, whatever its score"
            )
            self.best = -math.inf

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.initial_weights, **{name: getattr(self, name) for name in _SAVED}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values from the state in a checkpoint."""
        self.initial_weights = state["weights"]
        for name in _SAVED:
            setattr(self, name, state[name])


def plain_names(model: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return the state of a model with the names that it has without wrappers of the model or its parts: what
    another program can load."""
    parallel = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    modules = dict(model.named_modules(remove_duplicate=False))

    def plain(name: str) -> str:
        """Return the name of a tensor without the parts that are wrappers."""
        parts = name.split(".")
        owners = [modules.get(".".join(parts[:place])) for place in range(len(parts))]  # of each part
        # "module" is left out only below a parallel wrapper: a part of the user's may have this name
        pairs = [(part, owner) for part, owner in zip(parts, owners, strict=True) if part not in WRAPPERS]
        return ".".join(part for part, owner in pairs if part != "module" or not isinstance(owner, parallel))

    return {plain(name): value for name, value in state.items()}

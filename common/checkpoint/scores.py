"""What a job adds to the exact state in its checkpoints: its scores, and the weights it began with."""

import contextlib
import math
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from bootfile.ground.again import is_file
from bootfile.ground.errors import Unavailable
from bootfile.processes import ranks

BEST = "best.pth"
_SAVED = ("best", "best_of", "highest", "epochs_not_better", "best_at", "validation_data")
_FORMER = {"antialias": True, "optimizer_kwargs": "{}", "gradient_compression": "none"}  # and their defaults


class Scores:
    """The scores of a job's evaluations, the same on every rank.

    initial_weights: the file of weights with which the run began, or None.
    settings_before: the options of the start that wrote the checkpoint; {} without one.
    best, best_of: the score of best.pth, and the metric of which it is (Metrics.best_of).
    highest, epochs_not_better: the best score of all evaluations, and the evaluations since.
    best_at: the figure and the epoch of the best one, in words; "" without one.
    validation_data: the digest of the validation set of all these scores; "" if it is not known.
    """

    def __init__(self, initial_weights: str | None):
        self.initial_weights = initial_weights
        self.settings_before: dict[str, Any] = {}
        self.best = -math.inf
        self.best_of = ""
        self.highest = -math.inf
        self.epochs_not_better = 0
        self.best_at = ""
        self.validation_data = ""

    def note(self, score: float, best_of: str, text: str = "") -> None:
        """Record the score of an evaluation, and count the evaluations since the best one.

        text: for `best_at`. best_of: Metrics.best_of. If the job named another metric before the restart, the
        best score is reset.
        """
        if best_of != self.best_of:
            self._forget()
            self.best_of = best_of
        if score > self.highest:
            self.highest = score
            self.best_at = text
            self.epochs_not_better = 0
        else:  # also a NaN
            self.epochs_not_better += 1

    def begin(self, validation_data: str) -> str:
        """Begin or continue with this validation set. The Checkpointer calls it on every rank, once, when the
        checkpoint is loaded. If the restored scores are those of another set, forget them, and return the
        digest of that set; else return "".

        validation_data: the digest of the validation set, the same on every rank; "" if it is not known. Then
        the scores stay, and so does the digest: a later start may know the set again.
        """
        before = self.validation_data
        self.validation_data = validation_data or before
        if before in ("", self.validation_data):  # it was not known, or is the same
            return ""
        self._forget()
        return before

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
        checkpoints/ was copied, or --resume PATH began a new folder.

        The Checkpointer calls it on every rank when it has loaded a checkpoint. Rank 0 decides and prints.
        at_url: names of results at the URL of the folder. writes: whether this start writes best.pth.
        """
        is_lost = False
        if ranks.is_first() and writes and math.isfinite(self.best) and BEST not in at_url:
            with contextlib.suppress(Unavailable):  # the mount does not answer: the file may be there
                is_lost = not is_file(os.path.join(folder, BEST))
        if ranks.broadcast_object(is_lost):
            say(
                f"{folder} has no {BEST} (the best evaluation so far: {self.best_at or self.best}): the next "
                "one writes it, whatever its score"
            )
            self.best = -math.inf

    def find_former_options(self) -> list[str]:
        """Return "--name value" for each option of an earlier version that changed the training of the
        checkpoint, and that was removed (common/console/arguments.py says what to use instead)."""
        values = {name: self.settings_before.get(name, default) for name, default in _FORMER.items()}
        return [f"--{name} {value}" for name, value in values.items() if value != _FORMER[name]]

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.initial_weights, **{name: getattr(self, name) for name in _SAVED}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values from the state in a checkpoint."""
        self.initial_weights = state["weights"]
        self.settings_before = state["arguments"]
        for name in _SAVED:
            setattr(self, name, state[name])

"""What a job adds to the exact state in its checkpoints: its scores, and the weights it began with."""

import math
from collections.abc import Mapping
from typing import Any


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
        if not validation_data:
            return ""
        self.validation_data = validation_data
        if before in ("", validation_data):  # it was not known, or is the same
            return ""
        self._forget()
        return before

    def _forget(self) -> None:
        """Forget the scores: the next evaluation is the best one, and early stopping counts from it."""
        self.best = -math.inf
        self.highest = -math.inf
        self.best_at = ""
        self.epochs_not_better = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "weights": self.initial_weights,
            "best": self.best,
            "best_of": self.best_of,
            "highest": self.highest,
            "epochs_not_better": self.epochs_not_better,
            "best_at": self.best_at,
            "validation_data": self.validation_data,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values from the state in a checkpoint."""
        self.initial_weights = state["weights"]
        self.settings_before = state["arguments"]
        self.best = state["best"]
        self.best_of = state["best_of"]
        self.highest = state["highest"]
        self.epochs_not_better = state["epochs_not_better"]
        self.best_at = state["best_at"]
        self.validation_data = state["validation_data"]

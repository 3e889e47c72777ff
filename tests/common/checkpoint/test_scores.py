"""The scores of a job's evaluations: what counts as better, and what a restart keeps."""

import math

import pytest

from common.checkpoint.scores import Scores


def scores_after(*values: float) -> Scores:
    scores = Scores(None)
    for epoch, value in enumerate(values):
        scores.note(value, "accuracy", f"{value} in epoch {epoch}")
    return scores


@pytest.mark.parametrize(
    ("values", "highest", "since", "best_at"),
    [
        ((0.5, 0.7, 0.6), 0.7, 1, "0.7 in epoch 1"),
        ((0.5, 0.7, 0.7, 0.7), 0.7, 2, "0.7 in epoch 1"),  # an equal score is not better
        ((0.5, math.nan, 0.6), 0.6, 0, "0.6 in epoch 2"),
        ((0.5, math.nan, math.nan), 0.5, 2, "0.5 in epoch 0"),
        ((-2.0, -1.0), -1.0, 0, "-1.0 in epoch 1"),  # the score of a loss is negative
    ],
)
def test_only_a_higher_score_is_better(values, highest, since, best_at):
    scores = scores_after(*values)
    assert (scores.highest, scores.epochs_not_better, scores.best_at) == (highest, since, best_at)


def test_with_another_metric_the_count_begins_again():
    scores = scores_after(0.9, 0.8, 0.7)
    scores.best = 0.9
    scores.note(0.1, "IoU", "0.1")
    assert (scores.highest, scores.epochs_not_better, scores.best_of) == (0.1, 0, "IoU")
    assert scores.best == -math.inf  # the next best.pth is one of this metric


def test_a_restart_continues_the_scores():
    before = scores_after(0.9, 0.8)
    before.best = 0.9
    before.validation_data = "a digest"
    after = Scores(None)
    after.load_state_dict(before.state_dict() | {"arguments": {}})
    assert not after.begin("a digest")
    assert after.state_dict() == before.state_dict()


@pytest.mark.parametrize(
    ("saved", "now", "forgets"),
    [("a", "b", True), ("a", "a", False), ("", "b", False), ("a", "", False)],  # "": it is not known
)
def test_scores_of_another_validation_set_are_forgotten(saved, now, forgets):
    scores = scores_after(0.9, 0.8)
    scores.validation_data = saved
    assert scores.begin(now) == forgets
    assert scores.highest == (-math.inf if forgets else 0.9)
    assert scores.validation_data == (now or saved)

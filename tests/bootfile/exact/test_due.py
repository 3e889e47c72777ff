"""A run saves by time within a long epoch, so a job that is killed again and again progresses."""

import itertools

import pytest

from bootfile.exact import due
from bootfile.exact.due import Interval, ReportTimes, SaveTimes

_HOUR = 3600


class Clock:
    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(due.time, "monotonic", self.read)

    def read(self):
        return self.now


def find_saves(clock, every, seconds):
    """Return the times of the saves, if a step takes a second."""
    saves = SaveTimes(every)
    saves.begin()
    began = clock.now
    times = []
    for second in range(1, seconds + 1):
        clock.now = began + second
        if saves.is_late():
            times.append(second)
            saves.saved_at = clock.now
    return times


def test_within_a_long_epoch_at_most_half_of_a_start_or_half_an_hour_is_lost(monkeypatch):
    clock = Clock(monkeypatch)
    times = find_saves(clock, Interval(1, "epoch"), 3 * _HOUR)
    assert times[:4] == [120, 240, 480, 960]
    for before, after in itertools.pairwise(times):
        assert after - before <= max(after / 2, 120) and after - before <= _HOUR / 2
    assert len(times) < 12


@pytest.mark.parametrize("every, times", [(Interval(100), []), (Interval(500, "s"), [500, 1000])])
def test_steps_and_seconds_are_as_the_user_asked(monkeypatch, every, times):
    assert find_saves(Clock(monkeypatch), every, 1200) == times


def test_each_start_of_a_job_that_is_killed_every_five_minutes_progresses(monkeypatch):
    clock = Clock(monkeypatch)
    for _ in range(3):
        assert find_saves(clock, Interval(1, "epoch"), 300)[-1] == 240


@pytest.mark.parametrize(
    "every, steps",
    [
        (Interval(0.01, "epoch"), 1),
        (Interval(0.5, "epoch"), 4),
        (Interval(0, "epoch"), 0),
        (Interval(9, "s"), 0),
    ],
)
def test_a_share_of_an_epoch_is_at_least_a_step(every, steps):
    assert every.steps(8) == steps


@pytest.mark.parametrize("every, evaluate_every, steps", [
    (Interval(4), 0, [4, 5, 8, 10]),  # and after each epoch of 5 steps
    (Interval(600, "s"), 0, [1, 5, 10]),
    (Interval(1, "epoch"), 3, [3, 5, 6, 9, 10]),
    (None, 3, [3, 6, 9]),
    (None, 0, []),
])  # fmt: skip
def test_reports_are_due_also_after_epochs_and_before_evaluations(every, evaluate_every, steps):
    reports = ReportTimes(every, None, evaluate_every)
    reports.first = 1
    assert [step for step in range(1, 11) if reports.is_due(step, 5)] == steps

"""The clocks of a step: that of the host, and that of a device, whose events pass later."""

import pytest

from bootfile.exact import pace
from bootfile.exact.pace import _BEFORE, _OWN, _WAITING, _Clock, _Facts, _Moment, summarize


class Event:
    """A stand-in for an event of a device: the test says when it passes."""

    now = 0.0  # milliseconds of the device
    passed = 0.0
    made = 0

    def __init__(self, enable_timing: bool = False):
        assert enable_timing
        Event.made += 1

    def record(self) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return self.at <= Event.passed

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


@pytest.fixture
def clock():
    Event.now, Event.passed, Event.made = 0.0, 0.0, 0
    return _Clock(Event)


def run_step(clock, step: int) -> None:
    """Record a step of 10 ms until its batch is there, 30 ms of computing and 60 ms of waiting."""
    for part, milliseconds in ((_BEFORE, 10), (_OWN, 30), (_WAITING, 60)):
        Event.now += milliseconds
        clock.cut(part)
    clock.end_step(_Facts(True, float(step), 0.0, False))


def test_events_are_read_when_they_have_passed(clock):
    clock.cut(None)
    run_step(clock, 1)
    run_step(clock, 2)
    assert [*clock.take()] == [], "the host waits for none"
    Event.passed = 150.0
    (facts, seconds), = clock.take()  # fmt: skip
    assert facts.data == 1 and seconds == pytest.approx([0.03, 0.06, 0.01])
    Event.passed = 300.0
    (facts, seconds), = clock.take()  # fmt: skip
    assert facts.data == 2 and seconds == pytest.approx([0.03, 0.06, 0.01])


def test_events_are_used_again(clock):
    clock.cut(None)
    for step in range(1, 101):
        run_step(clock, step)
        Event.passed = Event.now
        assert len([*clock.take()]) == 1
    assert Event.made < 10


def test_a_pause_does_not_count(clock):
    clock.cut(None)
    run_step(clock, 1)
    Event.now += 5000  # a save
    clock.cut(None)
    run_step(clock, 2)
    Event.passed = Event.now
    assert [sum(seconds) for _, seconds in clock.take()] == pytest.approx([0.1, 0.1])


def test_the_clock_of_the_host_begins_again_with_each_step(monkeypatch):
    moments = iter([0.0, 1.0, 3.0, 10.0, 11.0])
    monkeypatch.setattr(pace.time, "perf_counter", lambda: next(moments))
    clock = _Clock(_Moment)
    facts = _Facts(True, 0.0, 0.0, False)
    clock.cut(None)
    clock.cut(_OWN)
    clock.cut(_WAITING)
    clock.end_step(facts)
    clock.cut(None)
    clock.cut(_OWN)
    clock.end_step(facts)
    assert [seconds for _, seconds in clock.take()] == [[1.0, 2.0, 0.0], [1.0, 0.0, 0.0]]
    assert [*clock.take()] == []


def test_the_longest_step_is_not_a_usual_one():
    times = summarize([0.1, 0.1, 0.1, 2.1], [0.0, 0.0, 0.0, 0.4], [0.3])
    assert times == pytest.approx((4, 0.6, 0.1, 0.3, 0.1))
    assert summarize([], [], []).steps == 0

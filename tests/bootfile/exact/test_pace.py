"""The clocks of a step: that of the host, and that of a device, whose events pass later."""

import pytest
import torch

from bootfile.exact import pace
from bootfile.exact.pace import _BEFORE, _OWN, _WAITING, _Context, _DeviceClock, _HostClock, _Step


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
def clock(monkeypatch):
    monkeypatch.setattr(pace.accelerator, "of", lambda device: type("module", (), {"Event": Event}))
    Event.now, Event.passed, Event.made = 0.0, 0.0, 0
    return _DeviceClock(torch.device("cuda"))


def run_step(clock, step: int) -> None:
    """Record a step of 10 ms until its batch is there, 30 ms of computing and 60 ms of waiting."""
    for part, milliseconds in ((_BEFORE, 10), (_OWN, 30), (_WAITING, 60)):
        Event.now += milliseconds
        clock.cut(part)
    clock.end_step(_Context(step, True, 0.0, 0.0, False))


def test_events_are_read_when_they_have_passed(clock):
    clock.restart()
    run_step(clock, 1)
    run_step(clock, 2)
    assert clock.take() == [], "the host waits for none"
    Event.passed = 150.0
    (context, seconds), = clock.take()  # fmt: skip
    assert context.step == 1 and seconds == pytest.approx([0.03, 0.06, 0.01])
    Event.passed = 300.0
    (context, seconds), = clock.take()  # fmt: skip
    assert context.step == 2 and seconds == pytest.approx([0.03, 0.06, 0.01])


def test_events_are_used_again(clock):
    clock.restart()
    for step in range(1, 101):
        run_step(clock, step)
        Event.passed = Event.now
        clock.take()
    assert Event.made < 10


def test_a_pause_does_not_count(clock):
    clock.restart()
    run_step(clock, 1)
    Event.now += 5000  # a save
    clock.restart()
    run_step(clock, 2)
    Event.passed = Event.now
    assert [sum(seconds) for _, seconds in clock.take()] == pytest.approx([0.1, 0.1])


def test_the_clock_of_the_host_begins_again_with_each_step(monkeypatch):
    moments = iter([0.0, 1.0, 3.0, 10.0, 11.0])
    monkeypatch.setattr(pace.time, "perf_counter", lambda: next(moments))
    clock = _HostClock()
    clock.cut(_OWN)
    clock.cut(_WAITING)
    context = _Context(1, True, 0.0, 0.0, False)
    clock.end_step(context)
    clock.restart()
    clock.cut(_OWN)
    clock.end_step(context)
    assert [seconds for _, seconds in clock.take()] == [[1.0, 2.0, 0.0], [1.0, 0.0, 0.0]]
    assert clock.take() == []


def test_the_step_since_which_a_rank_is_slow():
    steps = [_Step(step, 0.1 if step < 40 else 0.5, 0.0, 0.1) for step in range(20, 60)]
    times = pace._summarize(steps, 59)
    assert 59 - times.ago == 40 and times.steps == 40
    assert times.slow_steps == 0, "more than the half are slow: not now and then"
    steps = [_Step(step, 2.1 if step % 10 == 0 else 0.1, 0.0, None) for step in range(1, 41)]
    times = pace._summarize(steps, 40)
    assert (times.slow_steps, 40 - times.ago, times.waiting) == (4, 10, 0)
    assert times.peaks == pytest.approx(0.2) and times.usual < times.busy

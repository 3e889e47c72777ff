"""Faults of `simulate` that last or come again, on processes that only note their signals."""

import signal
import types

import pytest

from launch.simulate import injector
from launch.simulate.faults import parse
from launch.simulate.injector import Injector


class Node:
    """A node of two ranks, whose process ids are 10 times its number and the next one."""

    def __init__(self, index: int):
        self.index, self.running = index, True
        self.pids = [10 * index + 10]
        self.runs = [types.SimpleNamespace(note="")]
        self.slowed, self.was_killed = [], False

    def find(self):
        return dict.fromkeys((self.pids[0], self.pids[0] + 1))

    def ranks(self, count):
        return {2 * self.index + local: self.pids[0] + local for local in range(count)}

    def slow_down(self, rank, delay):
        self.slowed.append((rank, delay))

    def kill(self):
        self.was_killed = True


class Job:
    """Two such nodes. step: the last one that was printed."""

    processes, seconds = 2, 0.0

    def __init__(self):
        self.nodes, self.step = [Node(0), Node(1)], 0
        self.running = self.nodes

    def find_ranks(self):
        return {rank: (node, pid) for node in self.nodes for rank, pid in node.ranks(2).items()}


@pytest.fixture
def world(monkeypatch):
    """A function of faults: their Injector, the job, the signals that were sent, and the time in seconds."""
    place = types.SimpleNamespace(job=Job(), sent=[], now=100.0)
    note = types.SimpleNamespace(kill=lambda pid, number: place.sent.append((pid, number)))
    monkeypatch.setattr(injector, "os", note)
    monkeypatch.setattr(injector, "time", types.SimpleNamespace(monotonic=lambda: place.now))
    monkeypatch.setattr(injector, "log", lambda line: None)
    monkeypatch.setattr(injector.signals, "catches", lambda pid, number: True)

    def make(*texts):
        place.injector = Injector(place.job, [parse(text, 2, 2) for text in texts], lambda: False)
        return place

    return make


def fire(place, step: int, after: float = 0.0) -> list:
    """Return the signals of a round at this step, some seconds after the last one."""
    place.job.step, place.now = step, place.now + after
    place.sent.clear()
    place.injector.fire()
    return sorted(place.sent)


def test_a_fault_of_a_rank_fires_once_at_its_step(world):
    place = world("kill:rank=2,step=5", "term:rank=1,step=5")
    assert fire(place, 4) == []
    assert fire(place, 6) == [(11, signal.SIGTERM), (20, signal.SIGKILL)]
    assert fire(place, 7) == [] and place.injector.pending == []


@pytest.mark.parametrize("text, pids", [
    ("pause:node=1,step=5,for=10s", [20, 21]), ("pause:rank=1,step=5,for=10s", [11]),
])  # fmt: skip
def test_a_pause_ends(world, text, pids):
    place = world(text)
    assert fire(place, 5) == [(pid, signal.SIGSTOP) for pid in pids]
    assert fire(place, 5, after=9) == []
    assert fire(place, 5, after=2) == [(pid, signal.SIGCONT) for pid in pids]
    assert fire(place, 9, after=99) == []


def test_a_pause_comes_again_after_each_number_of_steps(world):
    place = world("pause:rank=0,every=10step,for=2s")
    fired = {}
    for step in range(1, 36):
        signals = [number for _, number in fire(place, step, after=1)]
        if signal.SIGSTOP in signals:
            fired[step] = signals
    # the steps until the next one are counted from the pause
    assert list(fired) == [10, 20, 30]
    place.injector.continue_all()
    assert place.sent in ([], [(10, signal.SIGCONT)])


@pytest.mark.parametrize("text, slowed", [
    ("slow_data:node=1,step=5,by=0.2s,for=20s", [[], [(None, 0.2), (None, 0)]]),
    ("slow_data:rank=3,step=5,by=1s,for=20s", [[(3, 1.0), (3, 0)]] * 2),
    ("slow_data:node=0,step=5,by=1s", [[(None, 1.0)], []]),  # without an end
])  # fmt: skip
def test_slow_data_of_a_node_or_a_rank(world, text, slowed):
    place = world(text)
    for step, after in ((4, 0), (5, 0), (5, 19), (6, 2)):
        fire(place, step, after)
    assert [node.slowed for node in place.job.nodes] == slowed


def test_a_hang_is_released_or_lasts_for_ever(world):
    place = world("hang:rank=0,step=1,for=3s", "hold:rank=3,step=1")
    assert fire(place, 1) == [
        (10, injector._HANG_SIGNALS["hang"]), (21, injector._HANG_SIGNALS["hold"]),
    ]  # fmt: skip
    assert fire(place, 1, after=4) == [(10, injector._RELEASE)]
    assert fire(place, 1, after=10**6) == []


def test_a_random_rank_is_killed_after_each_time(world):
    place = world("kill:every=5s")
    killed = [bool(fire(place, 1, after=1)) for _ in range(16)]
    assert killed == [place in (5, 10, 15) for place in range(16)]


def test_a_throttled_process_uses_its_share_of_a_core(world, monkeypatch):
    used = 0.0
    monkeypatch.setattr(injector, "_count_cpu_seconds", lambda pid: used)
    place = world("throttle:rank=0,step=1,to=25%")
    is_stopped = False
    fire(place, 1)
    assert place.injector.round_seconds < 0.02
    for _ in range(4000):  # of 5 ms
        used += 0 if is_stopped else 0.005
        for pid, number in fire(place, 1, after=0.005):
            assert pid == 10
            is_stopped = number == signal.SIGSTOP
    assert used == pytest.approx(0.25 * 20, rel=0.1)


def test_stopped_processes_are_killed_when_nothing_else_runs(world):
    place = world("stop:rank=0,step=1", "stop:rank=1,step=1", "stop:rank=2,step=1", "stop:rank=3,step=2")
    fire(place, 1)
    place.injector.kill_if_all_stopped()
    assert not any(node.was_killed for node in place.job.nodes), "rank 3 still runs"
    fire(place, 2)
    place.injector.kill_if_all_stopped()
    assert all(node.was_killed and "stopped by a fault" in node.runs[-1].note for node in place.job.nodes)

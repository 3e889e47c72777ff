"""A barrier costs a rank a few operations of the store, however long it waits, and names who is missing."""

import collections
import signal
import textwrap
import threading
import time
import types

import pytest
import torch

from bootfile.ground import heartbeat
from bootfile.ground.errors import BadInput
from common.distributed import barrier, launcher
from common.ground.endings import NO_RENDEZVOUS, NoRendezvous
from tests.conftest import LONGEST, ROOT, finish, names, start, wait_until


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """On a busy machine a wait may be longer than ten seconds: no tick comes by itself."""
    monkeypatch.setattr(barrier, "_TICK", 1000.0)


class Counted(torch.distributed.Store):
    """A connection to a store that counts its calls, and those of `add` by the key, too."""

    def __init__(self, store):
        super().__init__()
        self.store, self.calls, self.keys = store, collections.Counter(), collections.Counter()


def _count(name):
    def call(self, *given):
        self.calls[name] += 1
        if name == "add":
            self.keys[given[0]] += 1
        return getattr(self.store, name)(*given)

    return call


for each in ("set", "get", "add", "compare_set", "wait", "check", "multi_get"):
    setattr(Counted, each, _count(each))


class Job:
    """Ranks that meet at a barrier, each in a thread with its own connection to one TCPStore."""

    def __init__(self, world_size):
        self.server, _, self.port = launcher.hold_store()
        self.world_size, self.stores, self.errors, self._threads = world_size, {}, {}, []

    def connect(self):
        store = torch.distributed.TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False)
        return torch.distributed.PrefixStore("job", store)

    def arrive(self, rank, error=None, limit=LONGEST, silence=None, world_size=None):
        store = self.stores[rank] = Counted(self.connect())

        def meet():
            try:
                expected = world_size or self.world_size
                barrier.gather(store, "b", "to prepare", error, rank, expected, limit, silence)
            except (BadInput, RuntimeError) as raised:
                self.errors[rank] = raised

        self._threads.append(threading.Thread(target=meet))
        self._threads[-1].start()

    def wait_for(self, arrived):
        store = self.connect()
        wait_until(lambda: store.add("b/here", 0) == arrived)

    def end(self):
        for thread in self._threads:
            thread.join(LONGEST)
            assert not thread.is_alive()
        return self.errors


@pytest.mark.parametrize("seconds", [0, 2])
def test_a_waiting_rank_makes_a_few_calls_however_long_it_waits(seconds):
    job = Job(8)
    for rank in range(7):
        job.arrive(rank)
        job.wait_for(rank + 1)
    time.sleep(seconds)
    job.arrive(7)
    assert not job.end()
    for rank in range(1, 8):
        assert job.stores[rank].calls.total() <= 6, job.stores[rank].calls


def test_all_ranks_have_the_first_error():
    job = Job(6)
    for rank in range(4):
        job.arrive(rank)
    job.wait_for(4)
    job.arrive(4, BadInput("no such folder"))
    job.arrive(5, BadInput("a later error"))
    errors = {str(error) for error in job.end().values()}
    assert len(job.errors) == 6 and len(errors) == 1
    assert min(errors).startswith(("no such folder (rank 4 on ", "a later error (rank 5 on "))
    assert all(job.stores[rank].calls.total() <= 16 for rank in range(1, 6))


def test_rank_0_waits_for_the_ranks_of_the_larger_layout(monkeypatch):
    monkeypatch.setattr(barrier, "_LINGER", LONGEST)
    job = Job(2)
    job.arrive(0)
    job.arrive(2, BadInput("another layout"), world_size=3)
    store = job.connect()
    wait_until(lambda: store.add("b/told", 0) == 2)
    time.sleep(5 * barrier._POLL)
    assert 0 not in job.errors  # it holds the store, which rank 1 has not read
    job.arrive(1, world_size=3)
    assert {str(error)[:14] for error in job.end().values()} == {"another layout"}


def test_a_rank_that_comes_after_an_error_has_it_at_once():
    job = Job(3)
    job.arrive(1, BadInput("no such folder"))
    wait_until(lambda: 1 in job.errors)
    job.arrive(2)
    job.arrive(0)
    assert {str(error)[:14] for error in job.end().values()} == {"no such folder"}


def test_a_name_is_used_again():
    job = Job(3)
    for _ in range(2):
        for rank in range(3):
            job.arrive(rank)
        assert not job.end()


def test_waiting_ranks_are_woken_to_log_whom_they_wait_for(monkeypatch, capsys):
    """Each node logs it, also while rank 0 is missing. A connection without traffic may be closed."""
    monkeypatch.setattr(heartbeat, "EVERY", 0.3)
    monkeypatch.setattr(barrier, "_TICK", 0.2)
    job, lines = Job(4), []
    for rank in (2, 1, 3):  # rank 2 comes first, and wakes the others
        job.arrive(rank)
        job.wait_for(len(job.stores))
    wait_until(lambda: lines.append(capsys.readouterr().out) or "".join(lines).count("waiting") > 5)
    job.arrive(0)
    assert not job.end() and names("".join(lines), "waiting for 1 of 4", "prepare")
    assert job.stores[1].calls["wait"] > 1 and not job.stores[2].calls["wait"]


@pytest.mark.parametrize("dies", [False, True])
def test_missing_ranks_are_named_without_rank_0(dies, monkeypatch):
    """Also if the first rank that came, which wakes the others, was killed."""
    clock = type("Clock", (), {"seconds": 0.0, "beat": lambda clock, text: None})
    monkeypatch.setattr(barrier, "Heartbeat", clock)
    job, store = Job(4), None
    if dies:
        store = job.connect()
        store.add("b/here/2", 1)
        store.add("b/here", 1)
    else:
        job.arrive(2, limit=1.0)
    job.wait_for(1)
    job.arrive(1, limit=1.0)
    job.wait_for(2)
    clock.seconds = 2.0
    errors = job.end()
    assert len(errors) == 2 - dies
    for error in errors.values():
        assert isinstance(error, NoRendezvous) and error.code == NO_RENDEZVOUS
        assert names(str(error), "2 of 4", "not arrive", "prepare", "1 s", "[0, 3]")


def test_a_rank_without_a_heartbeat_is_named(monkeypatch):
    """Rank 0 reads all heartbeats in one call."""
    monkeypatch.setattr(barrier, "_LOOK_EVERY", 0.1)
    monkeypatch.setattr(barrier, "_LINGER", 0.0)  # this process holds the store
    passed = []
    clock = types.SimpleNamespace(monotonic=lambda: sum(passed), sleep=time.sleep)
    monkeypatch.setattr(barrier, "time", clock)
    job = Job(16)
    for rank in (0, *range(2, 16)):
        job.arrive(rank, silence=1.0)
    job.wait_for(15)
    store, calls = job.connect(), job.stores[0].calls
    for _ in range(8):
        store.add("b/beats/1", 1)  # as barrier.beat()
        begun = calls["multi_get"]
        wait_until(lambda begun=begun: calls["multi_get"] > begun + 2)  # rank 0 has seen it
        passed.append(0.9)
    assert not job.errors
    passed.append(0.9)
    texts = {str(error) for error in job.end().values()}
    (text,) = texts
    assert names(text, "rank 1", "no heartbeat", "1 s", "prepare")
    keys = job.stores[0].keys
    assert calls["multi_get"] > 3 and all(keys[f"b/beats/{rank}"] <= 1 for rank in range(16))


def test_a_store_that_closes_ends_the_wait():
    job = Job(3)
    job.arrive(1)
    job.arrive(2)
    job.wait_for(2)
    del job.server
    errors = job.end()
    assert sorted(errors) == [1, 2] and not any(isinstance(each, BadInput) for each in errors.values())


WAIT = textwrap.dedent(f"""
    import sys
    sys.path.insert(0, {str(ROOT)!r})
    from common.distributed.entry import entry
    from common.distributed import barrier
    from bootfile.processes import signals
    import torch
    @entry
    def main():
        signals.unwind_within(400)
        port = int(sys.argv[1])
        store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        try:
            barrier.gather(store, "b", "", None, 1, 3, 600)
        finally:
            print("closed", flush=True)
    main()
""")


def test_ctrl_c_interrupts_the_wait():
    """It does not interrupt a call of the store, and the process would be ended without its clean-up."""
    server, _, port = launcher.hold_store()
    server.add("b/here", 1)  # another rank came first
    job = start("-c", WAIT, port)
    wait_until(lambda: server.add("b/here", 0) == 2, job)
    job.send_signal(signal.SIGINT)
    result = finish(job, 130)
    assert result.stdout == "closed\n" and result.stderr == "error: interrupted\n"

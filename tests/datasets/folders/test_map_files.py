"""Tasks that wait for a disk are given to threads, and results keep their order."""

import itertools
import threading
import time

import pytest

from datasets.folders.walk import map_files


def test_tasks_that_wait_run_in_threads_and_keep_their_order():
    threads = set()

    def task(number: int) -> int:
        threads.add(threading.get_ident())
        time.sleep(0.002 * (number % 3))
        return number

    assert list(map_files(task, range(500))) == list(range(500))
    assert len(threads - {threading.get_ident()}) > 1


def test_a_task_that_does_not_wait_runs_in_this_thread(monkeypatch):
    now = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    monkeypatch.setattr(time, "thread_time", time.perf_counter)  # all the time is CPU time
    assert set(map_files(lambda _: threading.get_ident(), range(200))) == {threading.get_ident()}


def test_a_task_that_waits_only_for_a_processor_runs_in_this_thread(monkeypatch):
    now = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(now)))  # a second for each task
    assert set(map_files(lambda _: threading.get_ident(), range(200))) == {threading.get_ident()}


@pytest.mark.parametrize("bad", [0, 300])
def test_an_error_reaches_the_caller(bad):
    def task(number: int) -> int:
        time.sleep(0.001)
        return 1 // (number != bad)

    with pytest.raises(ZeroDivisionError):
        list(map_files(task, range(500)))

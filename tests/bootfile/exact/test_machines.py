"""A restart keeps the threads of its run, and names another machine or refuses it."""

import re

import pytest
import torch

from bootfile.exact import machines, other_start
from bootfile.ground.errors import BadInput
from bootfile.processes import ranks

HERE = {"threads": 2, "ATen": "AVX2", "MKL": "COMPATIBLE", "CPU": "one", "torch": "2.14"}
THERE = HERE | {"ATen": "AVX512", "MKL": "AMD AVX512"}


@pytest.fixture
def lines(monkeypatch):
    """The lines of a run on a machine with the facts HERE. Its end restores the threads."""
    monkeypatch.setattr(machines.facts, "describe", lambda: dict(HERE))
    threads = torch.get_num_threads()
    yield []
    torch.set_num_threads(threads)


def _make(lines: list, same: bool = False, threads: int | None = None, device: str = "cpu"):
    return machines.Machines(same, threads, torch.device(device), lines.append)


@pytest.mark.parametrize(
    "saved, wanted, is_fixed, device, expected, is_said",
    [
        (3, None, False, "cpu", 3, True), (3, 2, False, "cpu", 2, False), (None, 2, False, "cpu", 2, False),
        (None, None, False, "cpu", 5, False), (5, None, False, "cpu", 5, False),
        (3, None, True, "cpu", 1, False), (3, 2, False, "cuda", 1, False),
    ],
)  # fmt: skip
def test_the_threads_of_a_run_stay(lines, monkeypatch, saved, wanted, is_fixed, device, expected, is_said):
    """5: what a new run would have here."""
    monkeypatch.setattr(machines.threads, "choose", lambda places: 5)
    torch.set_num_threads(1)
    history = [{"step": 1, **HERE, "threads": saved}] if saved else []
    _make(lines, threads=wanted, device=device).settle(8, history, is_fixed)
    assert torch.get_num_threads() == expected
    assert bool(lines) == is_said and all("3 threads" in line and "--threads 5" in line for line in lines)


@pytest.mark.parametrize(
    "saved, expected",
    [
        ([], [(9, HERE)]), ([(1, HERE)], [(1, HERE)]), ([(1, THERE)], [(1, THERE), (9, HERE)]),
        ([(1, HERE), (5, THERE)], [(5, THERE), (1, HERE)]),  # the last one is the present one
    ],
)  # fmt: skip
def test_the_history_has_each_machine_once(lines, saved, expected):
    run = _make(lines)
    run.settle(8, [{"step": step, **facts} for step, facts in saved], True)
    assert run.history == [{"step": step, **facts} for step, facts in expected]


@pytest.mark.parametrize(
    "before, same, device, is_other, line",
    [
        (HERE, True, "cpu", False, ""),
        (HERE | {"threads": 9, "CPU": "two"}, True, "cpu", False, ""),
        (HERE | {"torch": "2.13"}, True, "cpu", False, "torch 2.13 until step 8.*torch 2.14"),
        (THERE, False, "cpu", True, r"ATen AVX512 until step 8.*ATen AVX2 \(1 more facts differ\)"),
        (THERE, True, "cuda", True, "ATen AVX512"),
    ],
)
def test_another_machine_is_named(lines, before, same, device, is_other, line):
    state = {"machines": [{"step": 1, **THERE}, {"step": 3, **before}], "step": 8}
    assert other_start.compare_machines(_make(lines, same, device=device), state) == is_other
    assert bool(lines) == bool(line) and re.search(line, "".join(lines))


def test_another_instruction_set_is_refused_unless_it_is_a_new_level(lines, monkeypatch):
    state = {"machines": [{"step": 1, **THERE}], "step": 8}
    with pytest.raises(BadInput, match=r"ATen AVX512 until step 8.*ATen AVX2"):
        other_start.compare_machines(_make(lines, same=True), state)
    monkeypatch.setattr(other_start, "level_in_use", lambda: "avx2")
    for before in (THERE, HERE | {"ATen": "DEFAULT"}, HERE | {"MKL": "Intel AVX2"}):  # native, any, native
        state["machines"] = [{"step": 1, **before}]
        assert other_start.compare_machines(_make(lines, same=True), state)
    # the level that the run has already had: another difference
    state["machines"] = [{"step": 1, **HERE, "ATen": "avx2", "MKL": "COMPATIBLE", "operators": "1"}]
    monkeypatch.setattr(machines.facts, "describe", lambda: HERE | {"operators": "2"})
    with pytest.raises(BadInput):
        other_start.compare_machines(_make(lines, same=True), state)


@pytest.mark.parametrize("same", [True, False])
def test_ranks_with_other_instruction_sets(lines, monkeypatch, same):
    monkeypatch.setattr(ranks, "gather_objects", lambda facts: [facts, facts, THERE])
    expected = "rank 0 computes with ATen AVX2, rank 2 with ATen AVX512"
    if same:
        with pytest.raises(BadInput, match=expected):
            _make(lines, same).settle(0, [], True)
    else:
        _make(lines, same).settle(0, [], True)
        assert len(lines) == 1 and expected in lines[0]

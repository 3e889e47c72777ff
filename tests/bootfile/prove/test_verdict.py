"""The results of the cases of a proof, what follows from them, and the verdict."""

import os
import types
from pathlib import Path

import pytest

from bootfile.ground.exit_codes import DIFFERS, UNVERIFIED
from bootfile.prove import cases, trial, verdict
from bootfile.prove.cases import KILLED, Case
from bootfile.receipt.compare import Line
from tests.conftest import names

EQUAL = [Line("data", True, "equal data"), Line("weights", True, "equal weights")]
OTHER = [Line("data", True, "equal data"), Line("weights", False, "weights differ")]
DATA = [Line("data", False, "data differ"), Line("weights", False, "weights differ")]


def make_job(**facts):
    """Return what a verdict reads of a Job."""
    facts = {"keeps_threads": False, "doubts": [], "unchecked": [], "same_bits": [], "processes": 1} | facts
    return types.SimpleNamespace(weights="*.pt", **facts)


def run_case(monkeypatch, case: Case, lines=(), error=None, refused=False, is_fork=False):
    """Return the row of a case, and how often it was run. is_fork: only the first run differs."""
    runs = []

    def run(case):
        runs.append(case)
        if error:
            raise error
        return "done"

    job = make_job(run=run, folder=lambda name: name, refused=lambda case: refused)
    job.repeat = lambda case: is_fork and len(runs) == 1
    monkeypatch.setattr(
        verdict.compare, "compare_runs", lambda *words: EQUAL if is_fork and len(runs) > 1 else [*lines]
    )
    return verdict.run(job, case), len(runs), job


WRONG = Case("wrong", must_differ=True)
PROCESSES = cases.OTHER_PROCESSES  # its weights need not be equal


@pytest.mark.parametrize(
    "case, lines, refused, result",
    [
        (Case("a"), EQUAL, False, "equal"),
        (Case("a"), OTHER, False, "differs"),
        (Case("a"), [], False, "nothing to compare"),
        (PROCESSES, OTHER, False, "equal"),
        (PROCESSES, DATA, False, "differs"),
        (WRONG, OTHER, False, verdict.NOTICED),
        (WRONG, EQUAL, True, verdict.NOT_NOTICED),
        (cases.DAMAGED, EQUAL, True, verdict.REFUSED),
        (cases.DAMAGED, EQUAL, False, verdict.NOT_NOTICED),
        (cases.DAMAGED, OTHER, False, verdict.NOTICED),
    ],
)
def test_the_result_of_a_case(monkeypatch, case, lines, refused, result):
    row, runs, _ = run_case(monkeypatch, case, lines, refused=refused)
    assert (row.result, runs) == (result, 1)


def test_a_difference_of_a_fork_alone_does_not_count(monkeypatch):
    row, runs, _ = run_case(monkeypatch, Case("a"), OTHER, is_fork=True)
    assert (row.result, runs) == ("equal", 2)


@pytest.mark.parametrize(
    "case, code, result, is_unchecked",
    [
        (Case("a"), 1, "differs", False),
        (WRONG, 1, "failed", False),
        (cases.DAMAGED, 1, verdict.REFUSED, False),
        (cases.ONE_CHANGE[0], 1, verdict.NOT_RUN, True),
        (cases.AGAIN, 1, verdict.NOT_RUN, False),  # each of its changes follows alone
        (PROCESSES, 2, verdict.NOT_RUN, True),  # the job refuses the option
        (PROCESSES, 1, "differs", False),
        (cases.KILLED_ON_2, 2, "differs", False),
    ],
)
def test_a_run_that_ends_with_an_error(monkeypatch, case, code, result, is_unchecked):
    row, _, job = run_case(monkeypatch, case, error=trial.Failed("ended with 1: why", code))
    assert row.result == result and bool(job.unchecked) == is_unchecked
    assert "why" in row.done + "".join(line.text for line in row.lines)


@pytest.mark.parametrize(
    "case, result, following",
    [
        (cases.DAMAGED, verdict.NOT_NOTICED, [cases.ALL_DAMAGED]),
        (cases.DAMAGED, verdict.REFUSED, []),
        (cases.ALL_DAMAGED, verdict.NOT_NOTICED, []),
        (cases.AGAIN, "differs", [cases.SAME]),
        (cases.AGAIN, verdict.NOT_RUN, [cases.SAME]),
        (cases.AGAIN, "equal", []),
        (cases.SAME, "equal", cases.ONE_CHANGE),
        (cases.SAME, "differs", []),
    ],
)
def test_what_follows_a_result(case, result, following):
    assert verdict.needs_more(verdict.Row(case, "", [], result)) == following


KILL = Case(KILLED, kills=2)
RIGHT = [verdict.Row(KILL, "", EQUAL, "equal"), verdict.Row(cases.DAMAGED, "", OTHER, verdict.NOTICED)]


def test_an_exact_job():
    text, code = verdict.conclude(make_job(), RIGHT)
    assert (
        code == 0
        and text == "exact: 1 runs equal the reference, and each run made wrong on purpose was noticed"
    )
    refused = [RIGHT[0], verdict.Row(cases.DAMAGED, "", [], verdict.REFUSED)]
    text, code = verdict.conclude(make_job(), refused)
    assert code == 0 and "refused" in text and "noticed" in text and "each run" not in text
    on_two = [*RIGHT, verdict.Row(PROCESSES, "", EQUAL, "equal")]
    text, _ = verdict.conclude(make_job(same_bits=[1, 2, 4]), on_two)
    assert text.endswith("; same bits on 1 and 2 processes")
    assert "same bits" not in verdict.conclude(make_job(same_bits=[1, 2, 4]), RIGHT)[0]


def test_a_job_that_differs():
    rows = [*RIGHT, verdict.Row(Case("another seed"), "", OTHER, "differs")]
    assert verdict.conclude(make_job(doubts=["short"]), rows) == (
        "differs: another seed: weights differ",
        DIFFERS,
    )
    text, code = verdict.conclude(make_job(), rows, "the rate differs")
    assert (text, code) == ("differs: another seed: the rate differs (weights differ)", DIFFERS)


@pytest.mark.parametrize(
    "job, rows, doubt",
    [
        (make_job(doubts=["no restart had steps left"]), RIGHT, "no restart had steps left"),
        (make_job(), [RIGHT[0], verdict.Row(cases.DAMAGED, "no file", [], verdict.NOT_RUN)], "no file"),
        (make_job(), [*RIGHT, verdict.Row(WRONG, "", [Line("", False, "why")], "failed")], "wrong: why"),
        (make_job(), [*RIGHT, verdict.Row(WRONG, "", EQUAL, verdict.NOT_NOTICED)], "wrong: no difference"),
        (make_job(), [verdict.Row(KILL, "", EQUAL[:1], "equal")], "no state"),
    ],
)
def test_runs_that_prove_nothing(job, rows, doubt):
    text, code = verdict.conclude(job, rows)
    assert code == UNVERIFIED and text.startswith("unverified: ") and doubt in text


def test_a_tensor_without_an_effect_is_a_note_if_all_together_have_one():
    row = verdict.Row(cases.DAMAGED, "model.extra is changed", EQUAL, verdict.NOT_NOTICED)
    rows = [RIGHT[0], row, verdict.Row(cases.ALL_DAMAGED, "", OTHER, verdict.NOTICED)]
    assert verdict.conclude(make_job(), rows)[1] == 0
    [note] = verdict.find_notes(rows)
    assert note.startswith("model.extra is saved")
    rows[-1] = rows[-1]._replace(lines=EQUAL, result=verdict.NOT_NOTICED)
    assert verdict.conclude(make_job(), rows)[1] == UNVERIFIED


def test_threads_that_change_a_restart():
    """Without a kill the same number of threads gives equal bits, and another one does not."""
    killed = verdict.Row(Case(KILLED, kills=1, changes=(cases.THREADS,)), "", OTHER, "differs")
    same = verdict.Row(Case(cases.SAME_THREADS, kills=1), "", EQUAL, "equal")
    rows = [killed, same, verdict.Row(cases.OTHER_THREADS, "", OTHER, "differs"), RIGHT[1]]
    text, code = verdict.conclude(make_job(), rows)
    assert code == 0 and "only with the same number of threads" in text and "weights differ" in text
    text, code = verdict.conclude(make_job(keeps_threads=True), rows)
    assert code == DIFFERS and names(text, "differs", "threads")


def test_the_surroundings_of_a_run(monkeypatch):
    for name in ("PYTHONHASHSEED", "OMP_NUM_THREADS", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cases.threads, "share", lambda processes: 4)
    assert cases.environment()["PYTHONHASHSEED"] == "1" and "OMP_NUM_THREADS" not in cases.environment()
    assert cases.environment((cases.HASH,))["PYTHONHASHSEED"] == "2"
    assert cases.environment((cases.THREADS,))["OMP_NUM_THREADS"] == "1"
    assert cases.find_unchanged() == []
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert cases.environment((cases.THREADS,))["OMP_NUM_THREADS"] == "2"
    monkeypatch.setenv("PYTHONPATH", "mine")
    first, second = cases.environment((cases.LISTING,))["PYTHONPATH"].split(os.pathsep)
    assert os.path.exists(f"{first}/sitecustomize.py") and second == "mine"
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert cases.environment((cases.HASH,))["PYTHONHASHSEED"] == "7"
    [line] = cases.find_unchanged()
    assert line.endswith("the environment has 7")


def test_another_working_folder_has_links_to_the_neighbours(monkeypatch, tmp_path):
    (tmp_path / "project").mkdir()
    for path in ("project/train.py", "data"):
        (tmp_path / path).write_text(path)
    monkeypatch.chdir(tmp_path / "project")
    parent = tmp_path / "made"
    with cases.working_folder((cases.HASH,), str(parent)) as place:
        assert place is None and not parent.exists()
    with cases.working_folder((cases.FOLDER,), str(parent)) as place:
        assert os.path.dirname(place) == str(parent) and os.path.basename(place) != "project"
        assert Path(place, "train.py").read_text() == "project/train.py"
        assert Path(place, "../data").read_text() == "data"
    assert not parent.exists() and (tmp_path / "project/train.py").exists()


def test_the_steps_of_the_kills_are_those_of_a_seed():
    for count, first, last, gap in ((3, 2, 20, 4), (1, 5, 5, 1), (9, 1, 4, 1)):
        steps = trial.choose_steps(count, first, last, gap)
        assert steps == sorted(steps) == trial.choose_steps(count, first, last, gap)
        assert len(steps) == min(count, -(-(last + 1 - first) // gap))
        assert all(first <= step <= last for step in steps)
        assert len({int(step - first) // gap for step in steps}) == len(steps), "each in a part of its own"
    assert trial.choose_steps(3, 1, 100) != trial.choose_steps(3, 1, 100, seed=1)
    tries = trial.choose_tries(2, 1, 21)
    assert [max(steps) <= last for steps, last in zip(tries, (21, 11, 1), strict=True)] == [True] * 3

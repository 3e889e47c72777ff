"""What the records of an old run tell about steps that were computed again: the shards that differ."""

import json
import re

import numpy as np
import pytest

from bootfile.ground.errors import BadInput
from bootfile.ground.files import append_lines
from bootfile.histories import write_shards
from bootfile.history import audit, parent
from bootfile.records import STARTS, write_state

OLD = {5: [1, 2, 3, 4], 6: [5, 6, 7, 8]}
STATE = {"step": 6, "format": 2, "digest": "aa", "parts": {"model.fc": "1"}}
OTHER = STATE | {"digest": "bb", "parts": {"model.fc": "2"}}


@pytest.mark.parametrize(
    "new, line, expected",
    [
        # a fault in one shard, before another one
        (
            {5: [1, 2, 9, 4], 6: [0, 0, 0, 0]},
            OTHER,
            r"shard 2 \(rank 2 of 3\) .*step 5 .*other gradients.* step 6\b",
        ),
        ({6: [0, 6, 0, 0]}, OTHER, r"shards 0 \(rank 0 of 3\), 2 \(rank 2 of 3\), 3 \(rank 2 .*step 6\b"),
        ({5: OLD[5], 6: [0, 0, 0, 0]}, OTHER, r"all 4 shards .*step 6 .*other gradients.* state\b"),
        ({5: OLD[5], 6: [5, 6, 0, 8]}, STATE, r"step 6 .*other gradients.*step 6 is the same\."),
        (OLD, OTHER, r"\(model\.fc, digest bb for aa\).*all shards .*steps 5-6 .*\bsame\b"),
        (OLD, STATE, ""),
        # nothing is known of the shards of step 5
        ({6: OLD[6]}, OTHER, r"\(model\.fc, digest bb for aa\)\. "),
        ({5: [1], 6: [2]}, OTHER, r"\(model\.fc, digest bb for aa\)\. "),
        # steps that are not asked for
        ({4: [0, 0, 0, 0], 7: [0, 0, 0, 0]}, STATE, ""),
    ],
)
def test_the_first_shards_that_differ_are_named(new, line, expected, tmp_path, monkeypatch):
    run = make_parent(monkeypatch, world_size=3)
    write_shards(str(tmp_path), new)
    shown = run.check(str(tmp_path), 6, line)
    assert re.search(expected, shown) and bool(shown) == bool(expected)


def test_a_rank_of_an_elastic_job_is_not_known(tmp_path, monkeypatch):
    run = make_parent(monkeypatch, world_size=2, elastic=True)
    write_shards(str(tmp_path), {5: [1, 2, 9, 4]})
    assert "differ: shard 2 of step 5 had" in run.check(str(tmp_path), 6, OTHER)


@pytest.mark.parametrize("asked", [None, 2])
def test_the_step_is_the_one_that_is_asked_for_also_with_recorded_shards(asked, tmp_path, monkeypatch):
    monkeypatch.setattr(parent.Parent, "_find_state", lambda self, paths, step: ("step_4.pt", 4, "run"))
    start = {"step": 0, "settings": {"recheck": 1}, "environment": {}, "script": "job.py"}
    append_lines(str(tmp_path / STARTS), json.dumps(start) + "\n")
    write_state(str(tmp_path), STATE)
    write_shards(str(tmp_path), OLD)
    assert parent.Parent(str(tmp_path), asked).step == (asked or 4)


def test_one_process_is_named_where_the_default_is_the_number_of_gpus():
    run = parent.Parent.__new__(parent.Parent)
    run.start = {"settings": {"processes_per_node": None}}
    assert run.name_processes(1) == ["--processes_per_node=1"]
    run.start = {"settings": {}}  # a job without this option
    assert run.name_processes(1) == [] and run.name_processes(2) == ["--processes_per_node=2"]


def test_only_intervals_with_a_named_step_are_computed():
    every = [audit.Interval(first, first + 10) for first in (0, 10, 20, 30)]
    chosen = audit.choose(every, parent.parse_steps("--steps", "7,31-35"), "RUN")
    assert [(interval.before, interval.last) for interval in chosen] == [(0, 10), (30, 35)]
    with pytest.raises(BadInput, match=r"^--steps 41-42: 1-40 of RUN can be computed"):
        audit.choose(every, parent.parse_steps("--steps", "41-42"), "RUN")


def make_parent(monkeypatch, world_size: int, **settings) -> parent.Parent:
    """Return a run with the steps 5 and 6 after its state."""
    records = np.zeros(0, [("step", int), ("sums", np.uint64, 3)])
    monkeypatch.setattr(parent, "read_records", lambda folder: records)
    run = parent.Parent.__new__(parent.Parent)
    run.folder = "RUN"
    run.state = 4
    run.step = 6
    run._records = {}
    run._digests = {6: STATE}
    run._shards = {4: [1, 1, 1, 1], **OLD, 7: [1, 1, 1, 1]}
    run._known = [{"step": 0, "settings": settings, "environment": {"world size": world_size}}]
    return run

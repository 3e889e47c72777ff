"""The files of lines in a run's folder: what is missing, damaged, of another form, or cannot be read."""

import json
import re

import pytest

from bootfile import histories, records
from bootfile.ground.errors import BadInput
from bootfile.histories import cut_shards, read_shards, write_shards
from bootfile.history import audit
from bootfile.records import SHARDS

START = {"step": 0, "settings": {"seed": 1}, "environment": {}}
STATE = {"step": 4, "format": 2, "digest": "aa", "parts": {"model.w": "1"}}
WEIGHTS = {"file": "best.pth", "size": 3, "sum": "77"}
SUMS = {"step": 4, "shards": [7]}
READERS = {  # file -> (reader, a line, what is read of it)
    records.STARTS: (records.read_starts, START, [START]),
    records.STATES: (histories.read_states, STATE, {4: STATE}),
    records.SHARDS: (histories.read_shards, SUMS, {4: [7]}),
}
OTHER_FORMS = [
    {}, SUMS | {"step": "4"}, START | {"step": None}, START | {"settings": []},
    STATE | {"parts": []}, STATE | {"step": True}, WEIGHTS | {"size": "3"}, SUMS | {"shards": 7},
]  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_a_missing_file_has_no_lines(name, tmp_path):
    assert not READERS[name][0](str(tmp_path))


@pytest.mark.parametrize("name", READERS)
def test_lines_that_are_damaged_or_of_another_form_are_left_out(name, tmp_path):
    read, line, expected = READERS[name]
    lines = [*map(json.dumps, [*OTHER_FORMS, line]), "[1]", "no", '{"step": 5, "sha']
    (tmp_path / name).write_text("\n".join(lines))
    assert read(str(tmp_path)) == expected


@pytest.mark.parametrize("name", [records.STARTS, records.STATES])
def test_a_verdict_refuses_damaged_lines_with_their_number(name, tmp_path):
    read, line, expected = READERS[name]
    (tmp_path / name).write_text(json.dumps(line) + "\n\n")
    assert read(str(tmp_path), whole=True) == expected
    with open(tmp_path / name, "a") as file:
        file.write('{"step": 5, "di')
    with pytest.raises(BadInput, match=rf"{re.escape(str(tmp_path / name))}: 1 of 2 lines .*delete"):
        read(str(tmp_path), whole=True)


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_cannot_be_read_is_bad_input(name, tmp_path):
    (tmp_path / name).mkdir()
    with pytest.raises(BadInput, match=rf"{name} cannot be read: Is a directory"):
        READERS[name][0](str(tmp_path))


@pytest.mark.parametrize("name", [records.STARTS, records.STATES])
def test_an_audit_does_not_pass_over_a_damaged_line(name, tmp_path):
    (tmp_path / records.STARTS).write_text(json.dumps(START) + "\n")
    (tmp_path / records.STATES).write_text(json.dumps(STATE) + "\n")
    assert [str(each) for each in audit.read_records(str(tmp_path)).intervals] == ["steps 1-4"]
    with open(tmp_path / name, "a") as file:
        file.write('{"step": 5, "di')
    with pytest.raises(BadInput, match=rf"{name}: 1 of 2 lines"):
        audit.read_records(str(tmp_path))


def test_weights_and_states_share_a_file(tmp_path):
    for line in (STATE, WEIGHTS, STATE | {"step": 8}, STATE | {"digest": "bb"}):
        records.write_state(str(tmp_path), line)
    assert histories.read_weights(str(tmp_path)) == {"best.pth": [(3, "77")]}
    records.cut_states(str(tmp_path), 4)
    lines = (tmp_path / records.STATES).read_text().splitlines()
    assert [*map(json.loads, lines)] == [WEIGHTS, STATE | {"digest": "bb"}]


@pytest.mark.parametrize("repeats", [False, True])
def test_reports_after_a_step_are_deleted(repeats, tmp_path):
    reports = [{"step": step, "loss": 1.0, "time": step} for step in (1, 2, 3, 4)]
    evaluation = {"step": 2, "val_loss": 1.0, "time": 2.5}
    lines = [json.dumps(line) for line in (*reports[:2], evaluation, *reports[2:])]
    (tmp_path / records.METRICS).write_text("\n".join([*lines, '{"step": 5, "lo']))
    assert histories.cut_reports(str(tmp_path), 2, repeats) == {"step": 4, "time": 4}
    kept = records.read_lines(str(tmp_path), records.METRICS, whole=True)
    assert kept == reports[: 1 if repeats else 2]


def test_a_resumed_run_writes_later_steps_again(tmp_path):
    folder = str(tmp_path)
    cut_shards(folder, 3)
    assert read_shards(folder) == {} and not (tmp_path / SHARDS).exists()
    write_shards(folder, {1: [7, 2**48 - 1], 2: [8, 9]})
    write_shards(folder, {3: [1, 2]})
    with open(tmp_path / SHARDS, "a") as file:
        file.write('{"step": 4, "sha')  # a kill has cut it
    cut_shards(folder, 2)
    write_shards(folder, {3: [5, 6]})
    assert read_shards(folder) == {1: [7, 2**48 - 1], 2: [8, 9], 3: [5, 6]}
    assert len((tmp_path / SHARDS).read_text().splitlines()) == 3

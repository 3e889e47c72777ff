"""A damaged checkpoint file is refused with its reason, and no other file is lost."""

import os
import pickle
import random
import signal
import textwrap
import time

import pytest
import torch

from bootfile.exact import checked_files, former
from bootfile.exact import files as checkpoint
from bootfile.exact.files import Refused
from bootfile.exact.saver import Saver
from bootfile.ground.files import write_atomic
from tests.conftest import start
from tests.support.hostile_pickle import Hostile


def _state(step: int = 1) -> dict:
    return {"format": 1, "step": step, "objects": {"model": {"weight": torch.full((40, 30), float(step))}}}


def _write(folder, step: int = 1, run: str = "a") -> str:
    path = str(folder / checkpoint.name_of(step))
    checkpoint.write(path, _state(step), step=step, run=run)
    return path


def test_what_is_written_is_read(tmp_path):
    path = _write(tmp_path, 7)
    state = checked_files.read(path)
    assert state["step"] == 7 and torch.equal(state["objects"]["model"]["weight"], torch.full((40, 30), 7.0))
    facts = checked_files.verify(path)
    assert facts["size"] == os.path.getsize(path) and facts["run"] == "a"
    assert sorted(os.listdir(tmp_path)) == ["step_7.pt", "step_7.pt.json"]


def _flip(path, place=None, bit=0) -> None:
    """Flip a bit of a byte, of that in the middle if no place is given."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= 1 << bit
    path.write_bytes(content)


def test_every_single_bit_flip_is_found(tmp_path):
    path, draw = _write(tmp_path), random.Random(0)
    sizes = {file: file.stat().st_size for file in tmp_path.iterdir()}
    for _ in range(1000):
        [file] = draw.choices([*sizes], weights=sizes.values())
        bit = draw.randrange(sizes[file]), draw.randrange(8)
        _flip(file, *bit)
        with pytest.raises(Refused):
            checked_files.read(path)
        _flip(file, *bit)
    checked_files.read(path)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: content[:-100], r"it has \d+ bytes, expected \d+"),
        (lambda content: content[:-5000] + bytes(5000), "it changed .*checksum"),
    ],
)
def test_damage_is_found(tmp_path, damage, reason):
    path = tmp_path / "step_1.pt"
    _write(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(Refused, match=reason):
        checked_files.verify(str(path))


def test_a_state_of_an_earlier_format():
    """One of version 0.47 to 0.50 gets the fields that it lacks; an earlier one is refused with the version
    that reads it."""
    state = {"format": 2, "step": 1, "code": {}}
    former.upgrade(state)
    assert state == {"format": 3, "step": 1, "code": {}, "attributes": {}, "epoch_ended": False}
    former.upgrade(state)
    with pytest.raises(Refused, match=r"0\.46 .*0\.50\.0"):
        former.upgrade({"format": 2, "step": 1})


def test_a_checkpoint_with_the_checksum_of_before(tmp_path):
    """Its bytes are verified as version 0.51 and earlier summed them."""
    path = _write(tmp_path)
    facts = checked_files.facts_of(path)
    _, added = checked_files.sum_file(path, is_former=True)
    assert facts["sum"].startswith("crc32:") and len(added) == 16
    checkpoint.write_facts(path, facts | {"sum": added})
    assert checked_files.read(path)["step"] == 1
    _flip(tmp_path / "step_1.pt")
    with pytest.raises(Refused, match="checksum differs"):
        checked_files.verify(path)


def test_a_checkpoint_without_its_checksum_is_refused(tmp_path):
    path = _write(tmp_path)
    os.unlink(f"{path}.json")
    with pytest.raises(Refused, match=r"its checksum step_1.pt.json cannot be read"):
        checked_files.read(path)
    with open(f"{path}.json", "w") as file:
        file.write("[" * 100_000)
    with pytest.raises(Refused, match=r"its checksum step_1.pt.json is damaged"):
        checked_files.read(path)


@pytest.mark.parametrize("save", [torch.save, lambda value, file: pickle.dump(value, file)])
def test_a_hostile_pickle_executes_nothing(tmp_path, save):
    path, target = _write(tmp_path), tmp_path / "executed"
    with open(path, "wb") as file:
        save({"format": 1, "step": Hostile(os.mkdir, str(target))}, file)
    size, added = checked_files.sum_file(path)
    write_atomic(f"{path}.json", checkpoint.seal({"sum": added, "size": size}))
    checked_files.verify(path)
    with pytest.raises(Refused, match=r"torch cannot load it|writes a zip file"):
        checked_files.read(path)
    assert not target.exists()


def test_order_is_numeric_and_the_last_ones_stay(tmp_path):
    for step in (9, 100, 20, 10):
        path = _write(tmp_path, step)
    names = [os.path.basename(each) for each in checkpoint.list_newest_first(str(tmp_path))]
    assert names == ["step_100.pt", "step_20.pt", "step_10.pt", "step_9.pt"]
    assert checkpoint.list_newest_first(str(tmp_path / "nowhere")) == []
    (tmp_path / "notes.txt").write_text("of the user")
    checkpoint.keep(path, 2, Saver(str(tmp_path), 2, print)._is_whole)  # it was just written, and stays
    names = {"notes.txt", "step_10.pt", "step_10.pt.json", "step_100.pt", "step_100.pt.json"}
    assert set(os.listdir(tmp_path)) == names


def test_a_writer_killed_at_any_moment_leaves_whole_files(tmp_path):
    script = textwrap.dedent(f"""
        import torch
        from bootfile.exact import files as checkpoint
        state = {{"weight": torch.zeros(1_000_000)}}
        for step in range(1, 10**6):
            checkpoint.write(f"{tmp_path}/step_{{step}}.pt", state, step=step, run="a")
            print(step, flush=True)
    """)
    draw = random.Random(1)
    writer = start("-c", script)
    try:
        for _ in range(3):
            writer.stdout.readline()
        time.sleep(draw.uniform(0, 0.1))
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    paths = checkpoint.list_newest_first(str(tmp_path))
    assert len(paths) >= 3
    for path in paths:
        checked_files.read(path)


@pytest.mark.parametrize("damaged", [(), (2,), (2, 3), (3, 4), (1, 2, 3, 4)])
def test_damaged_checkpoints_do_not_count(tmp_path, damaged):
    """Damaged checkpoints are removed only if there are enough whole ones. The newest was just written."""
    for step in (1, 2, 3, 4, 5):
        _write(tmp_path, step)
    for step in damaged:
        _flip(tmp_path / f"step_{step}.pt")
    is_whole = Saver(str(tmp_path), 3, print)._is_whole
    checkpoint.keep(str(tmp_path / "step_5.pt"), 3, is_whole)
    whole = [step for step in (5, 4, 3, 2, 1) if step not in damaged][:3]
    there = {int(path.stem[5:]) for path in tmp_path.glob("step_*.pt")}
    assert there == set(whole) | (set(damaged) if len(whole) < 3 else set())
    (tmp_path / "step_5.pt").write_bytes(b"cut")  # the file changed after it was found to be whole
    checkpoint.keep(_write(tmp_path, 6), 2, is_whole)
    assert (tmp_path / "step_6.pt").exists()
    assert (tmp_path / "step_5.pt").exists() == (len(whole) < 2)

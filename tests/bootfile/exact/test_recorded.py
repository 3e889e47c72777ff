"""A checkpoint is used only if it is the state that the run in its folder has recorded."""

import os
import shutil

import pytest
import torch

from bootfile.exact import checked_files, digest, files, recorded
from bootfile.records import STATES, cut_states, write_state
from tests.conftest import names

STEPS = (10, 20, 30)


def state(step: int, run: str, value: float) -> dict:
    weight = torch.full((4,), value)
    optimizer = {"state": {0: {"momentum_buffer": weight / 2}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    return {"step": step, "run": run, "objects": {"model": {"weight": weight}, "optimizer": optimizer}}


def save(folder, step: int, run: str, value: float, is_recorded: bool = True) -> str:
    content = state(step, run, value)
    path = str(folder / "checkpoints" / files.name_of(step))
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if is_recorded:
        write_state(str(folder), digest.summarize(step, content["objects"]) | {"run": run})
    files.write(path, content, step=step, run=run)
    return path


@pytest.fixture
def folder(tmp_path):
    """Return the folder of the run "ours", which has three states."""
    for step in STEPS:
        save(tmp_path, step, "ours", step)
    return tmp_path


def test_the_states_of_a_run_are_its_own(folder):
    for step in STEPS:
        path = str(folder / "checkpoints" / files.name_of(step))
        assert recorded.verify(path)["run"] == "ours"
    # one that was saved although its line could not be written
    assert recorded.verify(save(folder, 25, "ours", 1, is_recorded=False))
    # a folder with checkpoints only records nothing
    os.unlink(folder / STATES)
    assert recorded.verify(save(folder, 30, "theirs", 1, is_recorded=False))


@pytest.mark.parametrize("step", [20, 25, 40])
def test_a_state_of_another_run_is_refused_with_both_names(folder, step):
    """Also at a step that the run has not recorded."""
    path = save(folder, step, "theirs", step, is_recorded=False)
    with pytest.raises(files.Refused) as refused:
        recorded.verify(path)
    assert names(str(refused.value), "theirs", "ours", "--from", f"--weights {path}")


def test_a_run_that_continued_another_one_in_its_folder_owns_the_later_steps(folder):
    """--resume FILE begins a new run: the steps before it are still those of the first one."""
    cut_states(str(folder), 20)
    save(folder, 40, "second", 40)
    assert recorded.verify(str(folder / "checkpoints" / files.name_of(20)))
    assert recorded.verify(str(folder / "checkpoints" / files.name_of(40)))
    with pytest.raises(files.Refused, match="another run"):  # the first one has left it
        recorded.verify(str(folder / "checkpoints" / files.name_of(30)))


def test_a_value_that_was_changed_is_named(folder):
    path = str(folder / "checkpoints" / files.name_of(20))
    whole = checked_files.read(path)
    whole["objects"]["optimizer"]["state"][0]["momentum_buffer"][0] += 1
    files.write(path, whole, step=20, run="ours")
    with pytest.raises(files.Refused) as refused:
        recorded.verify(path)
    assert names(str(refused.value), "step 20", "optimizer.state.0.momentum_buffer", "altered")


def test_a_state_under_another_name_is_refused(folder):
    place = folder / "checkpoints"
    shutil.copy(place / "step_20.pt", place / "step_30.pt")
    with pytest.raises(files.Refused):
        recorded.verify(str(place / "step_30.pt"))
    shutil.copy(place / "step_20.pt.json", place / "step_30.pt.json")
    with pytest.raises(files.Refused, match="step 20"):
        recorded.verify(str(place / "step_30.pt"))


def test_files_of_weights_have_a_record(tmp_path):
    """best.pth is written several times: each version of the run is one of its own."""
    path = str(tmp_path / "best.pth")
    kept = str(tmp_path / "kept")
    files.write_weights(path, {"weight": torch.zeros(3)})
    shutil.copy(path, kept)
    files.write_weights(path, {"weight": torch.ones(3)})
    recorded.check_weights(path)
    shutil.copy(kept, path)
    recorded.check_weights(path)
    cut_states(str(tmp_path), 0)  # a restart keeps the files, and what is recorded of them
    recorded.check_weights(path)
    torch.save({"weight": torch.ones(3) * 2}, path)
    with pytest.raises(files.Refused, match="altered or replaced"):
        recorded.check_weights(path)
    recorded.check_weights(kept)  # not written by the run under this name

"""A sparse row of old states stays next to the newest ones, and the run says how much disk it takes."""

import re

import pytest
import torch

from bootfile.exact import checked_files, files, ladder
from common.checkpoint import options
from tests.conftest import QUICK, ROOT, environment, free_port, refused, run, run_ranks
from tests.support.exact import is_whole
from tests.support.small_disk import small_disk

SHORT = (*QUICK, "--batch_size=128", "--epoch_steps=6", "--epochs=4", "--evaluate_every=0")
PATH = environment(PYTHONPATH=str(ROOT))
LOOP = (ROOT / "guides" / "own_loop" / "any_number.py").read_text()


def write(folder, step: int) -> str:
    path = str(folder / files.name_of(step))
    files.write(path, {"step": step, "weight": torch.full((400,), float(step))}, step=step, run="a")
    return path


def damage(path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def steps(folder) -> list[int]:
    return sorted(files.step_of(path) for path in files.list_newest_first(str(folder)))


def test_the_next_state_takes_the_place_of_one_that_is_missing_or_damaged(tmp_path):
    for step in (8, 10, 12, 14, 22, 24, 30):  # that of step 20 could not be saved
        path = write(tmp_path, step)
        if step == 12:
            damage(tmp_path / "step_10.pt")
        files.keep(path, 1, is_whole, 10)
    assert steps(tmp_path) == [10, 12, 22, 30]  # the damaged one is left as it is
    checked_files.verify(str(tmp_path / "step_12.pt"))


def test_a_killed_save_and_a_full_disk_leave_the_row(tmp_path):
    with small_disk(tmp_path / "tiny", "80k") as folder:
        for step in (10, 11, 20, 21):
            files.keep(write(folder, step), 1, is_whole, 10)
        (folder / "step_30.pt.json").write_text("of a save that was killed")
        with pytest.raises(OSError, match="No space left on device"):
            files.write(str(folder / "step_30.pt"), {"weight": torch.zeros(100_000)}, step=30, run="a")
        assert steps(folder) == [10, 20, 21]
        for path in files.list_newest_first(str(folder)):
            checked_files.verify(path)


def test_the_numbers_of_an_optimizer_are_those_after_its_first_step():
    """The line about the disk is printed before the optimizer has a state."""
    for name, kind in vars(torch.optim).items():
        if name not in {*ladder._NUMBERS, "SGD"}:
            continue
        for more in ({}, {"momentum": 0.9}, {"amsgrad": True}, {"centered": True}):
            model = torch.nn.Linear(30, 40)
            try:
                optimizer = kind(model.parameters(), lr=0.1, **more)
            except TypeError:  # it has no such option
                continue
            expected = ladder._size_of_later(optimizer)
            model(torch.ones(1, 30)).sum().backward()
            optimizer.step()
            sizes = [
                value.numel() * 4
                for state in optimizer.state.values()
                for value in state.values()
                if isinstance(value, torch.Tensor) and value.numel() > 1
            ]
            assert expected == sum(sizes), (name, more)


def test_a_job_keeps_a_row_and_says_what_it_takes(tmp_path):
    command = ("jobs/train.py", *SHORT, "--save_every=2", "--keep=2", f"--output_dir={tmp_path}")
    first = run(*command, "--keep_every=5step", "--max_steps=20").stdout
    assert steps(tmp_path / "checkpoints") == [5, 10, 15, 18, 20]
    [line] = re.findall(r"^a state stays after every 5 steps.*$", first, re.MULTILINE)
    found = re.search(r"the newest 2: about (1\.\d+) MB each, 6 states and [\d.]+ MB after step 20$", line)
    size = (tmp_path / "checkpoints" / "step_20.pt").stat().st_size
    assert float(found[1]) * 1e6 == pytest.approx(size, rel=0.1)
    run(*command, "--max_steps=24")  # a restart without the option deletes none of them
    assert steps(tmp_path / "checkpoints") == [5, 10, 15, 20, 22, 24]
    run(*command, "--keep_every=0", "--epochs=5")
    assert steps(tmp_path / "checkpoints") == [28, 30]


@pytest.mark.thorough
def test_a_row_by_epochs_on_two_processes(tmp_path):
    words = (*SHORT, "--save_every=4", "--keep=1", "--keep_every=2epochs", f"--output_dir={tmp_path}")
    run_ranks("jobs/train_ddp.py", *words)
    assert steps(tmp_path / "checkpoints") == [12, 24]
    line = refused("jobs/train.py", *SHORT, "--keep_every=90s", f"--output_dir={tmp_path}/x")
    assert "90s" in line and "1000step" in line


def test_a_loop_of_ones_own_keeps_a_row(tmp_path):
    assert LOOP.count("save_every=10") == 1
    (tmp_path / "loop.py").write_text(LOOP.replace("save_every=10", "save_every=10, keep=1, keep_every=25"))
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shown = run("loop.py", "OUT", cwd=tmp_path, env=PATH | group).stdout
    assert "a state stays after every 25 steps, and the newest 1: about" in shown
    assert steps(tmp_path / "OUT" / "checkpoints") == [25, 50, 75, 93]


def test_a_distance_is_a_number_of_steps_or_epochs():
    assert str(options._distance("1000step")) == "1000step" and options._distance("0").steps(7) == 0
    assert options._distance("2epochs").steps(7) == 14

"""A folder of a run that is a link is refused: the run would continue and delete what is of another one."""

import shutil

import pytest
import torch

from bootfile.exact import checked_files, files
from tests.conftest import QUICK, ROOT, environment, free_port, refused, run

JOB = ("jobs/train.py", *QUICK, "--batch_size=240", "--save_every=1")


def contents(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.thorough
def test_a_job_refuses_a_link_to_the_checkpoints_of_another_run(tmp_path):
    other = tmp_path / "other"
    run(*JOB, "--max_steps=2", f"--output_dir={other}")
    before = contents(other)
    mine = tmp_path / "mine"
    mine.mkdir()
    for name in ("checkpoints", ".lease", ".mirror"):
        link = mine / name
        link.symlink_to(other / "checkpoints")
        line = refused(*JOB, "--max_steps=3", f"--output_dir={mine}")
        assert f"{link} is a link to {other / 'checkpoints'}" in line
        link.unlink()
    (mine / "checkpoints").symlink_to(tmp_path / "missing")  # of a disk that is not mounted
    assert "is a link to" in refused(*JOB, "--max_steps=3", f"--output_dir={mine}")
    assert contents(other) == before and [path.name for path in mine.iterdir()] == ["checkpoints"]

    (mine / "checkpoints").unlink()
    mine.rmdir()
    mine.symlink_to(other)  # the output folder itself may be a link
    assert "resumed from" in run(*JOB, "--max_steps=3", f"--output_dir={mine}").stdout


def test_an_own_loop_refuses_it_too(tmp_path):

    def train(folder, code: int | None = 0):
        variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "PYTHONPATH": str(ROOT)}
        environ = environment(**variables, MASTER_PORT=str(free_port()))
        return run("guides/own_loop/after.py", folder, env=environ, code=code)

    train(tmp_path / "other")
    before = contents(tmp_path / "other")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "checkpoints").symlink_to(tmp_path / "other" / "checkpoints")
    result = train(tmp_path / "mine", code=None)
    assert result.returncode and "is a link to" in result.stderr
    assert contents(tmp_path / "other") == before


def test_the_folder_of_a_sharded_checkpoint_that_is_a_link_is_not_read_or_emptied(tmp_path):
    other = tmp_path / "other.shards"
    other.mkdir()
    (other / "__0_0.distcp").write_bytes(b"x")
    path = str(tmp_path / "step_3.pt")
    facts = {"__0_0.distcp": [1, "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"]}
    files.write(path, {"objects": {"weight": torch.zeros(2)}, "shards": facts}, step=3, shards=facts)
    shutil.copytree(other, tmp_path / "step_3.shards")
    checked_files.verify(path)
    shutil.rmtree(tmp_path / "step_3.shards")
    (tmp_path / "step_3.shards").symlink_to(other)
    with pytest.raises(files.Refused, match=r"its folder step_3\.shards is a link"):
        checked_files.verify(path)
    files.discard(path)
    assert not (tmp_path / "step_3.shards").is_symlink() and contents(other) == {"__0_0.distcp": b"x"}


def test_a_link_that_is_made_while_the_run_trains_is_not_written_to(tmp_path):
    from bootfile.exact.saver import Saver

    lines = []
    saver = Saver(str(tmp_path / "mine"), 3, lines.append)
    for folder in ("mine", "other"):
        (tmp_path / folder).mkdir()
    (tmp_path / "mine" / "checkpoints").symlink_to(tmp_path / "other")
    state = {"format": 2, "step": 5, "objects": {"model": {"weight": torch.zeros(4)}, "optimizer": {}}}
    saver.save_checkpoint(5, "run", lambda: state, True)
    [reason] = saver.finish()
    assert "checkpoints is a link" in reason and not list((tmp_path / "other").iterdir())

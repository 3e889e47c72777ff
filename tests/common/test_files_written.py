"""Temporary files and folders: new names, and the permissions that the umask allows."""

import os
from pathlib import Path

import pytest
import torch

from common import files
from common.checkpoint import files as checkpoint
from datasets.folders import image_folder, random_folder
from tests.support import pictures


@pytest.mark.parametrize("umask", [0o077, 0o022, 0o027])
def test_what_is_written_has_the_permissions_of_the_umask(umask, tmp_path):
    """Checkpoints, weights, texts, generated images and indexes."""
    before = os.umask(umask)
    try:
        checkpoint.write(str(tmp_path / "step_1.pt"), {"step": 1}, step=1, run="a")
        checkpoint.write_weights(str(tmp_path / "best.pth"), {"weight": torch.zeros(1)})
        checkpoint.write_text(str(tmp_path / "latest"), "step_1.pt")
        folder = random_folder.make(str(tmp_path / "images"), lambda path: pictures.make(Path(path), 3, 0))
        index = image_folder.load(folder, "train", str(tmp_path / "cache"))
    finally:
        os.umask(before)
    for name in ("step_1.pt", "step_1.pt.json", "best.pth", "latest"):
        assert os.stat(tmp_path / name).st_mode & 0o777 == 0o666 & ~umask, name
    for path in (folder, index.folder):
        assert os.stat(path).st_mode & 0o777 == 0o777 & ~umask, path


def test_names_are_new(tmp_path):
    (handle, path), (other, another) = (files.make_file(".a-", str(tmp_path)) for _ in range(2))
    os.close(handle), os.close(other)
    folder = files.make_folder(".b-", str(tmp_path))
    assert path != another and os.path.isdir(folder)
    assert {os.path.basename(each)[:3] for each in (path, another, folder)} == {".a-", ".b-"}

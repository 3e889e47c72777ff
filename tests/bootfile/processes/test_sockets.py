"""The sockets of workers when TMPDIR has a long path, as home folders of clusters have."""

import multiprocessing
import os
import tempfile

import pytest

from bootfile.ground.errors import BadInput
from bootfile.processes import sockets
from tests.conftest import environment, run

LOOP = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
from bootfile import map_style_loader, torch_loader
from bootfile.sampling.sampler import BatchSampler

class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, id):
        return torch.full((1000,), float(id)), id

cpu = torch.device("cpu")
if sys.argv[1] == "ours":
    loader = map_style_loader(Items(), BatchSampler(16, 4, seed=0, epochs=1), cpu, workers=2)
else:
    loader = torch_loader(DataLoader(Items(), 4, num_workers=2), cpu)
for epoch in loader.epochs_from(0):
    print(sum(inputs.mean().item() for inputs, _ in loader))
loader.close()
"""


@pytest.mark.parametrize("kind", ["ours", "of torch"])
@pytest.mark.parametrize("length", [110, 200])
def test_workers_send_batches_whatever_the_length_of_tmpdir_is(kind, length, tmp_path):
    long = f"{tmp_path}/{'x' * (length - len(str(tmp_path)) - 1)}"
    os.makedirs(long)
    printed = run("-c", LOOP, kind, env=environment(TMPDIR=long))
    assert float(printed.stdout) == 30.0


def test_without_a_short_folder_tmpdir_is_named(monkeypatch):
    settings = multiprocessing.current_process()._config
    monkeypatch.delitem(settings, "tempdir", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", f"/{'y' * 109}")
    monkeypatch.setattr(sockets, "_PLACES", ("/no such folder",))
    with pytest.raises(BadInput, match=r"TMPDIR=/y+ .*\b110 bytes, .*TMPDIR .*\b71\b"):
        sockets.find_short_folder()


def test_the_folder_that_multiprocessing_has_made_is_short_enough(monkeypatch):
    """Its name is longer than that of TMPDIR, and is not added a second time."""
    made = f"/{'y' * 70}/pymp-12345678"
    settings = multiprocessing.current_process()._config
    monkeypatch.setitem(settings, "tempdir", made)
    sockets.find_short_folder()
    assert settings["tempdir"] == made


def test_a_folder_that_others_can_write_to_is_not_used(monkeypatch, tmp_path):
    settings = multiprocessing.current_process()._config
    monkeypatch.setitem(settings, "tempdir", f"/{'y' * 109}")
    places = [str(tmp_path / name) for name in ("open", "own")]
    monkeypatch.setattr(sockets, "_PLACES", places)
    for place in places:
        os.mkdir(place)
    shared = f"{places[0]}/bootfile-{os.geteuid()}"
    os.mkdir(shared)
    os.chmod(shared, 0o777)
    sockets.find_short_folder()
    assert settings["tempdir"] == f"{places[1]}/bootfile-{os.geteuid()}"
    assert os.stat(settings["tempdir"]).st_mode & 0o777 == 0o700

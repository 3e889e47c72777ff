"""The folder of a sharded checkpoint is read whole in one process, and nothing in it is executed."""

import json
import os
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bootfile.exact import checked_files, dtensor_files, files
from bootfile.ground.results import dtensor_folder
from tests.conftest import CAN_FORK
from tests.support.hostile_pickle import Hostile

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="sharded checkpoints need torch 2.6, too")


@pytest.fixture
def path(tmp_path):
    """Return a checkpoint with one tensor in its folder."""
    path = str(tmp_path / "step_3.pt")
    weight = torch.arange(6.0, dtype=torch.bfloat16).view(3, 2)
    writer = dcp.FileSystemWriter(dtensor_folder(path))
    dcp.save({"model.weight": weight}, storage_writer=writer, no_dist=True)
    folder = tmp_path / "step_3.shards"
    facts = {each.name: dtensor_files._facts_of(str(folder), each.name) for each in folder.iterdir()}
    objects = {"model": {"weight": torch.empty_like(weight, device="meta"), "count": torch.tensor(7)}}
    files.write(path, {"objects": objects, "shards": facts}, step=3, shards=facts)
    return path


def test_a_process_reads_all_tensors_and_a_rank_their_shapes(path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = checked_files.read(path)["objects"]["model"]
    assert model["weight"].tolist() == [[0, 1], [2, 3], [4, 5]] and model["count"].item() == 7
    state = checked_files.read(path, whole=False)
    assert state["shards"] == path and state["objects"]["model"]["weight"].is_meta


def test_a_shard_that_is_damaged_or_missing_is_refused(path):
    shard = os.path.join(dtensor_folder(path), "__0_0.distcp")
    with open(shard, "ab") as file:
        file.write(b"0")
    with pytest.raises(files.Refused, match=r"its file __0_0\.distcp has \d+ bytes, expected \d+"):
        checked_files.read(path)
    os.unlink(shard)
    with pytest.raises(files.Refused, match=r"its file __0_0\.distcp cannot be read"):
        checked_files.read(path)
    files.discard(path)
    assert os.listdir(os.path.dirname(path)) == []


def test_a_failed_write_names_the_rank(tmp_path):
    (tmp_path / "step_3.shards").touch()
    with pytest.raises(RuntimeError, match=r"rank 0: .*File exists"):
        dtensor_files.save(str(tmp_path / "step_3.pt"), {"model": {}})


@pytest.mark.parametrize("function", [os.mkdir, "eval"], ids=str)
def test_a_program_in_the_metadata_is_not_executed(function, path, tmp_path):
    made, metadata = tmp_path / "made", os.path.join(dtensor_folder(path), ".metadata")
    call = Hostile(eval, f"__import__('os').mkdir({str(made)!r})") if function == "eval" else None
    with open(metadata, "wb") as file:
        pickle.dump(call or Hostile(function, str(made)), file)
    with pytest.raises(files.Refused, match=r"is not expected in \.metadata|torch cannot load it"):
        checked_files.load(path)
    assert not made.exists()


@pytest.mark.parametrize(
    "changed",
    [
        {"shards": {"../../other": [1, "0" * 64]}},
        {"shards": {"..": [1, "0" * 64]}},
        {"shards": {"a": ["1", "0" * 64]}},
        {"shards": {"a": [1]}},
        {"shards": {"a": 5}},
        {"shards": ["a"]},
        {"shards": None},
        {"keep_every": "all"},
        {"size": "1"},
        {"sum": 1},
    ],
    ids=json.dumps,
)
def test_facts_of_another_form_and_names_outside_of_the_folder_are_refused(path, changed):
    facts = checked_files.facts_of(path)
    files.write_facts(path, facts | changed)
    with pytest.raises(files.Refused, match=r"its checksum .* is damaged"):
        checked_files.read(path)

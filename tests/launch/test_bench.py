"""`python -m launch bench loaders` measures every loader, and writes a table or JSON."""

import json

import pytest
import torch

from common.ground.exits import BadInput
from datasets.folders import random_folder
from datasets.loaders import backends
from launch import bench
from tests.conftest import run

BENCH = ("-m", "launch", "bench")
QUICK = ("--rounds=1", "--seconds=0.2", "--arch=resnet18", "--image_size=32", "--batch_size=16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_folder.make(str(tmp_path_factory.mktemp("data") / "images"))


def test_rows_of_all_loaders_as_json_and_as_a_table(folder, tmp_path, capsys):
    result = run(
        *BENCH, "loaders", *QUICK, f"--data_url={folder}", f"--cache_dir={tmp_path}", "--json",
        f"--pack={tmp_path / 'pack'}",
    )  # fmt: skip
    assert "dali-gpu: it needs a GPU" in result.stderr or torch.cuda.is_available()
    measured = json.loads(result.stdout)
    rows = {row["backend"]: row for row in measured["rows"]}
    here = {name for name, reason in backends.reasons(torch.device("cpu")).items() if not reason}
    assert {name.removesuffix(" + pack") for name in rows} == here and "threads + pack" in rows
    assert rows["pytorch"]["ratio"] == 1 and measured["choice"] in rows.keys() - {"synthetic"}
    for row in rows.values():
        assert row["warm"] > 0 and row["bytes"] > 1e8 and 0 <= row["wait"] <= 1
        if row["backend"] == "synthetic":  # it reads nothing
            assert row["cold"] is row["wait_cold"] is None
        else:
            assert row["cold"] > 0 and 0 <= row["wait_cold"] <= 1
        assert 0 < row["cores"] < 64 and row["spread"][0] <= row["warm"] <= row["spread"][1]

    bench._print(measured)
    *table, computes, choice = capsys.readouterr().out.splitlines()
    synthetic = next(line.split() for line in table if line.startswith("synthetic "))
    assert synthetic[3] == synthetic[7] == "-"  # cold, wait cold
    assert computes.startswith("resnet18 computes ") and choice == f"choice: {measured['choice']}"


@pytest.mark.parametrize("arguments, message", [
    (["loaders"], "the following arguments are required: --data_url"),
    (["loaders", "--data_url=/does/not/exist"], "/does/not/exist does not exist or is not a folder"),
    (["loaders", "--data_url=.", "--arch=nothing"], "--arch: nothing is not a torchvision classifier"),
    (["speed"], "unknown benchmark 'speed': expected loaders"),
    ([], "unknown benchmark '': expected loaders"),
])  # fmt: skip
def test_bad_input(arguments, message):
    with pytest.raises(BadInput) as error:
        bench.main(arguments)
    assert message in str(error.value)

"""`python -m launch bench loaders` measures every loader, and prints a table."""

import re

import pytest
import torch

from bootfile.ground.errors import BadInput
from datasets.folders import random_folder
from datasets.loaders import backends
from launch import bench
from tests.conftest import run

BENCH = ("-m", "launch", "bench")
QUICK = ("--rounds=1", "--seconds=0.2", "--arch=resnet18", "--image_size=32", "--batch_size=16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_folder.make(str(tmp_path_factory.mktemp("data") / "images"))


def test_a_row_of_each_loader_and_the_choice(folder, tmp_path):
    result = run(
        *BENCH, "loaders", *QUICK, f"--data_url={folder}", f"--cache_dir={tmp_path}",
        f"--pack={tmp_path / 'pack'}",
    )  # fmt: skip
    assert "dali-gpu: it needs a GPU" in result.stderr or torch.cuda.is_available()
    *table, computes, choice = result.stdout.splitlines()
    rows = {
        match[1]: match.groups()[1:]
        for line in table
        if (
            match := re.match(
                r"(\S+(?: \+ pack)?) +(\d+) +(\d+)-(\d+) +([\d.]+)x +(\S+) +(\S+)% +(\S+)$", line
            )
        )
    }
    here = {name for name, reason in backends.reasons(torch.device("cpu")).items() if not reason}
    assert {name.removesuffix(" + pack") for name in rows} == here and "threads + pack" in rows
    assert rows["pytorch"][3] == "1.0" and choice.removeprefix("choice: ") in rows.keys() - {"synthetic"}
    for name, (warm, least, most, _, cold, wait, wait_cold) in rows.items():
        assert 0 < int(least) <= int(warm) <= int(most) and 0 <= float(wait) <= 100
        assert (cold == wait_cold == "-") == (name == "synthetic"), "it reads nothing"
    assert computes.startswith("resnet18 computes ")


@pytest.mark.parametrize("arguments, message", [
    (["loaders"], "the following arguments are required: --data_url"),
    (["loaders", "--data_url=/does/not/exist"], "/does/not/exist does not exist"),
    (["loaders", "--data_url=.", "--arch=nothing"], "--arch: nothing is not a torchvision classifier"),
    (["speed"], "argument benchmark: invalid choice: 'speed' (choose from "),
    ([], "the following arguments are required: benchmark"),
])  # fmt: skip
def test_bad_input(arguments, message):
    with pytest.raises(BadInput) as error:
        bench.main(arguments)
    assert message in str(error.value)

"""The benchmarks `throughput` and `batch_size` print their figures next to those of the DALI article."""

import argparse
import json
import math

import pytest
import torch
from PIL import Image

from datasets.folders import random_folder
from datasets.loaders import backends
from datasets.memory import cifar10
from tests.benchmarks import batch_size, generated
from tests.conftest import run

BATCH_SIZE = ("-m", "tests.benchmarks.batch_size")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_folder.make(str(tmp_path_factory.mktemp("data") / "images"))


def test_the_job_s_own_throughput_beside_the_article(folder, tmp_path):
    other = "threads" if backends.reasons(torch.device("cpu"))["dali"] else "dali-cpu"
    result = run(
        "-m", "tests.benchmarks.throughput", f"--data_url={folder}", f"--cache_dir={tmp_path}",
        f"--backends=pytorch,{other}", "--batch_size=16", "--prof=2", "--rounds=1", "--image_size=32",
        "--workers=1",
    )  # fmt: skip
    table = [line.split() for line in result.stdout.splitlines()[-2:]]
    rates = {row[0]: row[1:] for row in table}
    assert rates["pytorch"][1:] == ["1.00x", "1058", "1.00x"] and float(rates["pytorch"][0]) > 0
    if "dali" in rates:
        assert rates["dali"][2:] == ["1816", "1.72x"]


@pytest.mark.faults
def test_the_largest_batch_that_a_limit_on_memory_allows(tmp_path):
    for split in ("train", "val"):
        (tmp_path / split / "black").mkdir(parents=True)
        for number in range(600):
            Image.new("RGB", (64, 64)).save(tmp_path / split / "black" / f"{number}.jpg")
    found = json.loads(run(
        *BATCH_SIZE, "--arch=resnet18", f"--data_url={tmp_path}", f"--cache_dir={tmp_path / 'c'}",
        "--json", "--backends=pytorch", "--image_size=64", "--step=192", "--memory=2.2", "--workers=1",
    ).stdout)  # fmt: skip
    sizes = found["batch_sizes"]["pytorch"]
    assert found["most"] == 576 and all(192 <= sizes[name] < 576 for name in ("resident", "released"))


@pytest.mark.parametrize("measured, tries", [(True, 10), (False, 18)])
@pytest.mark.parametrize("largest", [0, 16, 1216, 3008, 5120])
def test_few_tries_find_the_largest_batch(largest, measured, tries, monkeypatch):
    """The search needs few tries, with and without a GPU's report of the used memory."""
    tried = []

    def attempt(args, backend, resident, batch, seconds):
        tried.append(batch)
        used = 0.02 + 0.95 * batch * (1 + 0.005 * (batch % 7)) / (largest or 1)
        return batch <= largest, used if measured and batch <= largest else None

    monkeypatch.setattr(batch_size, "_try", attempt)
    args = argparse.Namespace(step=16)
    assert batch_size._largest(args, "dali", "resident", 5120, math.inf) == (largest, True)
    assert len(tried) <= tries and len(set(tried)) == len(tried)


def test_a_search_ends_in_time(monkeypatch):
    sizes = iter([(True, None), (True, None), (None, None)])
    monkeypatch.setattr(batch_size, "_try", lambda *args: next(sizes))
    args = argparse.Namespace(step=16)
    assert batch_size._largest(args, "dali", "resident", 5120, math.inf) == (32, False)


def test_generated_images_of_cifar_10_are_read(tmp_path):
    train, test = cifar10.load(generated.cifar_folder(str(tmp_path)), custom_data=False)
    assert (len(train), len(test)) == (50_000, 10_000)
    assert train.labels.bincount().tolist() == [5000] * 10


def test_a_batch_size_without_a_gpu_needs_a_limit(folder, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    command = (*BATCH_SIZE, f"--data_url={folder}", f"--cache_dir={tmp_path}")
    assert "no GPU found: --memory GB" in run(*command, code=2).stderr
    failed = run(*command, "--memory=4", "--backends=pytorch", "--image_size=9", "--arch=alexnet", code=2)
    assert "pytorch with 16 samples failed: " in failed.stderr and "--image_size 9" in failed.stderr


def test_the_job_s_prof_names_the_article(folder, tmp_path):
    printed = run(
        "jobs/imagenet.py", f"--data_url={folder}", f"--cache_dir={tmp_path}", "--prof=1", "--batch_size=16",
        "--image_size=32", "--arch=shufflenet_v2_x0_5", "--data_backend=threads", f"--output_dir={tmp_path}",
    ).stdout  # fmt: skip
    line = next(line for line in printed.splitlines() if line.startswith("prof: "))
    assert "images/s with threads, 1 batches" in line and "dali-gpu" not in line

"""Of the processes of a node one scans the images, and the others open its index, in real jobs."""

import re
import shutil
from pathlib import Path

import pytest

from datasets.folders import random_folder
from tests.conftest import refused, run_ranks

# A job that prints the folders that it lists and the files that it opens below sys.argv[1].
WATCHED = """
import os, runpy, sys
folder = sys.argv[1]
def watch(event, arguments):
    if event in ("os.scandir", "open") and isinstance(arguments[0], str):
        if os.path.abspath(arguments[0]).startswith(folder):
            os.write(1, f"\\n{event} {arguments[0]}\\n".encode())
sys.addaudithook(watch)
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
JOB = (
    "jobs/imagenet.py", "--arch=shufflenet_v2_x0_5", "--image_size=32", "--warmup=0", "--batch_size=32",
    "--training_only", "--data_backend=threads", "--save_every=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return random_folder.make(str(tmp_path_factory.mktemp("images") / "data"))


def watched(folder, *command, **options):
    """Run two ranks. Return, of each rank, (folders that it has listed, files that it has opened)."""
    results = run_ranks("-c", WATCHED, folder, *command, **options)
    return [
        [set(re.findall(rf"^{event} (.*)$", each.stdout, re.MULTILINE)) for event in ("os.scandir", "open")]
        for each in results
    ]


@pytest.mark.thorough
def test_one_process_of_a_node_looks_and_a_restart_reads_only_its_samples(images, tmp_path):
    job = (*JOB, f"--data_url={images}", f"--output_dir={tmp_path}")
    (listed, opened), (others_listed, others_opened) = watched(images, *job, "--max_steps=1")
    assert {*Path(images, "train").iterdir()} <= {*map(Path, listed)} and not others_listed
    assert len(opened) == 640 and len(others_opened) < 640
    (listed, opened), (others_listed, others_opened) = watched(images, *job, "--max_steps=2")
    assert {*Path(images, "train").iterdir()} <= {*map(Path, listed)} and not others_listed
    assert len(opened) < 640 and len(others_opened) < 640


@pytest.mark.thorough
def test_an_error_of_the_first_process_ends_all_with_one_line(images, tmp_path):
    shutil.copytree(images, tmp_path / "data")
    bad = tmp_path / "data" / "train" / "class_3" / "000.jpg"
    bad.write_bytes(b"<html>")
    job = (*JOB, f"--data_url={tmp_path / 'data'}", f"--output_dir={tmp_path / 'out'}")
    lines = [result.stderr.splitlines() for result in run_ranks(*job, code=2)]
    assert lines[0] == lines[1] and len(lines[0]) == 1
    assert re.search(rf"\b1 of 640 images .*{tmp_path}/data/train .*bad: {bad}: .*not ", lines[0][0])
    assert "1 of 640 images" in refused(*job, "--processes_per_node=2")


def test_one_process_of_a_node_looks_for_pairs(tmp_path):
    folder = random_folder.make_pairs(str(tmp_path / "pairs"))
    job = ("jobs/loader.py", f"--data_url={folder}", f"--output_dir={tmp_path / 'out'}", "--crop=32")
    (listed, _), (others_listed, _) = watched(folder, *job)
    assert f"{folder}/train/blurry/a" in listed and not others_listed


DIFFERENT_DISKS = """
import shutil, sys, torch
from datasets.folders import image_folder
from datasets.folders import image_folder
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
def load():
    index = image_folder.load(sys.argv[1], "train", f"{sys.argv[2]}/{rank}")
    shutil.rmtree(index.folder)  # the other rank does not see it
    return [index]
[index] = image_folder.load_on_nodes(sys.argv[1], load)
print("loaded", len(index), index.fingerprint, index.folder)
torch.distributed.barrier()
"""


def test_a_process_that_cannot_open_the_index_makes_its_own(images, tmp_path):
    results = run_ranks("-c", DIFFERENT_DISKS, images, tmp_path)
    found = [re.search(r"loaded 640 (\w+) .*/([01])/train", result.stdout).groups() for result in results]
    assert found[0][0] == found[1][0] and [rank for _, rank in found] == ["0", "1"]


LONG = """
import datetime, os, sys, time, torch
from bootfile.processes import ranks
from common.distributed import barrier
from datasets.folders import image_folder
barrier._BEAT = 0.2
image_folder.socket.gethostname = lambda: f"node {os.environ['RANK']}"
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
def load():
    index = image_folder.load(sys.argv[1], "train", f"{sys.argv[2]}/{rank}")
    ranks.store().set_timeout(datetime.timedelta(seconds=15))
    if rank:
        time.sleep(20)
    return [index]
[index] = image_folder.load_on_nodes(sys.argv[1], load)
print("loaded", len(index))
torch.distributed.barrier()
"""


@pytest.mark.thorough
def test_the_scan_of_one_node_may_take_longer_than_the_timeout(images, tmp_path):
    assert all("loaded 640" in result.stdout for result in run_ranks("-c", LONG, images, tmp_path))


# jobs/imagenet.py, whose second process opens its pack late, as a node with a slow disk does.
LATE = """
import os, runpy, sys, time
sys.path.insert(0, os.getcwd())
from datasets.stores import pack
build = pack.build
def build_late(*given):
    if os.environ["RANK"] == "1":
        time.sleep(90)
    return build(*given)
pack.build = build_late
runpy.run_path("jobs/imagenet.py", run_name="__main__")
"""


@pytest.mark.thorough
def test_a_node_may_write_its_pack_for_longer_than_the_timeout(images, tmp_path):
    folders = (f"--data_url={images}", f"--pack={tmp_path}", f"--output_dir={tmp_path / 'out'}")
    for result in run_ranks("-c", LATE, *JOB[1:], *folders, "--max_steps=1", "--timeout=60"):
        assert "error: " not in result.stderr

"""What the README says is what the files say."""

import re

import pytest

from datasets.folders import random_folder, random_pairs
from tests.conftest import ROOT, free_port, run
from tests.support.marks import diff

TEXT = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md")}
COMMANDS = sorted(set(re.findall(r"^(?:python|torchrun) .*$", TEXT["README.md"], re.MULTILINE)))


@pytest.mark.parametrize("name", TEXT)
def test_it_opens_with_the_diff(name):
    shown = re.search(r"```diff\n(.*?)\n```", TEXT[name], re.DOTALL).group(1)
    variant, base = (
        (ROOT / "jobs" / job).read_text(encoding="utf-8") for job in ("train_ddp.py", "train.py")
    )
    assert shown == diff(variant, base)


@pytest.mark.parametrize("command", COMMANDS)
def test_command_runs(command, tmp_path):
    """Each as it stands, but ended after a step; IMAGENET and PAIRS stand for folders of images."""
    places = {
        "IMAGENET": random_folder.make(str(tmp_path / "images")),
        "PAIRS": random_pairs.make(str(tmp_path / "pairs")),
        "/cache/imagenet": str(tmp_path / "pack"),
        "packed": str(tmp_path / "packed"),
        "PROJECT": str(tmp_path / "project"),
    }
    program, *words = (places.get(word, word) for word in command.split())
    if program == "torchrun":
        words = ["-m", "torch.distributed.run", *words]
    if "torch.distributed" in " ".join(words):
        words.insert(2, f"--master-port={free_port()}")
    if words[:3] == ["-m", "launch", "check"]:
        assert "name=versions verdict=ok" in run(*words).stdout
        return
    if words[:3] == ["-m", "launch", "bench"]:
        quick = ("--rounds=1", "--seconds=0.1", "--arch=resnet18", "--image_size=32", "--batch_size=16")
        assert "choice: " in run(*words, *quick, f"--cache_dir={tmp_path}").stdout
        return
    if words[:3] == ["-m", "launch", "pack"]:
        assert "packed=" in run(*words).stdout
        return
    if words[:3] == ["-m", "launch", "new"]:  # tests/launch/test_new.py has the rest
        assert "next: cd " in run(*words).stdout
        return
    if words[:3] == ["-m", "launch", "submit"]:
        assert '"boot_file"' in run(*words).stdout
        return
    trains = not any("loader" in word for word in words)  # a loader has epochs, and no steps
    result = run(*words, *["--max_steps=1"] * trains, "--batch_size=16", "--output_dir", tmp_path)
    assert re.search(r"(test_\w+|^total_seconds)=.* receipt=", result.stdout, re.MULTILINE)


@pytest.mark.parametrize("name", TEXT)
def test_files_and_targets_that_it_names_exist(name):
    for path in re.findall(r"\]\(([^)#:]+)\)", TEXT[name]):
        assert (ROOT / path).exists(), path
    folder = ROOT
    for line in re.search(r"## (?:Files|文件)\n\n```\n(.*?)```", TEXT[name], re.DOTALL).group(1).splitlines():
        names = re.findall(
            r"[\w.]+\.py|\w+/", line.split("   ")[0] if line.startswith(" ") is False else line
        )
        if not line.startswith(" "):
            folder = ROOT / names[0]
        for entry in names:
            assert (ROOT / entry).exists() or any(folder.rglob(entry.rstrip("/"))), entry
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", TEXT[name], re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize("name", TEXT)
def test_number_of_blocks(name):
    for job, blocks in re.findall(r"\]\(jobs/(\w+\.py)\) \|[^|]*\| (\d*) ?\|", TEXT[name]):
        marks = (ROOT / "jobs" / job).read_text(encoding="utf-8").count(" ### ") / 2
        assert marks == int(blocks or 0), job


def test_results_have_a_date():
    results = TEXT["README.md"].split("## Results")[1].split("## Files")[0]
    assert re.search(r"20\d\d-\d\d-\d\d", results) and "load average" in results

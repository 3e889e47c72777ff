"""`bootfile fix --prove`: a script before and after its repairs, and its runs without a restart."""

import pytest
import torch

from bootfile.fix import cli, proved
from bootfile.ground.errors import BadInput

SCRIPT = """\
import argparse
import os

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--resume")
args = parser.parse_args()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
inputs = torch.randn(64, 4)
targets = inputs.sum(1, keepdim=True)
start = 0
os.makedirs("OUT", exist_ok=True)
if args.resume and os.path.exists(args.resume):
    saved = torch.load(args.resume)
    model.load_state_dict(saved["model"])
    start = saved["epoch"] + 1
for epoch in range(start, 6):
    for x, y in zip(inputs.split(8), targets.split(8)):
        loss = ((model(x) - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "epoch": epoch}, "OUT/part")
    os.replace("OUT/part", "OUT/last.pt")
"""
OPTIONS = ["--compare", "OUT/*.pt", "--resume_with", "--resume OUT/last.pt"]


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.thorough
def test_a_repair_is_proved(script, capfd):
    assert cli.main(["--prove", "train.py", *OPTIONS, "--kills", "1"]) == 0
    lines = [
        line for line in capfd.readouterr().out.splitlines() if not line.startswith(("before [", "after ["))
    ]
    names = [line.partition(": ")[0] for line in lines]
    assert names == ["before", "patch", "after", "without a restart"]
    assert "differs: killed and restarted" in lines[0] and "exact: " in lines[2]
    assert lines[1].endswith("in train.py (R101, R801)") and "bit for bit" in lines[3]
    # nothing is changed or left
    assert script.read_text() == SCRIPT and [path.name for path in script.parent.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--prove", "train.py"], "--compare"),
        (["train.py", *OPTIONS], "--prove"),
        (["train.py", "--", "--epochs", "2"], "--prove"),
        (["--prove", "--write", "train.py", *OPTIONS], "no other mode"),
        (["--prove", "--only", "R501", "train.py", *OPTIONS], "nothing to prove"),
    ],
)
def test_what_cannot_be_proved_is_refused(script, words, expected):
    with pytest.raises(BadInput, match=expected):
        cli.main(words)


def test_a_checkpoint_may_have_more_and_not_less(tmp_path):
    model = {"weight": torch.ones(3), "bias": torch.zeros(2)}
    states = {
        "before": {"model": model, "epoch": 3},
        "more": {"net": model, "optimizer": {"momentum": torch.rand(4)}, "random": torch.get_rng_state()},
        "changed": {"model": model | {"bias": torch.tensor([0.0, 1e-7])}, "epoch": 3},
    }
    for name, state in states.items():
        folder = tmp_path / name / "reference"
        folder.mkdir(parents=True)
        torch.save(state, folder / "last.pt")
    folders = {name: str(tmp_path / name) for name in states}
    assert proved.find_changes(folders["before"], folders["more"], "OUT/*.pt") == []
    changes = proved.find_changes(folders["before"], folders["changed"], "OUT/*.pt")
    assert changes == ["model.bias in last.pt"]


def test_the_patched_folder_has_links_to_all_else(tmp_path, monkeypatch):
    work = tmp_path / "work"
    (work / "tools" / "deep").mkdir(parents=True)
    (work / "tools" / "deep" / "train.py").write_text("old")
    (work / "tools" / "helper.py").write_text("helper")
    (work / "data.txt").write_text("data")
    (tmp_path / "neighbour").mkdir()
    monkeypatch.chdir(work)
    texts = {str(work / "tools" / "deep" / "train.py"): b"new"}
    with proved._patched_folder(texts, str(tmp_path / "copies")) as place:
        copy = tmp_path / "copies" / place
        assert (copy / "tools" / "deep" / "train.py").read_text() == "new"
        assert (copy / "tools" / "helper.py").read_text() == "helper"
        assert (copy / "data.txt").read_text() == "data" and (copy.parent / "neighbour").is_dir()
    assert (work / "tools" / "deep" / "train.py").read_text() == "old"
    assert (work / "tools" / "helper.py").read_text() == "helper" and not (tmp_path / "copies").exists()

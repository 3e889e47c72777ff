"""`bootfile fix --ddp` adds marked blocks, with which a script trains on several processes."""

import re
import signal
import subprocess
import sys

import pytest
import torch

from bootfile.fix.ddp import make_distributed
from bootfile.fix.exact_loop import make_exact
from tests.conftest import ROOT, environment, free_port
from tests.fix.loops import CLASS, HELPER, MAIN, MODULE, SCRIPTS, change, describe, is_equal, refuse, run_all
from tests.support.marks import DISTRIBUTED, strip

pytestmark = pytest.mark.rounding

_WRITES = MAIN
for old, new in [
    ("import argparse", "import argparse\nimport os"),
    ("    best, steps", '    if not os.path.exists("logs"):\n        os.makedirs("logs")\n    best, steps'),
    ("    best, steps", '    log = open("logs/log.txt", "w")\n    best, steps'),
    ("        print(", '        log.write(f"{epoch}\\n")\n        print('),
]:
    _WRITES = _WRITES.replace(old, new, 1)
FIXED = SCRIPTS | {"writes": _WRITES}


def start_two(folder, *arguments, **options):
    """Return the runs of two processes of a script."""
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [{"log": f"log{rank}.txt", "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    return [describe(folder, "train.py", *arguments, **rank, **meeting, **options) for rank in ranks]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the folder of all runs, with two processes ("two"), and of main with one ("main_one")."""
    root = tmp_path_factory.mktemp("runs")
    groups = []
    for name, text in FIXED.items():
        folder = root / f"{name}_two"
        folder.mkdir()
        (folder / "train.py").write_text(change(make_distributed, folder, text))
        arguments = ("weights.pt", "--ordered") if name in ("main", "writes") else ("weights.pt",)
        groups.append(start_two(folder, *arguments))
    folder = root / "main_one"
    folder.mkdir()
    (folder / "train.py").write_text(MAIN)
    groups.append([describe(folder, "train.py", "weights.pt", "--ordered", log="log0.txt")])
    codes = run_all(groups)
    logs = {path.parent.name: path.read_text() for path in root.glob("*/log?.txt")}
    assert codes == [[0, 0]] * len(FIXED) + [[0]], (codes, logs)
    return root


@pytest.mark.parametrize("name", FIXED)
def test_rank_0_writes_the_files_and_prints(runs, name):
    folder = runs / f"{name}_two"
    saved = torch.load(folder / "weights.pt")
    state = saved.get("model", saved)
    assert state and not any(key.startswith("module.") for key in state)
    assert (folder / "log0.txt").read_text() and not (folder / "log1.txt").read_text()


def test_two_processes_train_the_same_weights_as_one_and_print_the_same(runs):
    one, two = (torch.load(runs / f"main_{count}" / "weights.pt") for count in ("one", "two"))
    assert all(torch.allclose(one[key], two[key], atol=1e-5) for key in one)
    one, two = ((runs / f"main_{count}" / "log0.txt").read_text().split() for count in ("one", "two"))
    assert len(one) == len(two) > 10
    assert all(abs(float(a) - float(b)) < 1e-4 for a, b in zip(one, two, strict=True) if a != "best")


def test_only_rank_0_writes_to_a_file_that_the_script_opens(runs):
    assert (runs / "writes_two" / "logs" / "log.txt").read_text() == "1\n2\n3\n"


@pytest.mark.parametrize("name", FIXED)
def test_without_its_blocks_it_is_the_script(name, tmp_path):
    new = change(make_distributed, tmp_path, FIXED[name])
    assert strip(new, DISTRIBUTED) == FIXED[name]
    # the command of jobs/README.md
    command = re.search(
        r"^(sed .*) jobs/train_ddp.py", (ROOT / "jobs" / "README.md").read_text(), re.MULTILINE
    )[1]
    (tmp_path / "ddp.py").write_text(new)
    shown = subprocess.run(
        ["bash", "-c", f"{command} ddp.py | diff -B train.py -"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (shown.returncode, shown.stdout) == (0, "")
    assert max(map(len, new.splitlines())) <= 110


@pytest.mark.parametrize("end", ["\r\n", "\n"])
def test_line_ends_and_a_last_line_without_one_stay(end, tmp_path):
    text = MODULE.rstrip("\n").replace("\n", end)
    assert strip(change(make_distributed, tmp_path, text).replace("###\r\n", "###\n"), DISTRIBUTED).replace(
        "\r", ""
    ) == text.replace("\r", "")


TWO = "[*model.parameters(), *other.parameters()]"
SEED = "    torch.manual_seed(0)"
REFUSED = {
    "a sampler of its own": (MODULE.replace("shuffle=True", "sampler=[3, 2, 1]"), "line 11"),
    "two models": (
        MODULE.replace("model.parameters()", TWO).replace("optim", "other = torch.nn.Linear(4, 1)\noptim", 1),
        "line 16",
    ),
    "a method of the model": (MODULE.replace("model(x)", "model.predict(x)"), "line 18"),
    "a folder": (MAIN.replace(SEED, '    os.makedirs("a")'), "line 26"),
    "one sample": (CLASS.replace(", batch_size=4", ""), "line 13"),
    "a split": (MAIN.replace(SEED, "    parts = torch.utils.data.random_split(x, [1, 2])"), "line 26"),
    "the module in a file": (HELPER.replace("model.state_dict()", "model"), "line 45"),
    "blocks": (MODULE + "### the end\n", "line 28"),
    "distributed": (
        MODULE.replace("for epoch", 'torch.distributed.init_process_group("gloo")\nfor epoch'),
        "the script is distributed",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_names_what_it_cannot_place_and_changes_nothing(case, tmp_path):
    text, line = REFUSED[case]
    lines = refuse(make_distributed, tmp_path / "train.py", text)
    assert any(one.startswith(line) for one in lines), lines


@pytest.mark.thorough
def test_both_changes_together_continue_exactly(tmp_path):
    groups = []
    for name in ("whole", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        new = change(make_exact, folder, change(make_distributed, folder, MODULE))
        (folder / "train.py").write_text(new)
        # the blocks stay blocks
        assert "from bootfile import" in strip(new, DISTRIBUTED)
        if name == "killed":
            groups.append(start_two(folder, "weights.pt", step=13, signal=signal.SIGTERM))
        groups.append(start_two(folder, "weights.pt"))
    assert run_all(groups) == [[0, 0], [143, 143], [0, 0]]
    whole, killed = (torch.load(tmp_path / name / "weights.pt") for name in ("whole", "killed"))
    assert is_equal(whole, killed)


@pytest.mark.thorough
def test_torchrun_starts_it(tmp_path):
    (tmp_path / "ddp.py").write_text(change(make_distributed, tmp_path, MODULE))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "ddp.py", "weights.pt"]
    shown = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("epoch 2") == 1 and torch.load(tmp_path / "weights.pt").keys() == {
        f"{layer}.{part}" for layer in (0, 2) for part in ("weight", "bias")
    }

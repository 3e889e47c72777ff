"""Scripts that do not use Bootfile are simulated and packed as guides/own_script.md says."""

import re

import pytest

from tests.conftest import ROOT, environment, run
from tests.support.packed import listed, tree
from tests.support.simulated import rows, simulate

PAGE = (ROOT / "guides" / "own_script.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^python -m (launch .*)$", PAGE, re.MULTILINE)
BOOT = (ROOT / "guides" / "own_script" / "boot.py").read_text(encoding="utf-8")
STRICT = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
args = parser.parse_args()
"""
DDP = """
import argparse, os, torch, torch.distributed as dist
parser = argparse.ArgumentParser()
parser.add_argument("--train_url", default=".")
args, _ = parser.parse_known_args()
dist.init_process_group("gloo", init_method="env://")
ranks = torch.tensor([1])
dist.all_reduce(ranks)
print(f"ranks {int(ranks)}\\n", end="", flush=True)  # one write: the ranks share a pipe
if dist.get_rank() == 0:
    torch.save(ranks, os.path.join(args.train_url, "ranks.pth"))
dist.destroy_process_group()
"""
TOOL = "import os, sys\nsys.path.insert(0, os.path.dirname(os.path.dirname(__file__)))\n"
TOOL += "import mylib.net\nprint(mylib.net.NAME)\n"


@pytest.fixture
def project(tmp_path):
    return tree(tmp_path / "project", {
        "main.py": STRICT.replace("args =", "args, _ =").replace("parse_args", "parse_known_args"),
        "strict/main.py": STRICT, "ddp/train.py": DDP, "ddp/boot.py": BOOT,
        "mylib/net.py": "NAME = 'a net'\n", "tools/run.py": TOOL,
        "requirements.txt": "torch>=2.1\neinops\n",
    })  # fmt: skip


@pytest.mark.thorough
def test_errors_are_those_of_the_page(project):
    """The table of the simulation shows the errors that the page explains."""
    result = simulate(project / "strict" / "main.py", "--", "--lr=1", code=2)
    assert rows(result.stdout)["0"].meaning.startswith("bad input: main.py: error: unrecognized arguments: ")
    assert "guides/own_script.md" in result.stdout
    assert simulate("--platform=pai-dlc", project / "strict" / "main.py").returncode == 0
    result = simulate(project / "ddp" / "train.py", code=1)
    assert "environment variable RANK expected" in rows(result.stdout)["0"].meaning
    tool = project / "tools" / "run.py"
    assert f"add --code_dir {project}\n" in simulate(tool, code=2).stderr
    assert "[node 0] a net\n" in simulate("--code_dir", project, tool).stdout
    errors = run("-m", "launch", "pack", tool, "--code_dir", project / "ddp", "--to", project, code=2).stderr
    assert "is not a folder above" in errors
    tree(project, {"read.py": "print(open('data/a.csv').read())\n", "data/a.csv": "1,2"})
    result = simulate(project / "read.py", code=1)
    assert "No such file or directory: 'data/a.csv'" in rows(result.stdout)["0"].meaning
    (project / ".jobignore").write_text("!data/\n")
    assert "[node 0] 1,2\n" in simulate(project / "read.py").stdout


def test_folders_called_common_and_datasets_are_the_scripts_own(project, tmp_path):
    tree(project, {"common/a.py": "", "datasets/b.py": ""})
    run("-m", "launch", "pack", project / "main.py", "--to", tmp_path / "to")
    (folder,) = (tmp_path / "to").iterdir()
    assert {"common/a.py", "datasets/b.py", "mylib/net.py"} <= {*listed(folder)}


@pytest.mark.parametrize(
    "command", [pytest.param(each, marks=[pytest.mark.thorough] * ("boot.py" in each)) for each in COMMANDS]
)
def test_command_of_the_page_runs(command, project, tmp_path):
    words = command.replace("PROJECT", str(project)).replace("--to packed", f"--to {tmp_path}/to").split()
    output = run("-m", *words).stdout
    if "ddp" in command:
        assert output.count("ranks 4") == 4  # without a buffer, the end of a line is a separate write
    if " pack " in command:
        (folder,) = (tmp_path / "to").iterdir()
        assert {"mylib/net.py", "tools/run.py", "pip-requirements.txt"} <= {*listed(folder)}
        assert (folder / "pip-requirements.txt").read_text() == "einops\n"


def test_submit_of_the_page_shows_the_request(project, tmp_path):
    run("-m", "launch", "pack", project / "main.py", "--to", tmp_path / "to")
    (folder,) = (tmp_path / "to").iterdir()
    example = (ROOT / "launch" / "job.example.toml").read_text()
    (tmp_path / "job.toml").write_text(example.replace("bootfile-0123456789ab", folder.name))
    (words,) = re.findall(r"^python BOOTFILE/launch (submit .*)$", PAGE, re.MULTILINE)
    words = words.replace("job.toml", str(tmp_path / "job.toml")).split()
    output = run(ROOT / "launch", *words, cwd=project).stdout
    assert f'"boot_file": "/bucket/code/{folder.name}/main.py"' in output
    assert f"/user-job-dir/{folder.name}/main.py --dataset=cifar10 " in output


def test_the_loader_alone_continues_after_the_last_whole_epoch(tmp_path):
    script, variables = ROOT / "guides" / "own_script" / "loader.py", environment(PYTHONPATH=str(ROOT))
    whole = run(script, cwd=tmp_path, env=variables).stdout.splitlines()
    (tmp_path / "results").rename(tmp_path / "whole")
    stopped = script.read_text().replace("        print(", "        assert loader.step < 40\n        print(")
    run("-c", stopped, cwd=tmp_path, env=variables, code=1)
    rest = run(script, cwd=tmp_path, env=variables).stdout.splitlines()
    assert len(whole) == 93 and rest == whole[31:]

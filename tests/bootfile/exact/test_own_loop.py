"""The loops of guides/own_loop.md continue exactly: `prove` kills them."""

import difflib
import re
import shutil

import pytest
import torch

from tests.conftest import ROOT, environment, free_port, names, run

pytestmark = pytest.mark.rounding

_FOLDER = ROOT / "guides" / "own_loop"
_PAGE = (ROOT / "guides" / "own_loop.md").read_text(encoding="utf-8")
PATH = environment(PYTHONPATH=str(ROOT))
LOOP = (_FOLDER / "any_number.py").read_text()


def start_alone():
    """Return the environment of one process that torchrun started."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return PATH | place


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("script", ["after.py", "any_number.py"])
def test_a_loop_of_ones_own_continues_exactly(script, processes, tmp_path):
    for path in _FOLDER.glob("*.py"):
        shutil.copy(path, tmp_path)
    two = tmp_path / "two.py"
    two.write_text(two.read_text().replace('"2"', f'"{processes}"'))
    [command] = re.findall(r"prove (two.py .* -- )after.py OUT$", _PAGE, re.MULTILINE)
    words = ("two.py", "--kills=2", "--compare=OUT/*.pt", "--resume_with=", "--")
    assert "--compare" in command and '--resume_with ""' in command
    shown = run(ROOT / "launch", "prove", *words, script, "OUT", cwd=tmp_path, env=PATH).stdout
    assert re.search(r"^exact: 2 runs equal the reference", shown, re.MULTILINE), shown
    steps = 93 if script == "any_number.py" else 96 if processes == 2 else 189  # after.py: 16 on each rank
    assert f"data equal for {steps} steps" in shown and "state equal at steps 10, 20" in shown


def test_the_page_shows_the_changes():
    old, new = ((_FOLDER / name).read_text().splitlines()[1:] for name in ("before.py", "after.py"))
    lines = [line for line in difflib.ndiff(old, new) if line[:2] in ("- ", "+ ") and line[2:].strip()]
    [block] = re.findall(r"```diff\n(.*?)```", _PAGE, re.DOTALL)
    assert [line for line in lines if line not in block.splitlines()] == []
    assert sum(line.startswith("+") for line in lines) == 7
    whole = [line[2:] for line in block.splitlines() if not line.startswith("+")]
    assert whole[1:] == old


def test_the_page_shows_the_loader_of_any_number():
    [block] = re.findall(r"```python\n(sampler = .*?)```", _PAGE, re.DOTALL)
    assert block in (_FOLDER / "any_number.py").read_text()


@pytest.mark.thorough
def test_a_loop_of_ones_own_loads_the_package_only(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    code = (
        "import runpy, sys; sys.argv = ['loop.py', 'OUT']; runpy.run_path('loop.py'); "
        "print('imported:', *(name.partition('.')[0] for name in sys.modules))"
    )
    shown = run("-c", code, cwd=tmp_path, env=start_alone(), fresh=True).stdout
    names = shown.partition("imported: ")[2].split()
    assert "bootfile" in names and not {"common", "datasets", "jobs", "launch"} & {*names}


@pytest.mark.thorough
def test_another_order_of_the_samples_is_refused(tmp_path):
    """The core has no options that would tell."""
    loop = LOOP.replace("epochs=3", "epochs=3, max_steps=10")
    (tmp_path / "loop.py").write_text(loop)
    run("loop.py", "OUT", cwd=tmp_path, env=start_alone())
    for old, new, parts in (
        ("seed=0", "seed=1", ("seed 0", "seed 1")),
        ("len(train_set), 32", "len(train_set), 50", ("global batch 32", "global batch 50")),
    ):
        assert loop.count(old) == 1
        (tmp_path / "loop.py").write_text(loop.replace(old, new))
        assert names(run("loop.py", "OUT", cwd=tmp_path, env=start_alone(), code=1).stderr, *parts)


def test_a_url_is_refused(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    errors = run("loop.py", "s3://bucket/run", cwd=tmp_path, env=start_alone(), code=1).stderr
    assert re.search(r"s3://bucket/run .*\bURL\b.*\bfolder\b", errors)
    assert not (tmp_path / "s3:").exists()


def test_mixed_precision_accumulation_and_an_average_continue_exactly(tmp_path):
    """A kill between two optimizer steps: gradients of two batches are lost with the process."""
    loop = (_FOLDER / "large.py").read_text()
    (tmp_path / "loop.py").write_text(loop)
    line = "        accepted = run.accepts(loss)"
    assert loop.count(line) == 1
    kill = "        if loader.step == 30:\n            os.kill(os.getpid(), 9)\n"
    (tmp_path / "killed.py").write_text("import os\n\n" + loop.replace(line, kill + line))
    run("loop.py", "WHOLE", cwd=tmp_path, env=PATH)
    run("killed.py", "OUT", cwd=tmp_path, env=PATH, code=-9)
    restarted = run("loop.py", "OUT", cwd=tmp_path, env=PATH)
    assert f"resumed from {tmp_path}/OUT/checkpoints/step_" in restarted.stdout
    whole, killed = (torch.load(tmp_path / name / "last.pt", weights_only=True) for name in ("WHOLE", "OUT"))
    for part in ("model", "average"):
        for name, tensor in whole[part].items():
            assert torch.equal(tensor, killed[part][name]), (part, name)
    assert int(whole["average"]["n_averaged"]) == 16
    assert (tmp_path / "WHOLE/receipt.bin").read_bytes() == (tmp_path / "OUT/receipt.bin").read_bytes()

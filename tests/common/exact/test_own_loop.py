"""The loops of guides/own_script.md continue exactly: `launch prove` kills them."""

import os
import re
import sys

import pytest

from tests.conftest import ROOT, run

_PAGE = (ROOT / "guides" / "own_script.md").read_text(encoding="utf-8")
LOOP, OF_TORCH = re.findall(r"```python\n(.*?)```", _PAGE.partition("## Your own loop, exact")[2], re.DOTALL)
PATH = os.environ | {"PYTHONPATH": str(ROOT)}
TORCHRUN = f"""
import os
words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "loop.py", "OUT"]
os.execv({sys.executable!r}, [{sys.executable!r}, *words])
"""


@pytest.mark.parametrize("script", ["loop.py", "two.py"], ids=["1 process", "2 processes"])
@pytest.mark.parametrize("loader", ["ours", "of torch"])
def test_a_loop_of_ones_own_continues_exactly(loader, script, tmp_path):
    loop, steps = LOOP, 93
    if loader == "of torch":
        loop, count = re.subn(r"sampler = .*\nloader = .*\n", lambda _: OF_TORCH, LOOP)
        assert count == 1
        steps = 48 if script == "two.py" else 96  # batches of 32 on each rank
    (tmp_path / "loop.py").write_text(loop)
    (tmp_path / "two.py").write_text(TORCHRUN)
    words = ("--kills=2", "--compare=OUT/*.pt", "--resume_with=", "--", "OUT")
    shown = run(ROOT / "launch", "prove", script, *words, cwd=tmp_path, env=PATH).stdout
    assert re.search(r"^exact: 2 runs equal the reference", shown, re.MULTILINE), shown
    assert f"data equal for {steps} steps" in shown and "state equal at steps 10, 20" in shown


def test_a_loop_of_ones_own_loads_neither_options_nor_logs(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    code = (
        "import runpy, sys; sys.argv = ['loop.py', 'OUT']; runpy.run_path('loop.py'); "
        "print('imported:', *(name for name in sys.modules if name.split('.')[0] in ('common', 'datasets')))"
    )
    shown = run("-c", code, cwd=tmp_path, env=PATH, fresh=True).stdout
    names = shown.partition("imported: ")[2].split()
    assert "common.exact.loop" in names
    assert not [
        name for name in names if re.match(r"common\.(console|run|platform|checkpoint|object_store)", name)
    ]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("seed=0", "seed=1"), "its samples have the seed 0, this run's the seed 1"),
        (("len(train_set), 32", "len(train_set), 50"), "the global batch 32, this run's the global batch 50"),
    ],
    ids=["seed", "batch"],
)
def test_another_order_of_the_samples_is_refused(change, reason, tmp_path):
    """The core has no options that would tell."""
    loop = LOOP.replace("epochs=3", "epochs=3, max_steps=10")
    (tmp_path / "loop.py").write_text(loop)
    run("loop.py", "OUT", cwd=tmp_path, env=PATH)
    assert loop.count(change[0]) == 1
    (tmp_path / "loop.py").write_text(loop.replace(*change))
    assert reason in run("loop.py", "OUT", cwd=tmp_path, env=PATH, code=1).stderr

"""A short job starts fast and small: no compiler is imported, and freed memory goes back to the system."""

import json
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT

OPTIMIZERS = """
import json, sys
import torch
from common.performance import dynamo
dynamo.postpone_import()
dynamo.postpone_import()

def train(kind):
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2)
    optimizer = kind(module.parameters(), lr=0.1, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for step in range(3):
        optimizer.zero_grad()
        assert module.weight.grad is None
        module(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.load_state_dict(optimizer.state_dict())
    def closure():
        optimizer.zero_grad()
        loss = module(torch.ones(4, 3)).square().sum()
        loss.backward()
        return loss
    loss = optimizer.step(closure)
    return [loss.item(), *module.weight.flatten().tolist()]

kinds = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
found = [train(kind) for kind in kinds]
early = "torch._dynamo" in sys.modules
import torch._dynamo
assert torch.compile(torch.nn.Linear(3, 2), backend="eager")(torch.ones(4, 3)).shape == (4, 2)
print(json.dumps([early, found, [train(kind) for kind in kinds]]))
"""

JOB = """
import runpy, sys
from common.performance import cpu
cpu.return_memory = lambda: print("memory is returned")
try:
    runpy.run_path("jobs/train.py", run_name="__main__")
finally:
    print("compiler", "torch._dynamo" in sys.modules)
"""

MEMORY = """
import sys
import torch
from common.performance import cpu
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
assert cpu.keep_memory()
assert sys.argv[1] == "kept" or cpu.return_memory()
blocks = [torch.ones(2_500_000) for _ in range(20)]
before = resident()
del blocks
print(before - resident() > 100e6)
"""


def run_alone(code: str, *arguments: str) -> str:
    """Return the output of Python code in a new process, into which nothing is imported before."""
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_optimizers_do_the_same_without_and_with_the_compiler():
    early, before, after = json.loads(run_alone(OPTIMIZERS).splitlines()[-1])
    assert not early and before == after and len(before) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory of a job on the CPU")
@pytest.mark.parametrize("steps, returned", [(20, True), (21, False)])
def test_a_short_job_imports_no_compiler_and_returns_memory(steps, returned, tmp_path):
    said = run_alone(
        JOB, "--custom_data=true", "--dataset=digits", "--width=8", f"--max_steps={steps}",
        "--batch_size=8", f"--output_dir={tmp_path}",
    )  # fmt: skip
    assert "compiler False" in said and ("memory is returned" in said) == returned


@pytest.mark.parametrize("word, freed", [("kept", "False"), ("returned", "True")])
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="settings of glibc")
def test_memory_is_kept_until_it_is_returned(word, freed):
    assert run_alone(MEMORY, word).split() == [freed]

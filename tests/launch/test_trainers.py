"""The scripts of guides/trainers.md give the verdicts that it shows."""

import importlib.util
import re
import shutil

import pytest
import torch
import yaml

from bootfile.receipt.cli import report
from bootfile.receipt.loop_receipt import Receipt
from bootfile.receipt.one_run import Options
from bootfile.receipt.reading import read
from tests.conftest import ROOT, run

PAGE = (ROOT / "guides" / "trainers.md").read_text()


@pytest.fixture
def project(tmp_path):
    """A folder of its own: next to Bootfile, `datasets` is another package."""
    shutil.copytree(ROOT / "guides" / "trainers", tmp_path / "project")
    (tmp_path / "project" / "bootfile").symlink_to(ROOT / "bootfile")
    return tmp_path / "project"


def slowed(text):
    """Return ddp.py with epochs that take longer than a kill: on a busy machine all had ended before it."""
    step = "        optimizer.step()\n"
    assert text.count(step) == 1
    text = text.replace("import os\n", "import os\nimport time\n", 1)
    return text.replace(step, f"{step}        time.sleep(0.05)\n")


def verdict(script, files, *words, code):
    """Return the verdict of `prove` and the line about the samples of the killed run."""
    words = ("--compare", files, "--resume_with=--resume", *(("--", *words) if words else ()))
    lines = run("-m", "launch", "prove", script, *words, code=code).stdout.splitlines()
    data = [line.strip() for line in lines if line.startswith("      data ")]
    [last] = [line for line in lines if line.startswith(("exact: ", "differs: "))]
    return last, data[1]


@pytest.mark.thorough
def test_a_plain_script(project):
    job = project / "ddp.py"
    job.write_text(slowed(job.read_text()))
    words = (job, "out/*.pt", "--out", "out")
    lines = verdict(*words, code=20), verdict(*words, "--seeded", code=0)
    for last, data in lines:
        # a busy machine may kill it after a later epoch
        assert re.sub(r"at step \d+ ", "at step 9 ", last) in PAGE and data == "data equal for 48 steps"
    assert lines[0][0] != lines[1][0]


@pytest.mark.parametrize(("package", "name", "files", "code"), [
    ("transformers", "hugging_face.py", "out/last.pt", 0),
    ("lightning", "lightning_module.py", "out/end.pt", 20),
])  # fmt: skip
def test_a_trainer(package, name, files, code, project):
    for each in {package, "accelerate"} if package == "transformers" else {package}:
        if not importlib.util.find_spec(each):
            pytest.skip(f"{each} is not installed")
    last, data = verdict(project / name, files, code=code)
    assert last.startswith("exact: ") if code == 0 else "were read again" in last
    assert data.startswith("data different from step " if code else "data equal for 24 steps")


@pytest.mark.thorough
def test_the_test_of_a_repository(project):
    """As the page shows it."""
    script = project / "ddp.py"
    script.write_text(slowed(script.read_text()))
    [test] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    options = ("-m", "pytest", "-p", "no:cacheprovider", "test_resume.py")
    (project / "test_resume.py").write_text(test)
    printed = run(*options, cwd=project, code=1).stdout
    assert "differs: killed and restarted: " in printed and "exit status 20" in printed
    (project / "test_resume.py").write_text(test.replace('"--out", "out"', '"--out", "out", "--seeded"'))
    run(*options, cwd=project)


def test_the_workflow():
    workflow = yaml.safe_load((ROOT / "guides/trainers/resume.yml").read_text())
    commands = [step["run"] for step in workflow["jobs"]["resume"]["steps"] if "run" in step]
    assert commands[-1] == "python -m pytest test_resume.py" and commands[0].startswith("pip install torch ")


def test_a_loader_of_accelerate(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    samples = torch.utils.data.TensorDataset(torch.rand(24, 4, generator=torch.Generator().manual_seed(0)))
    order = torch.Generator().manual_seed(0)
    for name, epochs in (("plain", 1), ("run", 2)):
        loader = torch.utils.data.DataLoader(samples, 4, shuffle=True, generator=order.manual_seed(0))
        loader = loader if name == "plain" else accelerate.Accelerator(cpu=True).prepare(loader)
        receipt = Receipt(str(tmp_path / name))
        for _ in range(epochs):
            assert len(list(receipt.watch(loader))) == 6
    folders = [str(tmp_path / "plain"), str(tmp_path / "run")]
    equal, lines = report(folders, [read(folder) for folder in folders], Options())
    assert not equal and re.search(r"equal .*\b6 steps", lines[-1])  # then accelerate seeds each epoch

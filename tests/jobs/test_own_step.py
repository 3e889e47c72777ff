"""Each example of guides/own_step.md continues exactly; those with --ddp equal one process."""

import re
import textwrap

import pytest
import torch

from bootfile.receipt.reading import read
from bootfile.receipt.steps import find_difference
from tests.conftest import ROOT, cases, run, run_ranks
from tests.jobs.test_resume import same_weights
from tests.jobs.test_train_own import write_job

PAGE = (ROOT / "guides" / "own_step.md").read_text(encoding="utf-8")
EXAMPLES = {
    section.partition("\n")[0]: re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    for section in PAGE.split("\n## ")[1:]
}
OPTIONS = ("--batch_size=48", "--lr=0.01", "--report_every=1", "--max_steps=10", "--keep=9", "--workers=1")
CONTRASTIVE = "A loss over the global batch (contrastive)"
UNFREEZE, WEIGHTS = "Unfreeze layers at an epoch", "Weights of classes, or labels that are ignored"
DISTRIBUTED = (CONTRASTIVE, UNFREEZE, WEIGHTS)


def write_example(folder, title, distributed=False):
    """Return train_own.py with the parts of an example at their places."""
    job = write_job(folder, None, distributed)
    text = job.read_text(encoding="utf-8")
    places = r"^# (optimizer|forward|outputs|loss|step|before resume\(\)|your step)\n"
    parts = re.split(places, EXAMPLES[title], flags=re.M)[1:]
    for name, code in zip(parts[::2], parts[1::2], strict=True):
        place, indent, after = {
            "optimizer": (r"    optimizer = torch\.optim\.SGD\(.*\n", 4, ""),
            "forward": (r"    forward = torch\.nn\.parallel\.DistributedDataParallel\(.*\n", 4, ""),
            "outputs": (r"            outputs = forward\(inputs\)\n", 12, ""),
            "step": (r"                optimizer\.step\(\)\n", 16, ""),
            "loss": (r"            loss = criterion\(outputs, targets\)\n", 12, ""),
            "before resume()": (r"    step = checkpoint\.resume\(\).*\n", 4, r"\g<0>"),
            "your step": (r"(?s)(?<=in train_loader:\n).*?(?=            scheduler\.step)", 12, ""),
        }[name]
        new = textwrap.indent(code, " " * indent)
        text, count = re.subn(place, lambda found: new + (found[0] if after else ""), text)  # noqa: B023
        assert count == 1
    job.write_text(text, encoding="utf-8")
    return job


def weights(path):
    return torch.load(path, weights_only=True)["objects"]["model"]


def test_every_example_of_the_guide_is_tested():
    assert len(EXAMPLES) == PAGE.count("```python\n") == 8


@pytest.mark.parametrize(
    "title", cases(sorted(EXAMPLES), "A closure (LBFGS)", "Weights of classes, or labels that are ignored")
)
def test_an_example_continues_exactly(title, tmp_path):
    job = write_example(tmp_path / "job", title, distributed=title in DISTRIBUTED)
    run_ranks(job, *OPTIONS, "--save_every=3", f"--output_dir={tmp_path / 'whole'}", ranks=1)
    saved = sorted((tmp_path / "whole" / "checkpoints").glob("step_?.pt"))
    assert saved  # step 4 or 8 if gradients are accumulated
    run_ranks(job, *OPTIONS, f"--resume={saved[0]}", f"--output_dir={tmp_path / 'rest'}", ranks=1)
    ends = [tmp_path / name / "checkpoints" / "step_10.pt" for name in ("whole", "rest")]
    assert same_weights(*map(weights, ends)) and not same_weights(weights(saved[0]), weights(ends[0]))
    runs = [read(str(tmp_path / name)).starts[0].steps for name in ("whole", "rest")]
    assert find_difference(*runs).step == 0


@pytest.mark.thorough
@pytest.mark.parametrize("title", DISTRIBUTED)
def test_a_step_of_two_processes_is_that_of_one(title, tmp_path):
    job = write_example(tmp_path / "job", title, distributed=True)
    for ranks in (1, 2):
        printed = run_ranks(job, *OPTIONS, f"--output_dir={tmp_path / str(ranks)}", ranks=ranks)[0].stdout
        # processes that share a GPU have a `preflight warning: ` (tests/support/on_gpu.py)
        assert not re.search("^warning: ", printed, re.MULTILINE)
    one, two = (weights(tmp_path / str(ranks) / "checkpoints" / "step_10.pt") for ranks in (1, 2))
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-4, atol=1e-6)


def test_a_number_of_workers_below_0_is_refused():
    assert "--workers" in run("jobs/train_own.py", "--workers=-1", code=2).stderr

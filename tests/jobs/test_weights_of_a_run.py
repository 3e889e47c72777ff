"""best.pth of a run can be evaluated, trained from and loaded in a script; wrong files are refused."""

import re

import pytest
import torch

from common.compute.models import resnet18
from tests.conftest import QUICK, records, refused, run, run_ranks

pytestmark = pytest.mark.rounding

JOB = (*QUICK, "--epochs=1", "--batch_size=240")
TWO = ("jobs/train_ddp.py", *QUICK)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the output folder of a run, with its weights also under the names of DistributedDataParallel."""
    output = tmp_path_factory.mktemp("trained")
    run("jobs/train.py", *JOB, "--lr=0.02", f"--output_dir={output}")
    weights = torch.load(output / "best.pth", weights_only=True)
    resnet18(channels=1, width=8).load_state_dict(weights)
    torch.save({f"module.{name}": tensor for name, tensor in weights.items()}, output / "ddp.pth")
    return output


def test_evaluation_gives_the_figures_of_the_training(trained, tmp_path):
    """This holds in two processes and with another batch size and seed, and nothing is written."""
    output = tmp_path / "output"
    printed = run_ranks(
        *TWO, "--evaluate", f"--weights={trained / 'ddp.pth'}", "--batch_size=64", "--seed=5", "--epochs=9",
        f"--output_dir={output}",
    )[0].stdout  # fmt: skip
    loss, accuracy = re.search(r"\nval_loss=(\S+) val_acc=(\S+) val_count=359\n", printed).groups()
    said = records(trained)[-1]
    assert float(loss) == pytest.approx(said["val_loss"], rel=1e-4)
    assert float(accuracy) == pytest.approx(said["val_acc"], abs=1e-6)
    assert f"weights from {trained / 'ddp.pth'}: 122 of 122 tensors\n" in printed
    assert not output.exists() or not any(output.iterdir())


def test_training_from_weights_of_another_head(trained, tmp_path):
    """If the run had fewer classes, the head keeps its initial values, and a line reports it."""
    weights = torch.load(trained / "best.pth", weights_only=True)
    weights["dense_layer.weight"], weights["dense_layer.bias"] = torch.zeros(7, 64), torch.zeros(7)
    torch.save(weights, tmp_path / "seven.pth")
    (tmp_path / "classes.json").write_text('["a", "b", "c", "d", "e", "f", "g"]')
    printed = run(
        "jobs/train.py", *JOB, "--max_steps=1", "--report_every=1", f"--weights={tmp_path / 'seven.pth'}",
        f"--output_dir={tmp_path / 'out'}",
    ).stdout  # fmt: skip
    assert re.search(r": 120 of 122 tensors; .*shape: dense_layer\.weight \[7, 64\] .*\[10, 64\]", printed)
    assert re.search(r"weights have 7 classes, .*data set has 10\n", printed)
    assert records(tmp_path / "out")[0]["step"] == 1


def test_a_file_that_no_process_can_load(trained, tmp_path):
    """The job prints one line and exits with code 2, and no process waits for another."""
    (tmp_path / "page.pth").write_text("<html>404</html>")
    output = ("--output_dir", tmp_path / "out")
    for result in run_ranks(*TWO, f"--weights={tmp_path / 'page.pth'}", *output, code=2):
        line, = result.stderr.splitlines()  # fmt: skip
        assert line.startswith("error: weights ") and "it begins with b'" in line
    line = refused("jobs/train.py", *JOB, f"--resume={trained / 'best.pth'}", *output)
    assert line.endswith(f"--weights {trained / 'best.pth'}")

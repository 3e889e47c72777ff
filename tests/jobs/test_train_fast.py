"""train_fast.py has the data of train.py, nearly its losses (bfloat16), and exact restarts."""

import re
import signal

import pytest

from bootfile.receipt import receipt
from tests.conftest import QUICK, environment, interrupt, losses, run
from tests.jobs.test_resume import DATA, figures, same_weights, weights

FAST = ("jobs/train_fast.py", *DATA, "--lr=0.02")
FIFTY = (*QUICK, "--batch_size=128", "--lr=0.03", "--max_steps=50", "--report_every=1")
# largest differences of a loss that begins at 2.5: in one step, and in the mean of ten; measured: 0.12, 0.012
ONE_STEP, TEN_STEPS = 0.3, 0.05


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    output = tmp_path_factory.mktemp("fast")
    run(*FAST, f"--output_dir={output}")
    return output


@pytest.mark.thorough
def test_same_data_and_losses_as_in_float32(tmp_path):
    for job in ("train.py", "train_fast.py"):
        run(f"jobs/{job}", *FIFTY, f"--output_dir={tmp_path / job}")
    plain, fast = losses(tmp_path / "train.py"), losses(tmp_path / "train_fast.py")
    files = [(tmp_path / job / receipt.FILE).read_bytes() for job in ("train.py", "train_fast.py")]
    assert files[0] == files[1]
    assert len(plain) == 50 and plain[0] - plain[-1] > 0.5, "the loss does not fall"
    differences = [one - other for one, other in zip(plain, fast, strict=True)]
    assert 0 < max(map(abs, differences)) < ONE_STEP, "a difference of 0 means that it computes in float32"
    means = [abs(sum(differences[first : first + 10])) / 10 for first in range(0, 50, 10)]
    assert max(means) < TEN_STEPS, means


def test_a_restart_is_exact(whole, tmp_path):
    """With a fused optimizer a job stops one step later, and no step is lost."""
    output = interrupt(*FAST, f"--output_dir={tmp_path}", at="^epoch=2 step=6/", by=signal.SIGTERM)
    last = int(re.search(r"stopped .*step (\d+); .*checkpoint", output)[1])
    assert 6 <= last < 15
    assert f"step_{last}.pt: epoch " in run(*FAST, f"--output_dir={tmp_path}").stdout
    assert figures(tmp_path) == figures(whole)
    assert same_weights(weights(tmp_path), weights(whole))
    assert (tmp_path / receipt.FILE).read_bytes() == (whole / receipt.FILE).read_bytes()


@pytest.mark.thorough  # compiling takes a minute or more
def test_compiled_it_learns_the_same(whole, tmp_path):
    env = environment(TORCH_LOGS="recompiles")
    result = run(*FAST, "--compile=true", f"--output_dir={tmp_path}", timeout=900, env=env)
    assert "ecompil" not in result.stderr, "the shape of a batch differs from that of the compilation"
    assert "not compiled" not in result.stdout and re.search(r"^compilation +\d", result.stdout, re.MULTILINE)
    assert (tmp_path / receipt.FILE).read_bytes() == (whole / receipt.FILE).read_bytes()
    assert losses(tmp_path) == pytest.approx(losses(whole), abs=0.2)


def test_the_short_recipe_is_another_run(tmp_path):
    """Its padding changes the training data, so a restart without it is refused."""
    arguments = (*FAST, f"--output_dir={tmp_path}", "--save_every=1")
    run(*arguments, "--max_steps=1", "--short_recipe=true")
    assert "its training data is" in run(*arguments, "--max_steps=2", code=2).stderr

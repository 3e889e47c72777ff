"""train_fsdp.py that is killed or stopped at a random moment, and started on the same or another number of
processes, has the data of an uninterrupted run; on the same number also its bits.

The moments follow from seeds; tests/support/repeats.py says how many there are.
"""

import os
import random
import signal
import subprocess
import time

import pytest

from bootfile.histories import read_states
from bootfile.receipt import receipt
from tests.conftest import QUICK, finish, losses, processes_of, read_until, run, start
from tests.support.repeats import repeats

pytestmark = pytest.mark.thorough

STEPS = 24


def _command(processes: int, output, *more) -> tuple:
    """In double precision: rounding errors of float32 grow with every step (tests/support/float64.py)."""
    return (
        "-m", "tests.support.float64", "jobs/train_fsdp.py", f"--processes_per_node={processes}", *QUICK,
        "--batch_size=96", f"--max_steps={STEPS}", "--save_every=5", "--report_every=1", "--lr=0.01",
        "--timeout=60", f"--output_dir={output}", *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the output of an uninterrupted run on a number of processes."""
    folder, made = tmp_path_factory.mktemp("whole"), set()

    def make(processes: int):
        output = folder / str(processes)
        if processes not in made:
            run(*_command(processes, output), timeout=600)
            made.add(processes)
        return output

    return make


@pytest.mark.parametrize("case", range(repeats(20, 6)))
def test_a_random_end_and_start(case, whole, tmp_path):
    draw = random.Random(case)
    processes, kind = (1, 2, 4)[case % 3], draw.choice(["kill one", "kill all", "stop"])
    following = processes if case % 2 else draw.choice([each for each in (1, 2, 4) if each != processes])
    output, form = tmp_path / "output", f"--checkpoint_format={draw.choice(['full', 'sharded'])}"
    unbroken = whole(following)
    job = start(*_command(processes, output, form), stderr=subprocess.STDOUT)
    read_until(job, rf" step={draw.randrange(6, STEPS - 3)}/")
    time.sleep(draw.uniform(0, 0.2))  # between two steps, in one, or in a save
    ranks = (processes_of(job) if processes > 1 else []) or [job.pid]
    for pid in ranks if kind == "kill all" else [draw.choice(ranks)]:
        os.kill(pid, signal.SIGTERM if kind == "stop" else signal.SIGKILL)
    ended = finish(job, None, timeout=300)
    assert ended.returncode == 143 if kind == "stop" else ended.returncode not in (0, 2), ended.stdout
    printed = run(*_command(following, output, form), timeout=600).stdout
    assert "resumed from" in printed and "refused" not in printed
    assert (output / receipt.FILE).read_bytes() == (unbroken / receipt.FILE).read_bytes()
    assert losses(output) == pytest.approx(losses(unbroken), abs=1e-5) and len(losses(output)) == STEPS
    if following == processes:
        own, other = read_states(str(output)), read_states(str(unbroken))
        assert {step: own[step]["parts"] for step in other} == {step: other[step]["parts"] for step in other}

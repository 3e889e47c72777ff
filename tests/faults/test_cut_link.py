"""Two nodes train on after the link between them was cut for seconds."""

import subprocess
import sys
import time

import pytest

from bootfile.histories import read_states
from bootfile.receipt import receipt
from tests.conftest import QUICK, ROOT, environment, finish, read_until, run_ranks, wait_until
from tests.support.network import LINK, namespace, needs_namespace

pytestmark = [pytest.mark.thorough, needs_namespace]
CUT = 4  # seconds; TCP sends again after up to twice as long
JOB = ("jobs/train_ddp.py", *QUICK, "--batch_size=32", "--epochs=2", "--report_every=1", "--timeout=60")


@pytest.fixture
def network():
    with namespace() as inside:
        yield inside


def test_a_link_that_is_cut_for_seconds_changes_nothing(network, tmp_path):
    address = ("--init_method=tcp://127.0.0.1:29500", "--world_size=2", f"--output_dir={tmp_path / 'cut'}")
    options = dict(cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    first, second = (
        subprocess.Popen([*network, sys.executable, *JOB, *address, f"--rank={rank}"], **options)
        for rank in range(2)
    )
    read_until(first, " step=3/")
    subprocess.run([*network, *LINK, "down"], check=True)
    metrics = tmp_path / "cut" / "metrics.jsonl"

    def rests():
        before = metrics.read_text()
        time.sleep(CUT / 2)
        return metrics.read_text() == before

    wait_until(rests)
    assert '"step": 88' not in metrics.read_text()
    assert first.poll() is None and second.poll() is None
    subprocess.run([*network, *LINK, "up"], check=True)
    assert "epoch=2 step=88/" in finish(first).stdout
    finish(second)

    run_ranks(*JOB, f"--output_dir={tmp_path / 'whole'}")
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    assert (cut / receipt.FILE).read_bytes() == (whole / receipt.FILE).read_bytes()
    for step, line in read_states(str(whole)).items():
        assert read_states(str(cut))[step]["parts"] == line["parts"]

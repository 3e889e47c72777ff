"""The printed batch script on a real Slurm: the signal before the time limit and the requeue cost no step."""

import json
import re
import sys

import pytest

from tests.conftest import QUICK, ROOT, run, wait_until
from tests.real import slurm

pytestmark = pytest.mark.real
STEPS = 400

CONFIG = """
name = "digits"
[resources]
node_count = 2
gpus_per_node = 0
[parameters]
dataset = "digits"
width = 8
max_steps = {steps}
save_every = 20
report_every = 20
enable_gpu = false
[environment]
OMP_NUM_THREADS = "1"
[retries]
faults = 3
[auto_stop]
hours = 1
[outputs]
train_url = "{folder}/runs"
[platform.slurm]
code_dir = "{code}"
log_dir = "{folder}"
python = "{python}"
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if reason := slurm.missing():
        pytest.skip(reason)
    made = slurm.Cluster(tmp_path_factory.mktemp("slurm"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the last receipt and the states of the undisturbed run, on two processes."""
    folder = tmp_path_factory.mktemp("whole")
    words = (*QUICK, f"--max_steps={STEPS}", "--save_every=20", "--report_every=20", "--enable_gpu=false")
    run(ROOT / "jobs" / "train_ddp.py", *words, "--processes_per_node=2", "--output_dir", folder, fresh=True)
    return results(folder)


def results(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    states = [json.loads(line) for line in (folder / "state.jsonl").read_text().splitlines()]
    receipts = [line["receipt"] for line in lines if "receipt" in line]  # an evaluation has none
    return receipts[-1], {line["step"]: line["digest"] for line in states if line["planned"]}


class Submitted:
    """The printed script, as a job of the cluster."""

    def __init__(self, cluster, folder, *options):
        config = CONFIG.format(steps=STEPS, folder=folder, code=ROOT, python=sys.executable)
        (folder / "job.toml").write_text(config)
        words = (
            "submit",
            "jobs/train_ddp.py",
            "--config",
            folder / "job.toml",
            "--platform=slurm",
            "--dry_run",
        )
        (folder / "job.sh").write_text(run("-m", "launch", *words).stdout)
        self.cluster, self.folder = cluster, folder
        self.id = cluster.ask("sbatch", "--parsable", *options, folder / "job.sh").strip()

    @property
    def output(self):
        [folder] = (self.folder / "runs").iterdir()
        return folder

    def printed(self):
        return "".join(path.read_text() for path in self.folder.glob("*.log"))

    def wait_for_step(self, step):
        """Wait until the job has reported this step."""
        wait_until(lambda: re.search(rf" step={step} ", self.printed()))

    def check(self, whole, restarts):
        self.cluster.wait(self.id, "COMPLETED")
        assert results(self.output) == whole
        assert self.printed().count("resumed from") == restarts
        assert f"Restarts={restarts} " in self.cluster.ask("scontrol", "show", "job", self.id)


def test_the_signal_before_the_time_limit_costs_no_step(cluster, whole, tmp_path):
    """All processes save and exit with 143; the script requeues the job; Slurm starts it 2 min later."""
    job = Submitted(cluster, tmp_path)
    job.wait_for_step(40)
    cluster.ask("scancel", "--signal=TERM", job.id)
    job.check(whole, restarts=1)

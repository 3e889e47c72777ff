"""The printed batch script on a real Slurm: whatever ends the job, it continues and costs no step."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, run, wait_until
from tests.real import slurm

pytestmark = pytest.mark.real
STEPS = 200
PARAMETERS = {
    "dataset": "digits",
    "width": 8,
    "batch_size": 16,
    "epochs": 100,
    "save_every": 25,
    "report_every": 25,
    "enable_gpu": False,
}

CONFIG = """
name = "digits"
[resources]
node_count = {nodes}
gpus_per_node = 0
[parameters]
{parameters}
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
    with slurm.Cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a function that gives the results of the run without Slurm, of some steps and processes."""
    known = {}

    def get(steps=STEPS, processes=2):
        if (steps, processes) not in known:
            folder = tmp_path_factory.mktemp("undisturbed")
            words = job_words(folder, steps)
            run(*words[1:], f"--processes_per_node={processes}", fresh=True)
            known[steps, processes] = results(folder)
        return known[steps, processes]

    return get


def job_words(folder, steps=STEPS):
    """Return the command of one process of the job."""
    options = (
        f"--{name}={str(value).lower()}" for name, value in (PARAMETERS | {"max_steps": steps}).items()
    )
    return sys.executable, ROOT / "jobs" / "train_ddp.py", *options, f"--output_dir={folder}"


def results(folder):
    """Return the last receipt of a run, and the digests of its states by step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    states = [json.loads(line) for line in (folder / "state.jsonl").read_text().splitlines()]
    receipts = [line["receipt"] for line in lines if "receipt" in line]  # an evaluation has none
    return receipts[-1], {line["step"]: line["digest"] for line in states if line.get("planned")}


class Submitted:
    """The printed script, as a job of the cluster. `id`: that of the job, `ID_TASK` in an array."""

    def __init__(self, cluster, folder, *sbatch, nodes=2, steps=STEPS, **parameters):
        parameters = PARAMETERS | {"max_steps": steps} | parameters
        lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in parameters.items())
        config = CONFIG.format(nodes=nodes, parameters=lines, folder=folder, code=ROOT, python=sys.executable)
        (folder / "job.toml").write_text(config)
        words = ("submit", "jobs/train_ddp.py", "--config", folder / "job.toml", "--platform=slurm")
        (folder / "job.sh").write_text(run("-m", "launch", *words, "--dry_run").stdout)
        self.cluster, self.folder = cluster, folder
        self.submit(*sbatch)

    def submit(self, *sbatch):
        """Submit the script."""
        self.since = time.monotonic()
        self.id = self.cluster.ask("sbatch", "--parsable", *sbatch, self.folder / "job.sh").strip()

    @property
    def output(self):
        [folder] = (self.folder / "runs").iterdir()
        return folder

    def printed(self, job=None):
        """Return what a job printed. job: one of an array; default: all."""
        number = self.cluster.get(job, "JobId") if job else "*"
        return "".join(path.read_text() for path in self.folder.glob(f"*-{number}.log"))

    def wait_for_step(self, step, job=None):
        """Wait until the job has reported this step. Fail if srun reports an error."""
        pattern = re.compile(rf" step={step}/|^srun: error", re.M)
        wait_until(lambda: pattern.search(self.printed(job)))
        assert "srun: error" not in self.printed(job), self.printed(job)

    def start_now(self, job=None):
        """Wait for the requeue, and shorten the 2 minutes until the start, for which one test waits.

        Slurm refuses a start in the second of the requeue.
        """
        self.cluster.wait(job or self.id, "PENDING")
        self.cluster.ask("scontrol", "update", f"JobId={job or self.id}", "StartTime=now+5")

    def newest_checkpoint(self):
        return max(int(path.stem.removeprefix("step_")) for path in self.output.glob("checkpoints/step_*.pt"))

    def resumed(self):
        """Return the steps at which the job resumed."""
        return [int(step) for step in re.findall(r"^resumed from \S+/step_(\d+)\.pt", self.printed(), re.M)]

    def check(self, expected, restarts):
        """Wait for the end, and compare the results with those of the undisturbed run."""
        self.cluster.wait(self.id, "COMPLETED")
        assert results(self.output) == expected
        assert int(self.cluster.get(self.id, "Restarts")) == restarts


def test_the_time_limit_costs_no_step(cluster, undisturbed, tmp_path):
    """Slurm sends the script's signal 120 s before the limit; the job saves and is requeued."""
    job = Submitted(cluster, tmp_path, steps=800)
    job.wait_for_step(75)
    minutes = int(time.monotonic() - job.since) // 60
    cluster.ask("scontrol", "update", f"JobId={job.id}", f"TimeLimit={minutes + 2}")
    cluster.wait(job.id, "PENDING")
    assert "SIGTERM: stopping" in job.printed()
    stopped = job.newest_checkpoint()
    cluster.ask("scontrol", "update", f"JobId={job.id}", "TimeLimit=60")
    job.start_now()
    job.check(undisturbed(steps=800), restarts=1)
    assert job.resumed() == [stopped]


@pytest.mark.parametrize("grace", [40, 0])
def test_a_preempted_job_continues(cluster, undisturbed, grace, tmp_path):
    """It saves within GraceTime, or if that is 0 within KillWait, and the other job gets its nodes."""
    cluster.ask("scontrol", "update", "PartitionName=low", f"GraceTime={grace}")
    job = Submitted(cluster, tmp_path)
    job.wait_for_step(75)
    words = ("--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    other = cluster.ask("sbatch", "--parsable", *words).strip()
    cluster.wait(other, "COMPLETED", seconds=60)
    stopped = job.newest_checkpoint()
    job.start_now()
    job.check(undisturbed(), restarts=1)
    assert job.resumed() == [stopped]


def test_a_cancelled_job_saves_and_is_not_requeued(cluster, undisturbed, tmp_path):
    """Submitted again, the same script continues at the step of its end."""
    job = Submitted(cluster, tmp_path)
    job.wait_for_step(75)
    assert cluster.processes(job.id)
    cluster.ask("scancel", job.id)
    cluster.wait(job.id, "CANCELLED", seconds=60)
    wait_until(lambda: not cluster.processes(job.id), timeout=60)
    assert cluster.get(job.id, "Restarts") == "0"
    [stopped] = re.findall(r"^stopped as asked after step (\d+)", job.printed(), re.M)
    job.submit()
    job.check(undisturbed(), restarts=0)
    assert job.resumed() == [int(stopped)]


def test_the_end_of_a_node_costs_the_steps_since_the_newest_checkpoint(cluster, undisturbed, tmp_path):
    """Slurm requeues the job when it misses the node, and starts it 2 minutes later with the node again.

    If it starts earlier, the node may get a repeated signal of Slurm that was meant for the lost processes.
    """
    job = Submitted(cluster, tmp_path)
    job.wait_for_step(75)
    cluster.stop("n2")
    cluster.wait(job.id, "PENDING", seconds=180)
    newest = job.newest_checkpoint()
    cluster.start_node("n2")
    cluster.wait_for_nodes()
    job.check(undisturbed(), restarts=1)
    assert job.resumed() == [newest]


def test_the_tasks_of_an_array_are_jobs_of_their_own(cluster, undisturbed, tmp_path):
    """Each has a folder. The stopped one requeues only itself, although its id is also that of the array."""
    array = Submitted(cluster, tmp_path, "--array=0-1", nodes=1, steps=2 * STEPS)
    tasks = [f"{array.id}_{task}" for task in range(2)]
    array.wait_for_step(75, last := tasks[-1])
    assert cluster.get(last, "JobId") == array.id
    cluster.ask("scancel", "--signal=TERM", last)
    array.start_now(last)
    for task in tasks:
        cluster.wait(task, "COMPLETED")
        assert cluster.get(task, "Restarts") == str(int(task == last))
        folder = array.output / task.rpartition("_")[2]
        assert results(folder) == undisturbed(steps=2 * STEPS, processes=1)


def test_srun_and_salloc_by_hand(cluster, undisturbed, tmp_path):
    """Two steps without a script, at once: each process finds its rank, its peers and a port of its own."""
    layout = ("--nodes=2", "--ntasks=2")
    steps = {"srun": ("srun", *layout), "salloc": ("salloc", *layout, "srun")}
    with (tmp_path / "log").open("w") as log:
        jobs = [
            subprocess.Popen(
                list(map(str, (*words, *job_words(tmp_path / name)))), env=cluster.env, stdout=log, stderr=log
            )
            for name, words in steps.items()
        ]
        try:
            assert [job.wait(180) for job in jobs] == [0, 0], (tmp_path / "log").read_text()
        finally:
            for job in jobs:
                job.kill()
    for name in steps:
        assert results(tmp_path / name) == undisturbed()


def test_two_tasks_on_each_node(cluster, undisturbed, tmp_path):
    """The ranks are in a row: 0 and 1 on the first node."""
    job = Submitted(cluster, tmp_path, "--ntasks-per-node=2", steps=50)
    job.check(undisturbed(steps=50, processes=4), restarts=0)
    assert "nodes=2 processes_per_node=2" in job.printed()


def test_a_name_that_does_not_resolve(cluster, tmp_path):
    """The node that cannot find the first one says so within --timeout, and the job is not requeued."""
    cluster.stop("n2")
    cluster.start_node("n2", hosts=Path("/etc/hosts"))
    cluster.wait_for_nodes()
    job = Submitted(cluster, tmp_path, timeout=10)
    cluster.wait(job.id, "FAILED", seconds=90)
    cluster.stop("n2")
    cluster.start_node("n2")
    assert "error: the master's host name n1 does not resolve" in job.printed()
    assert cluster.get(job.id, "Restarts") == "0"

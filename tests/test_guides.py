"""What guides/ shows for a platform works: expressions for a log of ModelArts, batch scripts of Slurm."""

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import LONGEST, QUICK, ROOT, environment, run

_STOP = """        if loader.step == 5 and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), 15)
"""
_STUBS = {  # doubles of Slurm's commands: srun starts two tasks on this machine
    "srun": """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
export SLURM_NTASKS=2
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" &
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" &
wait -n
first=$?
wait -n
second=$?
echo "tasks ended with $first $second"
exit $second
""",
    "scontrol": """#!/bin/bash
if [ "$1" = show ]; then echo 127.0.0.1; else echo "scontrol $*"; fi
""",
}


def test_expressions_find_the_figures_of_a_log(tmp_path):
    page = (ROOT / "guides" / "modelarts.md").read_text(encoding="utf-8")
    [(whole, group)] = re.findall(r"`(\(\?<= val_acc=[^`]*)` .* `( val_acc=[^`]*)`", page)
    [others] = re.findall(r"in place of `val_acc`, such as (.*)\.$", page, re.MULTILINE)
    names = ["val_acc", *re.findall(r"`(\w+)`", others)]
    log = run("jobs/train.py", *QUICK, "--max_steps=1", "--output_dir", tmp_path).stdout
    shown = re.search(r"^    (epoch=.*)\n    (epoch=.* val_loss=.*)$", page, re.MULTILINE)
    reports = [line for line in log.splitlines() if line.startswith("epoch=")]
    for example, line in zip(shown.groups(), reports, strict=True):
        assert re.findall(r"(\w+)=", example) == re.findall(r"(\w+)=", line)
    assert len(names) == 7
    for name in names:
        (found,) = re.findall(whole.replace("val_acc", name), log)
        assert re.findall(group.replace("val_acc", name), log) == [found] and float(found) >= 0


def read_scripts_of_slurm():
    """Return the batch scripts for 4 nodes and for one GPU, and the function `start` of an own loop."""
    names = ("job.sh", "one_gpu.sh", "own_loop.sh")
    return [(ROOT / "guides" / "slurm" / name).read_text(encoding="utf-8") for name in names]


def test_the_batch_script_is_the_one_that_submit_prints(tmp_path):
    example = (ROOT / "launch" / "job.example.toml").read_text(encoding="utf-8")
    config = tmp_path / "job.toml"
    config.write_text(example.replace("node_count = 2", "node_count = 4"), encoding="utf-8")
    words = ("jobs/train_ddp.py", "--config", config, "--platform=slurm", "--dry_run")
    printed = run("-m", "launch", "submit", *words).stdout
    name = r"train-ddp-\d{8}-\d{6}-\w{6}"
    whole, _, _ = read_scripts_of_slurm()
    assert re.sub(name, "NAME", printed.strip()) == re.sub(name, "NAME", whole.strip())


@pytest.mark.thorough
def test_an_own_loop_saves_in_the_batch_script_and_is_requeued(tmp_path):
    """A rank gets SIGTERM in step 5: both save, and the script asks for a new allocation."""
    whole, _, start = read_scripts_of_slurm()
    loop = (ROOT / "guides" / "own_loop" / "after.py").read_text()
    line = "        optimizer.zero_grad()\n"
    assert loop.count(line) == 1
    train = tmp_path / "train.py"
    train.write_text(loop.replace(line, _STOP + line))
    paths = {
        "/shared/env/bin/python": sys.executable,
        "/shared/code/train.py": str(train),
        "/shared/runs/train": str(tmp_path / "out"),
    }
    for path, here in paths.items():
        assert start.count(path) == 1
        start = start.replace(path, here)
    [start_of_job] = re.findall(r"^start\(\) \{.*?^\}\n", whole, re.MULTILINE | re.DOTALL)
    script = tmp_path / "job.sh"
    script.write_text(whole.replace(start_of_job, start))
    for name, text in _STUBS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = environment(
        PYTHONPATH=str(ROOT), SLURM_JOB_ID="7", SLURM_JOB_NODELIST="node", SLURM_NTASKS_PER_NODE="2"
    )
    env["PATH"] = f"{tmp_path}{os.pathsep}{env['PATH']}"
    job = subprocess.run(["bash", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert job.returncode == 143, job.stdout + job.stderr
    assert "tasks ended with 143 143" in job.stdout and "scontrol requeue 7" in job.stdout
    assert [path.name for path in (tmp_path / "out" / "checkpoints").glob("*.pt")] == ["step_5.pt"]


@pytest.mark.thorough
def test_a_script_on_one_gpu_saves_is_requeued_and_continues(tmp_path):
    """The process gets SIGTERM in step 25, saves, and is requeued: the next start continues from there."""
    _, single, _ = read_scripts_of_slurm()
    page = (ROOT / "bootfile" / "README.md").read_text(encoding="utf-8")
    [loop] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    line = "        optimizer.zero_grad()\n"
    assert loop.count(line) == 1
    train = tmp_path / "train.py"
    for path, here in (("/shared/env/bin/python", sys.executable), ("/shared/code/train.py", str(train))):
        assert single.count(path) == 1
        single = single.replace(path, here)
    (tmp_path / "job.sh").write_text(single)
    (tmp_path / "srun").write_text('#!/bin/bash\nshift\nexec "$@"\n')
    (tmp_path / "scontrol").write_text('#!/bin/bash\necho "scontrol $*"\n')
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    env = environment(PYTHONPATH=str(ROOT), SLURM_JOB_ID="7")
    env["PATH"] = f"{tmp_path}{os.pathsep}{env['PATH']}"
    stop = "        if loader.step == 25:\n            import os; os.kill(os.getpid(), 15)\n"
    for text, code, shown in (
        (loop.replace(line, stop + line), 143, "scontrol requeue 7"),
        (loop, 0, "/OUT/checkpoints/step_25.pt: epoch 1, step 25 of 189"),
    ):
        train.write_text(text)
        job = subprocess.run(
            ["bash", "job.sh"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LONGEST
        )
        assert job.returncode == code and shown in job.stdout, job.stdout + job.stderr

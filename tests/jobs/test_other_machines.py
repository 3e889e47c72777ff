"""A run that is started again with other threads, by another launcher, or with another instruction set."""

import shutil
import textwrap
from pathlib import Path

import pytest

from bootfile.machine import threads
from bootfile.machine.facts import aten_instructions
from bootfile.receipt.compare import compare_states
from bootfile.records import read_starts
from tests.conftest import QUICK, ROOT, environment, free_port, names, run
from tests.support.exact import facts

JOB = (*QUICK, "--batch_size=240", "--max_steps=6", "--save_every=2", "--report_every=2")
TRAIN, EXACT = "jobs/train.py", "jobs/train_exact.py"
OTHER_INSTRUCTIONS = {"ATEN_CPU_CAPABILITY": "default"}  # as a CPU that has neither AVX2 nor AVX-512
needs_instructions = pytest.mark.skipif(
    aten_instructions() == "DEFAULT", reason="this CPU has no other instruction set"
)


def train(
    output: Path, *options: str, job: str = TRAIN, threads: int | None = None, code: int = 0, **variables
):
    """Run a job in a new process. threads: OMP_NUM_THREADS; None: it is not set."""
    env = environment(**variables)
    env.pop("OMP_NUM_THREADS", None)
    if threads:
        env["OMP_NUM_THREADS"] = str(threads)
    return run(job, *JOB, *options, f"--output_dir={output}", env=env, code=code, fresh=True)


def cut(whole: Path, part: Path, step: int = 2) -> Path:
    """Copy a run without the checkpoints after a step, as if it had been killed, and return the copy."""
    shutil.copytree(whole, part)
    for path in (part / "checkpoints").iterdir():
        if int(path.name.split("_")[1].split(".")[0]) > step:
            path.unlink()
    return part


def read_environments(output: Path) -> list[dict]:
    """Return what each start of a run has recorded about its machine."""
    return [start["environment"] for start in read_starts(str(output))]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Return the output folder of a run with 2 threads."""
    output = tmp_path_factory.mktemp("whole")
    train(output, threads=2)
    return output


@pytest.fixture(scope="module")
def exact(tmp_path_factory) -> Path:
    """Return the output folder of an exact run."""
    output = tmp_path_factory.mktemp("exact")
    train(output, job=EXACT)
    return output


@pytest.mark.thorough
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_restart_keeps_the_threads_of_the_run(threads, whole, tmp_path):
    """A line names other threads."""
    part = cut(whole, tmp_path / "part")
    printed = train(part, threads=threads).stdout
    if threads == 2:
        assert "OMP_NUM_THREADS" not in printed
    else:
        assert names(printed, "2 threads", f"OMP_NUM_THREADS={threads}")
    assert facts(part) == facts(whole)
    assert [machine["threads"] for machine in read_environments(part)] == [2, 2]


@pytest.mark.thorough
def test_an_option_changes_the_threads_of_a_run_and_receipts_name_them(whole, tmp_path):
    part = cut(whole, tmp_path / "part")
    assert "OMP_NUM_THREADS" not in train(part, "--threads=1", threads=2).stdout
    equal, text = compare_states(str(whole), str(part))
    assert not equal and names(text, "2 threads first", "1 thread from step 3")
    other = tmp_path / "other"
    train(other, threads=1)
    equal, text = compare_states(str(whole), str(other))
    assert not equal and f"; {whole} computed with 2 threads, {other} with 1 thread: " in text


@pytest.mark.thorough
def test_each_launcher_gives_the_same_threads(tmp_path):
    """torchrun sets OMP_NUM_THREADS to 1, and this job divides the cores of the node by its processes."""
    job = ("jobs/train_ddp.py", *JOB)
    starters = {"own": [*job, "--processes_per_node=2"]}
    for name in ("run", "launch"):
        place = ("--nproc-per-node=2", f"--master-port={free_port()}")
        starters[name] = ["-m", f"torch.distributed.{name}", *place, *job]
    env = environment()
    del env["OMP_NUM_THREADS"]
    found = []
    for name, command in starters.items():
        run(*command, f"--output_dir={tmp_path / name}", env=env, fresh=True)
        found.append(facts(tmp_path / name))
        assert read_environments(tmp_path / name)[0]["threads"] == max(1, threads.share(1) // 2)
    assert found[0] == found[1] == found[2]


@needs_instructions
def test_another_instruction_set_is_named_before_the_first_step(tmp_path):
    whole, part = tmp_path / "whole", tmp_path / "part"
    run(TRAIN, *JOB, f"--output_dir={whole}")  # a fork: only the restart needs other instructions
    cut(whole, part)
    used = aten_instructions()
    lines = train(part, threads=1, **OTHER_INSTRUCTIONS).stdout.splitlines()
    warning = "warning:", f"ATen {used} until step 2", "ATen DEFAULT"
    place = next(number for number, line in enumerate(lines) if names(line, *warning))
    assert place < next(number for number, line in enumerate(lines) if " step=" in line)
    _, text = compare_states(str(whole), str(part))
    assert "equal" in text or names(text, f"ATen {used} first", "ATen DEFAULT from step 3")


@pytest.mark.thorough
@needs_instructions
def test_an_exact_job_refuses_another_instruction_set_until_an_option_accepts_it(exact, tmp_path):
    part = cut(exact, tmp_path / "part")
    used = aten_instructions()
    errors = train(part, job=EXACT, code=2, **OTHER_INSTRUCTIONS).stderr
    assert names(errors, "step_2.pt", f"ATen {used} until step 2", "ATen DEFAULT", "would differ")
    assert "--cpu_level native" in errors and len(errors.splitlines()) == 1
    printed = train(part, "--cpu_level=native", job=EXACT, **OTHER_INSTRUCTIONS).stdout
    assert "bits may differ" in printed
    # from then on this instruction set is that of the run
    assert "bits may differ" not in train(part, job=EXACT, **OTHER_INSTRUCTIONS).stdout
    assert [machine["ATen"] for machine in read_environments(part)] == [used, "DEFAULT", "DEFAULT"]


@pytest.mark.thorough
def test_a_level_is_recorded_and_kept(exact, tmp_path):
    output = tmp_path / "any"
    train(output, "--cpu_level=any", job=EXACT)
    [found] = read_environments(output)
    assert [found[name] for name in ("ATen", "oneDNN", "MKL")] == ["DEFAULT", "SSE41", "COMPATIBLE"]
    part = cut(output, tmp_path / "part")
    train(part, "--cpu-level", "any", job=EXACT)
    assert facts(part) == facts(output)
    if aten_instructions() != "DEFAULT":
        errors = train(cut(output, tmp_path / "without"), job=EXACT, code=2).stderr
        assert names(errors, "ATen DEFAULT until step 2", "would differ")


@pytest.mark.thorough
@needs_instructions
def test_a_run_may_get_a_level_later(exact, tmp_path):
    part = cut(exact, tmp_path / "part")
    printed = train(part, "--cpu_level=any", job=EXACT).stdout
    assert "bits may differ" in printed
    assert "bits may differ" not in train(part, "--cpu_level=any", job=EXACT).stdout


@pytest.mark.thorough
def test_a_level_in_a_file_comes_too_late(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('cpu_level = "any"\n')
    errors = train(tmp_path / "run", f"--config={path}", code=2).stderr
    assert names(errors, "--cpu_level any: torch", "imported before", "--config")


LOOP = """
import sys, torch
from torch.utils.data import DataLoader, TensorDataset
from bootfile import Exact, Job, torch_loader
torch.manual_seed(0)
x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
loader = torch_loader(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 16), torch.device("cpu"), epochs=2)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
job = Job(same_instructions=sys.argv[2] == "yes")
run = Exact(sys.argv[1], loader, model=model, optimizer=optimizer, save_every=2, job=job)
step = run.resume()
for _ in loader.epochs_from(step):
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        step += 1
        if run.end_step().save:
            run.save()
        if step == 4 and len(sys.argv) > 3:
            sys.exit()
run.close()
"""


@pytest.mark.thorough
@needs_instructions
def test_a_loop_of_ones_own_names_or_refuses_another_instruction_set(tmp_path):
    script = tmp_path / "loop.py"
    script.write_text(LOOP)

    command = (script, tmp_path / "out")
    env = environment(PYTHONPATH=str(ROOT))
    run(*command, "yes", "stop", env=env)
    other = env | OTHER_INSTRUCTIONS
    refused = run(*command, "yes", env=other, code=None)
    assert refused.returncode and "this run computed with ATen" in refused.stderr, refused.stderr
    assert "same_instructions=False" in refused.stderr
    assert "bits may differ" in run(*command, "no", env=other).stdout


@pytest.mark.thorough
def test_threads_of_a_loop_of_ones_own_are_those_of_its_checkpoint(tmp_path):
    script = tmp_path / "loop.py"
    script.write_text(textwrap.dedent(LOOP) + "print('threads', torch.get_num_threads())\n")
    for words, number in ((["stop"], "3"), ([], "1")):
        env = environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS=number)
        shown = run(script, tmp_path / "out", "no", *words, env=env)
    assert shown.stdout.splitlines()[-1] == "threads 3", shown
    assert names(shown.stdout, "3 threads", "OMP_NUM_THREADS=1", "give 1")

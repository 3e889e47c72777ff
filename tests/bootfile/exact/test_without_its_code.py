"""A run continues, saves and ends also if its code is deleted or replaced while it runs.

After its first steps it loads no module of its own, whatever ends it.
"""

import os
import shutil
import signal

import pytest

from tests.conftest import QUICK, ROOT, environment, finish, free_port, start, start_until

LOOP = """
import os, signal, sys, torch
from torch.utils.data import DataLoader, TensorDataset
from bootfile import Exact, torch_loader, usual

how, code = sys.argv[1:]
rank = int(os.environ.get("RANK", 0))
model = forward = torch.nn.Linear(4, 1)
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
    forward = torch.nn.parallel.DistributedDataParallel(model)
data = TensorDataset(torch.ones(64, 4), torch.ones(64, 1))
loader = torch_loader(DataLoader(data, 4), torch.device("cpu"), epochs=2)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
run = Exact("out", loader, model=model, forward=forward, optimizer=optimizer, save_every=5, keep=1,
            plugins=usual(stuck_after=0))
for _ in loader.epochs_from(run.resume()):
    for inputs, targets in loader:
        loss = torch.nn.functional.mse_loss(forward(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        due = run.end_step()
        if loader.step == 3 and rank == 0:
            os.rename(code, code + ".gone")
        if loader.step == 13:
            if how == "signal" and rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)
            if how == "lost" and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "error":
                raise RuntimeError("of the loop")
        if due.save:
            run.save()
run.close()
"""
# how the run ends -> exit code of rank 0, a word of its output, the step of the last checkpoint
ENDS = {
    "signal": (128 + signal.SIGTERM, "stopped as asked after step", None),
    "error": (1, "RuntimeError: of the loop", 10),
    "end": (0, "", 32),
}


def copied(folder, *names):
    for name in names:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def newest(folder) -> int:
    return max(int(path.stem.removeprefix("step_")) for path in (folder / "checkpoints").glob("step_*.pt"))


@pytest.mark.parametrize(("how", "ranks"), [*((how, 1) for how in ENDS), ("signal", 2), ("lost", 2)])
def test_a_loop_ends_as_with_its_code(tmp_path, how, ranks):
    code = copied(tmp_path / "code", "bootfile") / "bootfile"
    (tmp_path / "loop.py").write_text(LOOP)
    shared = {
        "PYTHONPATH": str(tmp_path / "code"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    places = [{"RANK": str(rank), "WORLD_SIZE": str(ranks)} for rank in range(ranks)] if ranks > 1 else [{}]
    jobs = [
        start("loop.py", how, str(code), cwd=tmp_path, env=environment(**shared, **place), fresh=True)
        for place in places
    ]
    done = [finish(job, None) for job in jobs]
    printed = done[0].stdout + done[0].stderr
    assert not code.exists() and "No module" not in printed and "ImportError" not in printed
    if how == "lost":
        assert "saved at step 13, after another rank was lost" in printed and newest(tmp_path / "out") == 13
        return
    returned, words, step = ENDS[how]
    assert {each.returncode for each in done} == {returned} and words in printed
    assert newest(tmp_path / "out") == (step or newest(tmp_path / "out"))


def test_a_job_stops_as_with_its_code(tmp_path):
    code = copied(tmp_path / "code", "bootfile", "common", "datasets", "jobs")
    command = (str(code / "jobs/train.py"), *QUICK, "--epochs=1000", "--report_every=1", "--stuck_after=0")
    options = {"cwd": tmp_path, "env": environment(), "fresh": True}
    job, before, proceed = start_until(*command, f"--output_dir={tmp_path / 'out'}", at="step=2/", **options)
    os.rename(code, tmp_path / "gone")
    job.send_signal(signal.SIGTERM)
    proceed()
    done = finish(job, 128 + signal.SIGTERM)
    printed = before + done.stdout + done.stderr
    assert "No module" not in printed and "ImportError" not in printed
    assert "to continue: " in printed and f"exit code {128 + signal.SIGTERM}" in printed

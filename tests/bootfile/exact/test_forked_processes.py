"""What a signal and the end of a loop do to processes that the loop has forked."""

import os
import re
import signal

import pytest

from tests.conftest import finish, read_until, run, start

LOOP = """
import multiprocessing, os, signal, sys, time
sys.path.insert(0, "")
import torch
from bootfile import Exact, torch_loader
from bootfile.processes import signals

def loader():
    return torch.utils.data.DataLoader(data, 4, num_workers=WORKERS)

data = torch.utils.data.TensorDataset(torch.ones(32, 2), torch.ones(32, 1))
batches = torch_loader(loader(), torch.device("cpu"), epochs=2)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = Exact(sys.argv[1], batches, model=model, optimizer=optimizer, save_every=100)
for _ in batches.epochs_from(run.resume()):
    for inputs, targets in batches:
        IN_STEP
        if run.end_step().save:
            run.save()
    AFTER_EPOCH
run.close()
print("closed", flush=True)
"""
# the workers have got the signal, too: those of torch would end at once, and torch would raise here
SIGNALLED = """
            print("now", flush=True)
            while not signals.asked(): time.sleep(0.01)
            time.sleep(0.3)
"""
IN_TRAINING = "if batches.step == 3:" + SIGNALLED
IN_EVALUATION = "for number, _ in enumerate(loader()):\n        if number == 2:" + SIGNALLED


def script(workers=0, in_step="pass", after_epoch="pass"):
    text = LOOP.replace("WORKERS", str(workers))
    return text.replace("IN_STEP", in_step).replace("AFTER_EPOCH", after_epoch)


@pytest.mark.parametrize(
    ("parts", "saved"),
    [({"in_step": IN_TRAINING}, 3), ({"after_epoch": IN_EVALUATION}, 9)],
    ids=["training", "evaluation"],
)
def test_a_signal_for_all_processes_ends_no_worker_of_torch(tmp_path, parts, saved):
    """A platform, as Slurm, signals all processes of a job, and the loop needs its workers until it saves."""
    job = start("-c", script(workers=2, **parts), tmp_path, start_new_session=True)
    read_until(job, "^now")
    os.killpg(job.pid, signal.SIGTERM)
    result = finish(job, 143)
    assert re.search(rf"stopped\D* step {saved}\b", result.stdout), result.stderr
    assert [path.name for path in (tmp_path / "checkpoints").glob("*.pt")] == [f"step_{saved}.pt"]


START = """if batches.step == 3:
            child = multiprocessing.get_context("fork").Process(target=signal.pause, daemon=True)
            child.start()
"""


def test_a_loop_that_a_signal_stops_leaves_no_daemonic_process(tmp_path):
    """It holds the pipe of the output: finish() waits for its end."""
    job = start("-c", script(in_step=START + "        " + IN_TRAINING), tmp_path)
    read_until(job, "^now")
    job.send_signal(signal.SIGTERM)
    assert re.search(r"stopped\D* step 3\b", finish(job, 143).stdout)


TERMINATE = "            child.terminate(); child.join(); print(child.exitcode)"


@pytest.mark.thorough
@pytest.mark.parametrize("then", ["", TERMINATE], ids=["end", "terminate"])
def test_a_process_of_the_loop_obeys_sigterm_of_its_parent(tmp_path, then):
    """Python sends it to daemonic processes at its end, and waits for them."""
    result = run("-c", script(in_step=START + then), tmp_path)
    lines = result.stdout.splitlines()
    assert lines[-1] == "closed"
    assert not then or f"-{signal.SIGTERM:d}" in lines

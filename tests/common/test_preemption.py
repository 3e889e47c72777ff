"""Signals that ask to stop: heard by every process, bounded, and harmless to workers."""

import os
import re
import signal
import textwrap
import time

import pytest

from tests.conftest import ROOT, finish, processes_of, start

STUCK = textwrap.dedent(f"""
    import sys, time
    sys.path.insert(0, {str(ROOT)!r})
    from common import preemption
    preemption.watch(1.0)
    print("ready", flush=True)
    {{wait}}
""")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_process_that_is_stuck_leaves_after_its_grace(number):
    """In C code that never returns to the interpreter: a lock, as inside a collective."""
    stuck = "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()"
    process = start("-c", STUCK.format(wait=stuck))
    assert process.stdout.readline() == "ready\n"
    begin = time.monotonic()
    process.send_signal(number)
    process.send_signal(number)
    result = finish(process, 143)
    assert 0.9 < time.monotonic() - begin < 3
    assert f"{number.name}: stopping at the next step, within 1 s" in result.stdout
    assert "error: asked to stop 1 s ago and not ready" in result.stderr


def test_workers_of_a_dataloader_do_not_die_of_it():
    """The whole process group is signalled, as a container's is: the batches still come."""
    work = textwrap.dedent("""
        import os, signal, torch
        class Slow(torch.utils.data.Dataset):
            def __len__(self): return 8
            def __getitem__(self, index): time.sleep(0.2); return index
        if __name__ == "__main__":
            loader = torch.utils.data.DataLoader(
                Slow(), batch_size=2, num_workers=2, worker_init_fn=preemption.ignore
            )
            seen = []
            for batch in loader:
                if not seen: os.killpg(0, signal.SIGTERM)
                seen += batch.tolist()
            print(seen, preemption.asked(), flush=True)
    """)
    script = STUCK.format(wait="").replace("watch(1.0)", "watch(30)") + work
    result = finish(start("-c", script, start_new_session=True))
    assert "[0, 1, 2, 3, 4, 5, 6, 7] True" in result.stdout


def test_one_process_is_signalled_while_all_evaluate(tmp_path):
    """Evaluating processes do not talk to each other, and the others stop soon all the same."""
    slow = (
        "import runpy, sys, time; sys.path.insert(0, '.'); from common import models\n"
        "original = models._ResNet.forward\n"
        "def forward(self, images):\n"
        "    if not self.training:\n"
        "        print('evaluating', flush=True)\n"
        "        time.sleep(0.5)\n"
        "    return original(self, images)\n"
        "models._ResNet.forward = forward\n"
        "from datasets import order\n"
        "start = order.Sequential.__init__\n"
        "def small(self, size, batch, *rest, **more): start(self, size, 4, *rest, **more)\n"
        "order.Sequential.__init__ = small\n"
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    job = start(
        "-c", slow, "jobs/train_ddp.py", "--dataset=digits", "--processes_per_node=2", "--batch_size=24",
        "--max_steps=2", f"--output_dir={tmp_path}",
    )  # fmt: skip
    for line in job.stdout:
        if "evaluating" in line:
            break
    begin = time.monotonic()
    os.kill(processes_of(job)[1], signal.SIGTERM)
    result = finish(job, 143)
    assert time.monotonic() - begin < 8  # 45 batches of half a second otherwise
    assert re.search(
        r"stopped as asked after step 2; the newest checkpoint is that of step 2\n", result.stdout
    )

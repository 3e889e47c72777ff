"""Measure what grows with the steps, the processes and the samples of a run, for guides/scale.md.

    python -m tests.benchmarks.growth                                     10^6 steps, 1 and 8 processes
    python -m tests.benchmarks.growth --steps 1000 --processes 1 2        a short trial

- steps: the bytes of the files of a run with a report every 10 steps and a save every 1,000, and the CPU
  seconds in which a restart, `launch receipt RUN RUN` and `launch report RUN RUN` read them. The files are
  those of a run of train.py on digits, with their last line repeated.
- start: CPU seconds and memory of `train_ddp.py --max_steps 3` with all processes of a node. Memory that
  several processes share counts once (the sum of Pss; the largest of ten looks a second).
- receipt of any loop: time for a batch of 128 images of 224 x 224 pixels, float32.
- order: time for a step of 128 samples in the order of an epoch, and its memory, at 10^6 and 4 * 10^18.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import tracemalloc

import numpy as np
import psutil
import torch

from bootfile.histories import cut_reports, read_states
from bootfile.receipt import contents, reading, receipt
from bootfile.records import STATES, cut_states
from bootfile.sampling.sampler import BatchSampler
from common.console.arguments import positive_int
from common.ground.files import ROOT
from tests.benchmarks import start
from tests.benchmarks.rounds import conditions, make_parser, spread, timed

SIZES = (10**6, 4 * 10**18)


def main() -> None:
    parser = make_parser(__doc__, rounds=3)
    parser.add_argument("--steps", type=positive_int, default=10**6, help="default: 1000000")
    parser.add_argument("--processes", type=positive_int, nargs="+", default=[1, 8], help="default: 1 8")
    options = parser.parse_args()
    with conditions(), tempfile.TemporaryDirectory() as folder:
        measure_steps(options.steps, os.path.join(folder, "run"), options.rounds)
        for processes in options.processes:
            cpu, memory = run_processes(processes)
            print(f"{processes} processes until the end of step 3: {cpu:.1f} CPU s, {memory / 1e9:.2f} GB")
        batch = torch.randn(128, 3, 224, 224), torch.arange(128)
        own = [timed(lambda: contents.hash_batch(batch)) * 1e3 for _ in range(options.rounds + 1)][1:]
        print(f"receipt of any loop: {spread(own, '.2f', ' ms')} a step of 128, n={options.rounds}")
        for size in SIZES:
            seconds, memory = draw(size)
            print(f"order of {size:.0e} samples: {seconds * 1e3:.2f} ms a step, {memory / 1e3:.0f} KB")


def measure_steps(steps: int, run: str, rounds: int) -> None:
    start.measure(
        ("jobs/train.py", "--dataset=digits", "--max_steps=1", "--report_every=1", f"--output_dir={run}"), []
    )
    make_longer(run, steps)
    for name in (receipt.FILE, "metrics.jsonl", STATES):
        print(f"{steps} steps: {name} {os.path.getsize(os.path.join(run, name)) / 1e6:.2f} MB")
    verbs = {
        "launch receipt RUN RUN": ("-m", "launch", "receipt", run, run),
        "launch report RUN RUN": ("-m", "launch", "report", run, run, f"--to={run}.html"),
    }
    times = {name: [start.measure(words, []) for _ in range(rounds)] for name, words in verbs.items()}
    for name, own in ({"a restart": [restart(run, steps) for _ in range(rounds)]} | times).items():
        print(f"{steps} steps, {name}: {spread(own, '.2f', ' CPU s')}, n={rounds}")


def make_longer(run: str, steps: int) -> None:
    """Repeat the last lines of a run of one step, and make a receipt of all steps."""
    os.unlink(os.path.join(run, receipt.FILE))
    sums = np.random.default_rng(0).integers(0, 2**62, (steps, 3))
    receipt.Receipt().chain(steps, 1000, sums, run)
    reports = os.path.join(run, "metrics.jsonl")
    with open(reports) as file:
        line = next(found for found in map(json.loads, file) if "loss" in found)
    with open(reports, "w") as file:
        for step in range(10, steps + 1, 10):
            file.write(json.dumps(line | {"step": step, "epoch": step // 1000 + 1}) + "\n")
    [state, *_] = read_states(run).values()
    with open(os.path.join(run, STATES), "w") as file:
        for step in range(1000, steps + 1, 1000):
            file.write(json.dumps(state | {"step": step}) + "\n")


def restart(run: str, steps: int) -> float:
    """Read and check the files as a restart at the last step does, and return its CPU seconds."""
    begin = time.process_time()
    reading.read_records(run)
    cut_reports(run, steps, False)
    cut_states(run, steps)
    return time.process_time() - begin


def run_processes(processes: int) -> tuple[float, float]:
    """Return the CPU seconds and the largest memory in bytes of a job with these processes."""
    with tempfile.TemporaryDirectory() as output:
        words = ("--dataset=digits", "--width=8", "--max_steps=3", f"--output_dir={output}")
        words = (*words, f"--processes_per_node={processes}")
        before, most = os.times(), 0.0
        command = [sys.executable, "jobs/train_ddp.py", *words]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as job:
            while job.poll() is None:
                most = max(most, sum(map(own_memory, family(job.pid))))
                time.sleep(0.1)
        assert job.returncode == 0, job.returncode
        after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return cpu, most


def family(pid: int) -> list[psutil.Process]:
    try:
        job = psutil.Process(pid)
        return [job, *job.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def own_memory(process: psutil.Process) -> float:
    try:
        return process.memory_full_info().pss
    except psutil.Error:  # it has ended
        return 0.0


def draw(size: int, steps: int = 1000) -> tuple[float, float]:
    """Return the seconds of a step of the order of an epoch, and the largest memory of Python objects."""
    tracemalloc.start()
    sampler = iter(BatchSampler(size, 128, 0))
    for _ in range(10):
        next(sampler)
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    begin = time.perf_counter()
    for _ in range(steps):
        next(sampler)
    return (time.perf_counter() - begin) / steps, memory


if __name__ == "__main__":
    main()

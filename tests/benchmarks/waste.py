"""The steps that are computed twice after a kill, with default options: with and without the survivors' save.

    python -m tests.benchmarks.waste
    python -m tests.benchmarks.waste --kills 9 --epoch 100 --milliseconds 50

A loop of two nodes of two processes (gloo, CPU) is killed again and again, each time at a random moment of
the two epochs that follow its restart, and continues. Each way of killing has a run of its own:

    SIGTERM         all processes get it, as from a platform that gives notice
    a rank          SIGKILL of the last process
    a node          SIGKILL of the processes of the last node
    first node      SIGKILL of those of the first one, and with it of rank 0
    first node, any   the same, with usual(survivors="any"): another rank saves

Step N is computed twice if its end was printed before the kill, and the restart trains it again.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import tempfile
import time

from tests.benchmarks.rounds import conditions, make_parser, spread
from tests.conftest import ROOT, read_until, start_ranks

_RANKS = 4
_WAYS = {  # way -> (signal, ranks that get it)
    "SIGTERM": (signal.SIGTERM, range(_RANKS)),
    "a rank": (signal.SIGKILL, [_RANKS - 1]),
    "a node": (signal.SIGKILL, [_RANKS - 2, _RANKS - 1]),
    "first node": (signal.SIGKILL, [0, 1]),
    "first node, any": (signal.SIGKILL, [0, 1]),
}
_END = 120.0  # seconds that survivors have to end
LOOP = """
import os, sys, time
sys.path.insert(0, ROOT)
import torch
from bootfile import BatchSampler, Exact, map_style_loader, usual
from bootfile.exact import survivor

if not SAVES:
    survivor.can_survive = lambda parts: False  # as in version 0.33
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
torch.manual_seed(0)
samples = 8 * EPOCH
data = torch.utils.data.TensorDataset(torch.randn(samples, 16), torch.randn(samples, 1))
loader = map_style_loader(data, BatchSampler(samples, 8, 0, epochs=10**6), torch.device("cpu"))
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.Linear(64, 1))
forward = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
plugins = usual(survivors=SURVIVORS)
run = Exact("OUT", loader, model=model, forward=forward, optimizer=optimizer, plugins=plugins)
for _ in loader.epochs_from(run.resume()):
    for inputs, targets in loader:
        time.sleep(MILLISECONDS / 1000)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(forward(inputs), targets)
        loss.backward()
        if run.accepts(loss):
            optimizer.step()
        saves = run.end_step().save
        if torch.distributed.get_rank() == 0:
            print("step", loader.step, flush=True)
        if saves:
            run.save()
"""


def measure(folder: str, args: argparse.Namespace, way: str, saves: bool) -> list[int]:
    """Return the steps that were computed twice after each kill. folder: empty."""
    script = os.path.join(folder, "loop.py")
    survivors = "any" if way.endswith("any") else "first"
    values = (str(ROOT), args.epoch, args.milliseconds, saves, survivors)
    with open(script, "w", encoding="utf-8") as file:
        file.write(f"ROOT, EPOCH, MILLISECONDS, SAVES, SURVIVORS = {values!r}\n{LOOP}")
    random.seed(0)  # the moments are the same for all ways
    number, killed = _WAYS[way]
    last = 0  # the last step whose end was printed before the kill
    twice = []
    for _ in range(args.kills + 1):
        jobs = start_ranks(script, ranks=_RANKS, cwd=folder, fresh=True, stderr=subprocess.DEVNULL)
        try:
            first = read_step(read_until(jobs[0], r"^step \d+"))
            twice.append(last - first + 1)
            until = first + random.randrange(2 * args.epoch)
            last = read_step(read_until(jobs[0], f"^step {until}$")) if until > first else first
            time.sleep(random.random() * args.milliseconds / 1000)
            for rank in killed:
                jobs[rank].send_signal(number)
            for job in jobs:
                printed, _ = job.communicate(timeout=_END)
                if job is jobs[0]:
                    last = max([last, *map(int, re.findall(r"^step (\d+)$", printed, re.MULTILINE))])
        finally:
            for job in jobs:
                job.kill()
    return twice[1:]  # nothing was lost before the first start


def read_step(lines: list[str]) -> int:
    """Return the number of the step in the last line."""
    return int(lines[-1].split()[1])


def main() -> None:
    parser = make_parser(__doc__)
    for name, default in (("kills", 9), ("epoch", 100), ("milliseconds", 50)):
        parser.add_argument(f"--{name}", type=int, default=default, help="default: %(default)s")
    parser.add_argument(
        "--ways", default=";".join(_WAYS), help="ways of killing, divided by ; (default: all)"
    )
    args = parser.parse_args()
    with conditions():
        print(f"{_RANKS} processes, {args.epoch} steps of {args.milliseconds} ms in an epoch, n={args.kills}")
        print("\n| killed | steps computed twice | without the survivors' save |\n|---|---|---|", flush=True)
        for way in args.ways.split(";"):
            cells = []
            for saves in (True, False):
                with tempfile.TemporaryDirectory() as folder:
                    cells.append(spread(measure(folder, args, way, saves), ".0f"))
            print(f"| {way} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

"""Repeat Dpex's accuracy table: is the accuracy on Fashion-MNIST equal if a Ray cluster prepares the data?

    python -m tests.benchmarks.ray_accuracy --data_url FOLDER [--epochs 8]

{one process, DataParallel, DDP with 2 processes} x {distribute_mode off, on}: train.py with the blocks of
train_ray.py and of train_dp.py or train_ddp.py (tests/support/marks.py), learning rate 0.001 and batch size
100 as in the table of Dpex's document. The table's 90 % come from a small network, so two lines of the base
are replaced: the network below instead of the ResNet-18, and Adam instead of SGD.
Without GPUs DataParallel is the plain module.
"""

import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from launch.new.blocks import combine
from tests.benchmarks.rounds import describe, make_parser
from tests.support.marks import ROOT
from tests.support.ray_nodes import RayNodes

NETWORK = '''
def small(channels, classes):
    """Two convolutions of 3x3 with BatchNorm and pooling, two dense layers: 421,834 parameters for 28x28."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(channels, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(32, 64, 3, padding=1), torch.nn.BatchNorm2d(64), torch.nn.ReLU(),
        torch.nn.MaxPool2d(2), torch.nn.Flatten(),
        torch.nn.Linear(64 * 7 * 7, 128), torch.nn.ReLU(), torch.nn.Linear(128, classes),
    )


'''
SETTINGS = [("one process", ()), ("DataParallel", ("train_dp",)), ("DDP, 2 processes", ("train_ddp",))]
EXCHANGED = [
    (r"models\.resnet18\(", "small("),
    (r"torch\.optim\.SGD\(\n.*\n    \)", "torch.optim.Adam(model.parameters(), lr=args.lr)"),
    (r"@entry", NETWORK.strip("\n") + "\n\n\n@entry"),
]


def combined(names: tuple[str, ...]) -> str:
    """Return the text of the job."""
    texts = [(ROOT / "jobs" / f"{name}.py").read_text(encoding="utf-8") for name in ("train", *names)]
    job = combine(*texts, (ROOT / "jobs" / "train_ray.py").read_text(encoding="utf-8"))
    for pattern, text in EXCHANGED:
        job, count = re.subn(pattern, text, job)
        if count != 1:
            sys.exit(f"{pattern}: expected once, found {count} times")
    return job


def measure(folder: Path, names: tuple[str, ...], remote: bool, options, environment: dict) -> tuple:
    """Return (test accuracy, test loss, receipts, seconds) of one run."""
    job = folder / "jobs" / "job.py"
    job.parent.mkdir(exist_ok=True)
    job.write_text(combined(names), encoding="utf-8")
    output = folder / f"{'-'.join(names) or 'train'}-{remote}"
    command = [
        sys.executable, str(job), "--dataset=fashion_mnist", f"--data_url={options.data_url}", "--lr=0.001",
        "--batch_size=100", f"--epochs={options.epochs}", f"--distribute_mode={str(remote).lower()}",
        "--workers=1", f"--output_dir={output}", f"--seed={options.seed}",
    ]  # fmt: skip
    if "train_ddp" in names:
        command.append("--processes_per_node=2")
    begin = time.perf_counter()
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment)
    if result.returncode:
        sys.exit(f"exit code {result.returncode}: {' '.join(command)}\n{result.stdout[-2000:]}")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    receipts = [line["receipt"] for line in lines if "receipt" in line]
    last = [line for line in lines if "val_acc" in line][-1]
    return last["val_acc"], last["val_loss"], receipts, time.perf_counter() - begin


def main():
    parser = make_parser(__doc__)
    parser.add_argument("--data_url", required=True, help="folder with Fashion-MNIST")
    parser.add_argument("--epochs", type=int, default=8, help="default: 8")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    options = parser.parse_args()
    options.data_url = os.path.abspath(options.data_url)
    print(f"{datetime.date.today()}, {describe()}\n", flush=True)
    print("| accuracy (%) | loss | processes | distribute_mode | epochs | receipt | seconds |")
    print("|---|---|---|---|---|---|---|", flush=True)
    nodes = RayNodes(2)
    try:
        environment = os.environ | nodes.environment | {"PYTHONPATH": str(ROOT)}
        with tempfile.TemporaryDirectory() as folder:
            for name, names in SETTINGS:
                found = []
                for remote in (False, True):
                    accuracy, loss, receipts, seconds = measure(
                        Path(folder), names, remote, options, environment
                    )
                    found.append((accuracy, receipts))
                    cells = [
                        f"{100 * accuracy:.2f}", f"{loss:.4f}", name, remote, options.epochs, receipts[-1],
                        f"{seconds:.0f}",
                    ]  # fmt: skip
                    print(f"| {' | '.join(map(str, cells))} |", flush=True)
                points = 100 * abs(found[0][0] - found[1][0])
                equal = "equal" if found[0][1] == found[1][1] else "NOT EQUAL"
                print(f"<!-- {name}: {len(found[0][1])} receipts {equal}, {points:.2f} points apart -->")
    finally:
        nodes.close()
    print(f"\nload average at the end {os.getloadavg()[0]:.2f}")


if __name__ == "__main__":
    main()

"""Measure what each block of jobs/train_fast.py gains: the whole job and the job without the block, in turns.

python -m tests.benchmarks.blocks [--blocks 1,3,6,9] [--dataset digits] [--rounds 5] [--batch_size 128]

Ratios of images/s to the whole job in the same round, median and range. Block 1 sets the batch size: without
it the job has train.py's, so do not pass --batch_size. Block 8 compiles, which is off on the CPU: pass
--compile true. Blocks 2, 4, 5 and 7 change the result of training, and block 10 the evaluation: they do not
change the time of a step. The last row is train.py.
"""

import argparse
import os
import sys
import tempfile

import torch

from tests.benchmarks import generated, jobs
from tests.benchmarks.rounds import conditions, make_parser, print_ratios, take_turns
from tests.support.marks import ROOT, without_block

JOB = "train_fast.py"
_TIMEOUT = 900  # seconds
_GPU = torch.cuda.is_available()


def main():
    options = _parsed()
    with conditions(), tempfile.TemporaryDirectory() as folder:
        measure = {}
        for name, text, extra in _texts(options.blocks):
            command = [sys.executable, _write(os.path.join(folder, name), text)]
            command += [*extra, *_arguments(options)]
            measure[name] = lambda command=command: jobs.measure(command, _TIMEOUT)["images_per_s"]
        print_ratios(JOB, take_turns(measure, options.rounds), ".1f")


def _parsed() -> argparse.Namespace:
    parser = make_parser(__doc__, 5)
    add = parser.add_argument
    add("--blocks", default="1,3,6,9", help="default: 1,3,6,9")
    add("--dataset", default="cifar10", help="generate images of its shape (default: cifar10)")
    add("--batch_size", type=int, help="of all jobs (default: that of the job)")
    add("--report_every", type=int, default=100 if _GPU else 4, help="steps of a turn (default: %(default)s)")
    add("--compile", default="false", help="default: false")
    options = parser.parse_args()
    options.blocks = [int(block) for block in options.blocks.split(",") if block]
    return options


def _texts(blocks: list[int]):
    whole = (ROOT / "jobs" / JOB).read_text(encoding="utf-8")
    yield "whole", whole, []
    for block in blocks:
        if block == 1:  # this block defines an argument that another block reads
            yield "without block 1", whole, ["--batch_size=128", "--lr=0.1"]
        else:
            yield f"without block {block}", without_block(whole, block), []
    yield "train.py", (ROOT / "jobs" / "train.py").read_text(encoding="utf-8"), []


def _arguments(options: argparse.Namespace) -> list[str]:
    found = [
        f"--dataset={options.dataset}", "--epochs=100000", f"--report_every={options.report_every}",
        "--save_every=1000000000", "--epoch_weights=false",
    ]  # fmt: skip
    if options.dataset == "cifar10" and _GPU:  # 50,000 images: epochs that are longer than a turn
        found += [f"--data_url={generated.cifar_folder(os.path.join(ROOT, 'output_dir', 'index'))}"]
    else:
        found += ["--custom_data=true"]
    found += [f"--batch_size={options.batch_size}"] if options.batch_size else []
    return [*found, f"--compile={options.compile}", "--ignore_unknown=true"]  # train.py does not compile


def _write(folder: str, text: str) -> str:
    """Write the job to a folder with links to its imports, and return its path."""
    os.makedirs(os.path.join(folder, "jobs"))
    for package in ("bootfile", "common", "datasets"):
        os.symlink(ROOT / package, os.path.join(folder, package))
    path = os.path.join(folder, "jobs", JOB)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    return path


if __name__ == "__main__":
    main()

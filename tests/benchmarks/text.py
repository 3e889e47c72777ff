"""Measure the speed of jobs/train_text.py and of nanoGPT's train.py with the same network and batches.

    git clone https://github.com/karpathy/nanoGPT FOLDER
    python -m tests.benchmarks.text FOLDER [--rounds 5] [--layers 4] [--heads 4] [--width 128]

The code of FOLDER is copied to a temporary folder and runs there. Both train on the CPU in float32 without
compilation, on one random text, with AdamW and clipping. A figure is the speed of the last 100 of 200 steps.
In each round both programs are started once.
"""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from bootfile.ground.errors import BadInput
from common.console import arguments
from common.distributed.entry import entry
from common.ground.files import ROOT
from tests.benchmarks.rounds import conditions, make_parser, print_ratios, tail, take_turns

_STEPS = 100  # steps of a report; the first report is not counted


@entry
def main() -> None:
    """Measure and print a table. Raises BadInput if a program fails."""
    parser = make_parser(__doc__, 5)
    parser.add_argument("folder", help="a clone of nanoGPT")
    for name, default in {"layers": 4, "heads": 4, "width": 128, "context": 64, "batch_size": 12}.items():
        parser.add_argument(
            f"--{name}", type=arguments.positive_int, default=default, help=f"default: {default}"
        )
    args = parser.parse_args()
    if not os.path.isfile(os.path.join(args.folder, "train.py")):
        raise BadInput(f"{args.folder} has no train.py: expected a clone of nanoGPT")

    with tempfile.TemporaryDirectory() as temporary, conditions():
        peer = Path(temporary) / "peer"
        shutil.copytree(args.folder, peer)
        data = peer / "data" / "random"
        data.mkdir()
        for name, count in (("train.bin", 1_000_000), ("val.bin", 10 * args.context)):
            np.random.default_rng(0).integers(0, 256, count).astype(np.uint16).tofile(data / name)
        (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 256}))  # nanoGPT reads it

        def run(command: list[str], folder: str | Path) -> str:
            result = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True)
            if result.returncode:
                raise BadInput(f"{command[0]} ended with {result.returncode}: {tail(result.stderr)}")
            return result.stdout

        def ours() -> float:
            shape = [f"--{name}={getattr(args, name)}" for name in ("layers", "heads", "width", "context")]
            job = ["jobs/train_text.py", *shape, f"--batch_size={args.batch_size}", f"--data_url={data}"]
            limits = [f"--max_steps={2 * _STEPS}", f"--report_every={_STEPS}", "--epoch_weights=false"]
            with tempfile.TemporaryDirectory() as output:
                run([*job, *limits, f"--output_dir={output}"], ROOT)
                text = Path(output, "metrics.jsonl").read_text(encoding="utf-8")
            lines = [json.loads(line) for line in text.splitlines()]
            return [line["tokens_per_s"] for line in lines if "tokens_per_s" in line][-1]

        def theirs() -> float:
            shape = [f"--n_layer={args.layers}", f"--n_head={args.heads}", f"--n_embd={args.width}"]
            shape += [f"--block_size={args.context}", f"--batch_size={args.batch_size}", "--bias=True"]
            limits = ["--gradient_accumulation_steps=1", f"--max_iters={2 * _STEPS}", "--eval_iters=1"]
            printed = run(
                ["train.py", "--dataset=random", "--device=cpu", "--compile=False", *shape, *limits], peer
            )
            times = [
                float(each) for each in re.findall(r"^iter \d+: .* time ([\d.]+)ms", printed, re.MULTILINE)
            ]
            return args.batch_size * args.context * _STEPS / sum(times[-_STEPS:]) * 1000

        print_ratios(
            f"{args.layers} layers of {args.width}, {args.batch_size} x {args.context} tokens",
            take_turns({"nanoGPT's train.py": theirs, "jobs/train_text.py": ours}, args.rounds),
            unit="tokens/s",
        )


if __name__ == "__main__":
    main()

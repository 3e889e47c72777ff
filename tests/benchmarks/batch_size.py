"""Find the largest batch that fits on this GPU, for each data backend.

    python -m tests.benchmarks.batch_size --arch resnet18 [--data_url DIR]

Each try is a separate process that trains and validates for some batches. The size is doubled until it does
not fit, then bisected.
"resident": the validation pipeline stays during training. "released": Dataset.prep_for_val() builds it for a
validation, and it is released afterwards. The table has the figures of the article "Diving into DALI: how to
boost PyTorch data loading" (ResNet-18 in fp16 on a V100 of 16 GB), before and after its own change to DALI's
example.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator

import torch

from bootfile.ground.errors import BadInput
from common.compute import classifiers, networks
from common.console import arguments
from common.distributed.entry import entry
from datasets.compat.dali_dataset import Dataset
from datasets.folders import image_folder
from datasets.loaders import backends
from launch.loader_rates import log
from tests.benchmarks import generated
from tests.benchmarks.rounds import describe, make_parser, tail

ARTICLE = {"pytorch": (None, 1248), "dali": (800, 1216), "dali-gpu": (640, 928)}
_TRIAL = "--trial"  # of a process of this program: one try
_STEPS = 3  # training steps, and validation batches; all buffers exist afterwards
NO_ROOM = (
    "out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc", "memoryerror",
    "can't start new thread", "resource temporarily unavailable", "cudnn_status", "unable to find an engine",
    "cublas_status_alloc_failed", "allocator_failure",
)  # fmt: skip
_TIMEOUT = 600  # seconds for one try; a longer one ends the program


@entry
def main() -> None:
    """Search and print a table. Raises BadInput."""
    args = _parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        raise BadInput("no GPU found")
    args.data_url = args.data_url or generated.image_folder(args.cache_dir)
    images = image_folder.load(args.data_url, "train", args.cache_dir, log=log)
    most = len(images) // args.step * args.step
    print(f"{args.arch}, images/batch that fit on {describe()}, and on the article's V100")
    print(f"{'':<12}{'resident':>10}{'released':>10}{'article: before':>18}{'after':>8}")
    here = [name for name, reason in backends.reasons(device).items() if not reason]
    for backend in args.backends.split(",") if args.backends else [name for name in here if name in ARTICLE]:
        resident, released = (_largest(args, backend, way, most) for way in ("resident", "released"))
        before, after = ARTICLE[backend]
        print(f"{backend:<12}{resident:>10}{released:>10}{before or '':>18}{after:>8}", flush=True)


def _parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__)
    add, count = parser.add_argument, arguments.positive_int
    add("--cache_dir", default="output_dir/index", help="for indexes (default: %(default)s)")
    add("--arch", type=networks.arch, default="resnet18", help="from torchvision.models (default: resnet18)")
    add("--data_url", metavar="DIR", help="folder with train/ and val/<class>/* (default: generated)")
    add("--image_size", type=count, default=224, help="default: 224")
    add("--workers", type=count, default=4, help="default: 4")
    add("--backends", help="names, separated by commas (default: torchvision and DALI's)")
    add("--step", type=count, default=16, help="try multiples of this size (default: 16)")
    return parser.parse_args()


def _largest(args: argparse.Namespace, backend: str, way: str, most: int) -> int:
    """Return the largest batch up to `most` that fits, a multiple of --step. way: resident or released."""

    def fits(batch: int) -> bool:
        room = _try(args, backend, way == "resident", batch)
        log(f"{backend}, {way}: {batch} {'fits' if room else 'does not fit'}")
        return room

    return find_largest(fits, most, args.step)


def find_largest(fits: Callable[[int], bool], most: int, step: int) -> int:
    """Return the largest batch up to `most` that fits, a multiple of `step`; 0 if none fits.

    It is doubled until it does not fit, then bisected.
    """
    largest, fails = 0, most + step
    while largest + step < fails:
        guess = 2 * largest if fails > most else (largest + fails) // 2
        batch = min(max(guess // step * step, largest + step), fails - step)
        largest, fails = (batch, fails) if fits(batch) else (largest, batch)
    return largest


def _try(args: argparse.Namespace, backend: str, resident: bool, batch: int) -> bool:
    """Return whether the batch fits."""
    case = {
        "backend": backend, "resident": resident, "batch": batch, "arch": args.arch,
        "folder": args.data_url, "cache": args.cache_dir, "size": args.image_size, "workers": args.workers,
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.benchmarks.batch_size", _TRIAL, json.dumps(case)]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_TIMEOUT)
    if result.returncode == 0:
        return True
    errors = result.stderr.lower()
    if result.returncode < 0 or any(sign in errors for sign in NO_ROOM):
        return False
    raise BadInput(f"{backend} with {batch} samples failed: {tail(result.stderr)}")


def _trial(case: dict) -> None:
    """Train and validate for some batches. If the batch does not fit, this raises or ends the process."""
    dataset = Dataset(
        case["folder"], case["batch"], size=case["size"], val_size=case["size"] * 8 // 7,
        workers=case["workers"], backend=case["backend"], cache_dir=case["cache"], fp16=True,
    )  # fmt: skip
    model = classifiers.build(case["arch"], dataset.get_nb_classes(), case["size"])
    model = model.to(dataset.device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    if case["resident"]:  # after a first validation, as in later epochs
        dataset.prep_for_val()
        kept = iter(dataset.get_val_loader())
        next(kept)
    for images, labels in itertools.islice(_endless(dataset.get_train_loader()), _STEPS):
        with torch.autocast("cuda", torch.float16):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del images, labels, loss
    model.eval()
    with torch.no_grad(), torch.autocast("cuda"):
        if not case["resident"]:
            dataset.prep_for_val()
            kept = iter(dataset.get_val_loader())
        for images, _ in itertools.islice(kept, _STEPS):
            model(images)
    torch.cuda.synchronize()
    sys.stdout.flush()
    os._exit(0)  # without waiting for the loaders


def _endless(loader: Iterable) -> Iterator:
    while True:
        yield from loader


if __name__ == "__main__":
    if sys.argv[1:2] == [_TRIAL]:
        _trial(json.loads(sys.argv[2]))
    else:
        main()

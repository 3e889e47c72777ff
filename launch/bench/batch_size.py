"""Find the largest batch that fits on this GPU, for every way in which images arrive there.

    python -m launch bench batch-size --arch resnet18 [--data_url DIR] [--json]

Each try is a process of its own that trains and validates for some batches. "resident": the validation
pipeline stays during training; "released": Dataset.prep_for_val() builds it for a validation, and it is
released after that. The table has the figures of the article "Diving into DALI: how to boost PyTorch data
loading" (ResNet-18 in fp16 on a V100 of 16 GB), before and after its own change to DALI's example. Without
a GPU, --memory GB limits what a process may allocate on the host: that shows the search, not a GPU.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator

import torch

from common import arguments, models
from common.exits import BadInput
from datasets.compat.dali_dataset import Dataset
from datasets.folders import image_folder, random_folder
from datasets.loaders import backends
from launch.bench.output import log, make_parser, tail

ARTICLE = {"pytorch": (None, 1248), "dali": (800, 1216), "dali-gpu": (640, 928)}
_STEPS = 3  # of training, and batches of validation: all buffers exist then
_NO_ROOM = (
    "out of memory", "can't allocate memory", "cannot allocate memory", "bad_alloc", "memoryerror",
    "can't start new thread", "resource temporarily unavailable",
)  # fmt: skip
_TIMEOUT = 600  # seconds a try
_COPIES = 8  # links to each generated image, so that a batch may be larger than what is generated


def main(argv: list[str]) -> int:
    """Search, print a table (or JSON) and return 0. Raises BadInput."""
    args = _parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.memory:
        raise BadInput("no GPU here, whose memory limits the batch: --memory GB tries it on the host")
    args.data_url = args.data_url or _generated(args.cache_dir)
    images = image_folder.load(args.data_url, "train", args.cache_dir, log=log)
    most = len(images) // args.step * args.step
    rows = {}
    for backend in backends.parse_list(args.backends, device, log):
        if backend not in ARTICLE:
            continue
        rows[backend] = {
            name: _largest(args, backend, name == "resident", most) for name in ("resident", "released")
        }
    found = {"machine": _machine(device, args), "arch": args.arch, "most": most, "batch_sizes": rows}
    print(json.dumps(found, indent=2) if args.json else _table(found))
    return 0


def _parse_args(argv: list[str]) -> argparse.Namespace:
    parser = make_parser(__doc__, "batch-size")
    add, count = parser.add_argument, arguments.positive_int
    add("--arch", type=models.arch, default="resnet18", help="of torchvision.models (default: resnet18)")
    add("--data_url", metavar="DIR", help="folder with train/ and val/<class>/* (default: generated)")
    add("--image_size", type=count, default=224, help="default: 224")
    add("--workers", type=count, default=4, help="default: 4")
    add("--backends", help="names, separated by commas (default: torchvision and DALI's)")
    add("--step", type=count, default=16, help="sizes are multiples of it (default: 16)")
    add("--memory", type=arguments.positive_float, metavar="GB", help="without a GPU: limit the process")
    return parser.parse_args(argv)


def _machine(device: torch.device, args: argparse.Namespace) -> str:
    if device.type == "cpu":
        return f"CPU, {args.memory:g} GB for a process"
    return f"{torch.cuda.get_device_name()}, {torch.cuda.get_device_properties(0).total_memory / 1e9:.1f} GB"


def _generated(cache: str) -> str:
    """Return a folder of generated images, each under several names."""
    source = random_folder.make(os.path.join(os.path.abspath(cache), "generated"))

    def write(folder: str) -> None:
        for parent, _, names in os.walk(source):
            target = os.path.join(folder, os.path.relpath(parent, source))
            os.makedirs(target, exist_ok=True)
            for name, copy in itertools.product(names, range(_COPIES)):
                os.link(os.path.join(parent, name), os.path.join(target, f"{copy}-{name}"))

    return random_folder.make(os.path.join(os.path.abspath(cache), f"generated-{_COPIES}"), write)


def _largest(args: argparse.Namespace, backend: str, resident: bool, most: int) -> int:
    """Return the largest batch up to `most` that fits, a multiple of --step; 0 if none does."""
    fits, fails = 0, None
    while True:
        batch = fits + max(args.step, fits) if fails is None else (fits + fails) // 2
        batch = min(batch, most) // args.step * args.step
        if batch <= fits:
            return fits
        room = _try(args, backend, resident, batch)
        way = "resident" if resident else "released"
        log(f"{backend}, {way}: {batch} {'fits' if room else 'does not fit'}")
        if room:
            fits = batch
        else:
            fails = batch


def _try(args: argparse.Namespace, backend: str, resident: bool, batch: int) -> bool:
    case = {
        "backend": backend, "resident": resident, "batch": batch, "arch": args.arch, "memory": args.memory,
        "folder": args.data_url, "cache": args.cache_dir, "size": args.image_size, "workers": args.workers,
    }  # fmt: skip
    result = subprocess.run(
        [sys.executable, "-m", "launch.bench.batch_size", json.dumps(case)],
        capture_output=True, text=True, timeout=_TIMEOUT, check=False,
    )  # fmt: skip
    if result.returncode == 0:
        return True
    errors = result.stderr.lower()
    if result.returncode < 0 or any(sign in errors for sign in _NO_ROOM):
        return False
    raise BadInput(f"{backend} with {batch} samples failed: {tail(result.stderr)}")


def _trial(case: dict) -> None:
    """Train and validate for some batches. A batch that does not fit raises, or ends this process."""
    cuda = torch.cuda.is_available()
    if not cuda:
        import resource

        limit = int(case["memory"] * 1e9)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    dataset = Dataset(
        case["folder"], case["batch"], size=case["size"], val_size=case["size"] * 8 // 7,
        workers=case["workers"], backend=case["backend"], cache_dir=case["cache"], fp16=cuda,
    )  # fmt: skip
    model = models.classifier(case["arch"], dataset.get_nb_classes(), case["size"])
    model = model.to(dataset.device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    if case["resident"]:  # after a first validation, as in later epochs
        dataset.prep_for_val()
        kept = iter(dataset.get_val_loader())
        next(kept)
    for images, labels in itertools.islice(_endless(dataset.get_train_loader()), _STEPS):
        with torch.autocast(dataset.device.type, torch.float16 if cuda else torch.bfloat16, enabled=cuda):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del images, labels, loss
    model.eval()
    with torch.no_grad(), torch.autocast(dataset.device.type, enabled=cuda):
        if not case["resident"]:
            dataset.prep_for_val()
            kept = iter(dataset.get_val_loader())
        for images, _ in itertools.islice(kept, _STEPS):
            model(images)
    if cuda:
        torch.cuda.synchronize()
    sys.stdout.flush()
    os._exit(0)  # without waiting for the loaders


def _endless(loader: Iterable) -> Iterator:
    while True:
        yield from loader


def _table(found: dict) -> str:
    lines = [f"\n{found['arch']}, images/batch that fit on {found['machine']}, and on the article's V100"]
    lines.append(f"{'':<12}{'resident':>10}{'released':>10}{'article: before':>18}{'after':>8}")
    for backend, sizes in found["batch_sizes"].items():
        before, after = ARTICLE[backend]
        here = "".join(
            f"{'>=' if size == found['most'] else ''}{size}".rjust(10)
            for size in (sizes["resident"], sizes["released"])
        )
        lines.append(f"{backend:<12}{here}{before or '':>18}{after:>8}")
    return "\n".join(lines)


if __name__ == "__main__":
    _trial(json.loads(sys.argv[1]))

"""Measure whether workers on other machines help: transport time, images/s with and without Ray.

    python -m launch bench ray --data_url DIR [--ray_address start] [--workers N] [--json]

DIR: as for jobs/imagenet.py (default: generated images). All rows take turns. "torch": DataLoader with Pillow
and torchvision's transforms, float32; "ray, same transforms": the same through RayDataLoader; "ray": uint8
through simplejpeg and OpenCV, as jobs/imagenet.py --data_backend ray; "threads": the same work on this
machine. Remote workers help only if preparing an image costs more than its transport. The last lines give the
result for this model (--arch).
"""

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from common import arguments, models
from common.platforms import available_cores
from datasets.compat.dpex import RayDataLoader
from datasets.folders import image_folder, images, random_folder
from datasets.loaders import measure
from datasets.loaders.engines.threads import Threads
from datasets.loaders.loader import Loader
from datasets.loaders.ray import cluster as ray_cluster
from datasets.loaders.ray.engine import FolderCutter, RayEngine
from datasets.loaders.ray.pool import Pool
from datasets.sampling.augment import random_resized_crop
from datasets.sampling.sampler import BatchSampler, Plan
from datasets.stores.files import FileStore
from launch.bench.loaders import compute_rate

_TRANSFERS, _AHEAD = 60, 4  # batches whose transport is timed; number of batches in flight
_CPU = torch.device("cpu")


class Samples(Dataset):
    """A usual data set: Pillow, a random crop, float32."""

    def __init__(self, index: image_folder.ImageFolderIndex, size: int):
        self.paths = [index.path(id) for id in range(len(index))]
        self.labels = index.labels.tolist()
        self.transform = v2.Compose([
            v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
        ])  # fmt: skip

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, id: int):
        with Image.open(self.paths[id], formats=images.KINDS) as image:
            return self.transform(image.convert("RGB")), self.labels[id]


class _Ready:
    """A task function that returns a prepared batch, so that only the transport is measured."""

    def __init__(self, batch: int, size: int):
        self.shape = batch, 3, size, size

    def begin(self, worker: int, workers: int) -> None:
        self.images = torch.zeros(self.shape, dtype=torch.uint8)

    def __call__(self, task: object) -> torch.Tensor:
        return self.images


def main(argv: list[str]) -> int:
    """Measure, print a table (or JSON) and the prediction, and return 0. Raises BadInput."""
    args = _parse_args(argv)
    ray_cluster.join(args.ray_address, log=(lambda line: None) if args.json else print)
    try:
        found = _measure(args)
    finally:
        ray_cluster.leave()
    print(json.dumps(found, indent=2) if args.json else _table(found))
    return 0


def _parse_args(argv: list[str]) -> argparse.Namespace:
    parser = arguments.Parser(__doc__)
    parser.prog = "python -m launch bench ray"
    add = parser.add_argument
    add("--data_url", metavar="DIR", help="folder with train/<class>/* (default: generated)")
    add("--cache_dir", default="output_dir/index", help="for the index (default: %(default)s)")
    add("--ray_address", default="auto", metavar="HOST:PORT", help=ray_cluster.HELP)
    add("--workers", type=arguments.positive_int, default=available_cores(), help="default: cores")
    add("--image_size", type=arguments.positive_int, default=224, help="default: 224")
    add("--batch_size", type=arguments.positive_int, default=64, help="default: 64")
    add("--seconds", type=arguments.positive_float, default=2.0, help="of a turn (default: 2)")
    add("--rounds", type=arguments.positive_int, default=5, help="default: 5")
    add("--arch", type=models.arch, default="resnet50", help="default: resnet50")
    add("--json", action="store_true", help="print JSON")
    return parser.parse_args(argv)


def _measure(args: argparse.Namespace) -> dict:
    root = args.data_url or random_folder.make(os.path.join(os.path.abspath(args.cache_dir), "generated"))
    index = image_folder.load(root, "train", args.cache_dir, log=lambda line: None)
    args.batch_size = min(args.batch_size, len(index))
    with contextlib.closing(Pool(_Ready(args.batch_size, args.image_size), 1)) as pool:
        seconds, nodes, cpus = _transport(pool), pool.nodes, pool.cpus
    rates = _rates(args, index)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {
        "nodes": nodes, "cpus": cpus, "load_average": os.getloadavg()[0], "batch_size": args.batch_size,
        "image_size": args.image_size, "workers": args.workers, "transport_ms": 1000 * seconds,
        "rates": {name: [statistics.median(each), min(each), max(each)] for name, each in rates.items()},
        "images_per_s_of_one_worker": statistics.median(rates["ray, one worker"]),
        "images_per_s_of_the_way": args.batch_size / seconds, "arch": args.arch,
        "compute_images_per_s": compute_rate(args, len(index.classes), device),
        "remote_cpus": max(0.0, cpus - available_cores()),
    }  # fmt: skip


def _transport(pool: Pool) -> float:
    """Return the seconds to transport a prepared batch from a worker, with several batches in flight."""
    taken, begin = [], time.perf_counter()
    for _ in pool.map(range(_TRANSFERS), _AHEAD):
        taken.append(time.perf_counter() - begin)
        begin = time.perf_counter()
    return statistics.mean(taken[_AHEAD:])


def _rates(args: argparse.Namespace, index: image_folder.ImageFolderIndex) -> dict[str, list[float]]:
    """Return the images/s of every round, by row."""
    data = Samples(index, args.image_size)
    options: dict[str, Any] = {
        "batch_size": args.batch_size,
        "shuffle": True,
        "drop_last": True,
        "persistent_workers": True,
    }

    def plan() -> measure.Head:
        return measure.Head(
            Plan(index, BatchSampler(len(index), args.batch_size, 0), random_resized_crop, args.image_size)
        )

    found: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        rows: dict[str, Callable[[], Any]] = {
            "torch": lambda: DataLoader(data, num_workers=args.workers, **options),
            "ray, same transforms": lambda: RayDataLoader(data, True, num_workers=args.workers, **options),
            "ray": lambda: Loader(RayEngine(FolderCutter(FileStore(index)), args.workers), plan(), _CPU),
            "ray, one worker": lambda: Loader(RayEngine(FolderCutter(FileStore(index)), 1), plan(), _CPU),
            "threads": lambda: Loader(Threads(FileStore(index), args.workers), plan(), _CPU),
        }
        for name, made in rows.items():
            loader = made()
            batches = _endless(loader)
            for _ in range(2 * args.workers + 2):
                next(batches)  # batches that were prepared before the measurement do not count
            rate = measure.rate(batches, args.seconds)
            found.setdefault(name, []).append(rate)
            del batches
            if hasattr(loader, "close"):
                loader.close()
            del loader
    return found


def _endless(loader: Iterable) -> Iterator:
    while True:
        yield from loader


def _table(found: dict) -> str:
    lines = [
        f"{found['nodes']} nodes, {found['cpus']:g} CPUs, load average {found['load_average']:.2f}; "
        f"batches of {found['batch_size']}, {found['image_size']} pixels, {found['workers']} workers",
        f"transport of a batch of uint8: {found['transport_ms']:.1f} ms",
        f"{'':<24}{'images/s':>10}{'of torch':>10}",
    ]
    stock = found["rates"]["torch"][0]
    for name, (median, low, high) in found["rates"].items():
        lines.append(f"{name:<24}{median:>10.0f}{median / stock:>9.2f}x  ({low:.0f}-{high:.0f})")
    return "\n".join([*lines, _predict(found)])


def _predict(found: dict) -> str:
    """Return the predicted images/s of the cluster, compared with this machine and the model."""
    here, needed = found["rates"]["threads"][0], found["compute_images_per_s"]
    each, way = found["images_per_s_of_one_worker"], found["images_per_s_of_the_way"]
    whole = min(way, each * found["cpus"])
    limit = "the transport" if way < each * found["cpus"] else "their CPUs"
    said = (
        f"prediction: workers on all {found['cpus']:g} CPUs would deliver {whole:.0f} images/s, limited by "
        f"{limit}; threads here deliver {here:.0f}, and {found['arch']} needs {needed:.1f}"
    )
    if needed <= here:
        return f"{said}\nremote workers do not help: this machine delivers more than the model needs"
    if whole <= here:
        return f"{said}\nremote workers do not help: they would deliver no more than this machine"
    return f"{said}\nremote workers help: up to {min(whole, needed) / here:.1f}x the rate of this machine"

"""Whether workers on other machines pay: what a batch's way costs, images/s with and without, a prediction.

    python -m launch bench ray --data_url DIR [--ray_address start] [--workers N] [--json]

DIR: as jobs/imagenet.py takes it (default: generated images). All rows take turns. "torch": DataLoader with
Pillow and torchvision's transforms, float32; "ray, same transforms": the same through RayDataLoader; "ray":
uint8 through simplejpeg and OpenCV, as jobs/imagenet.py --data_backend ray; "threads": that on this machine;
"ray, a task a sample": how it is often tried. Remote workers pay only where preparing an image costs more
than its way: the last lines say what was found here, for this model (--arch).
"""

import argparse
import collections
import itertools
import json
import os
import statistics
import time

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from common import arguments, models
from common.exits import BadInput, import_optional
from common.performance.cores import available
from datasets.compat.dpex import RayDataLoader
from datasets.folders import image_folder, images, random_folder
from datasets.loaders import measure
from datasets.loaders.engines.threads import Threads
from datasets.loaders.loader import Loader
from datasets.loaders.ray import cluster as ray_cluster
from datasets.loaders.ray.engine import RayEngine
from datasets.loaders.ray.pool import CURE, Pool, no_cluster
from datasets.loaders.ray.transport import RAY
from datasets.sampling.augment import random_resized_crop
from datasets.sampling.plan import Plan
from datasets.sampling.sampler import BatchSampler
from datasets.stores.files import FileStore
from launch.bench.loaders import compute_rate

_TRANSFERS, _ASKED = 60, 4  # batches of which the way is timed; how many of them are under way
_CPU = torch.device("cpu")


class Samples(Dataset):
    """The usual data set: Pillow, a random crop, float32."""

    def __init__(self, index, size: int):
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
    """A worker that has its batch: what is left is the way."""

    def __init__(self, batch: int, size: int):
        self.shape = batch, 3, size, size

    def begin(self, worker: int, workers: int) -> None:
        self.images = torch.zeros(self.shape, dtype=torch.uint8)

    def __call__(self, task) -> torch.Tensor:
        return self.images


def main(argv: list[str]) -> int:
    """Measure, print a table (or JSON) and the prediction, and return 0. Raises BadInput."""
    args = _parsed(argv)
    ray_cluster.join(args.ray_address, say=(lambda line: None) if args.json else print)
    try:
        found = _found(args)
    finally:
        ray_cluster.leave()
    print(json.dumps(found, indent=2) if args.json else _text(found))
    return 0


def _parsed(argv: list[str]) -> argparse.Namespace:
    parser = arguments.Parser(__doc__)
    parser.prog = "python -m launch bench ray"
    add = parser.add_argument
    add("--data_url", metavar="DIR", help="folder with train/<class>/* (default: generated)")
    add("--cache_dir", default="output_dir/index", help="for the index (default: %(default)s)")
    add("--ray_address", default="auto", metavar="HOST:PORT", help=ray_cluster.HELP)
    add("--workers", type=arguments.positive_int, default=available(), help="each (default: cores)")
    add("--image_size", type=arguments.positive_int, default=224, help="default: 224")
    add("--batch_size", type=arguments.positive_int, default=64, help="default: 64")
    add("--seconds", type=arguments.positive_float, default=2.0, help="of a turn (default: 2)")
    add("--rounds", type=arguments.positive_int, default=5, help="default: 5")
    add("--arch", type=models.arch, default="resnet50", help="default: resnet50")
    add("--json", action="store_true", help="print JSON")
    return parser.parse_args(argv)


def _found(args: argparse.Namespace) -> dict:
    root = args.data_url or random_folder.make(os.path.join(os.path.abspath(args.cache_dir), "generated"))
    index = image_folder.load(root, "train", args.cache_dir, log=lambda line: None)
    args.batch_size = min(args.batch_size, len(index))
    ray = import_optional("ray", "Ray cannot be imported", RAY)

    where = os.environ.get("RAY_ADDRESS", "auto")
    try:
        ray.init(where, log_to_driver=False, logging_level="error")
    except ConnectionError as error:
        raise BadInput(f"--ray_address: {no_cluster(where, str(error), CURE)}") from error
    try:
        nodes, cpus = len(ray.nodes()), ray.cluster_resources().get("CPU", 0.0)
        naive = _naive_transport(ray, args)
        tasks = _tasks(ray, Samples(index, args.image_size), args)
    finally:
        ray.shutdown()
    ours = _transport(args)
    rates = _rates(args, index)
    rates["ray, a task a sample"] = [tasks]
    size = 3 * args.image_size**2
    alone = statistics.median(rates["ray, one worker"])
    way = args.batch_size / ours  # images/s that this process can be brought
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    compute = compute_rate(args, len(index.classes), device)
    return {
        "nodes": nodes, "cpus": cpus, "load_average": os.getloadavg()[0], "batch_size": args.batch_size,
        "image_size": args.image_size, "workers": args.workers, "transport_ms": 1000 * ours,
        "transport_as_float_tensor_ms": 1000 * naive, "bytes_per_image": size,
        "rates": {name: [statistics.median(each), min(each), max(each)] for name, each in rates.items()},
        "images_per_s_of_one_worker": alone, "images_per_s_of_the_way": way, "arch": args.arch,
        "compute_images_per_s": compute, "remote_cpus": max(0.0, cpus - available()),
    }  # fmt: skip


def _naive_transport(ray, args) -> float:
    """Seconds for a batch that an actor returns as a float32 tensor."""

    @ray.remote
    class Actor:
        def __init__(self, shape):
            self.images = torch.zeros(shape)

        def batch(self):
            return self.images

    actor = Actor.remote((args.batch_size, 3, args.image_size, args.image_size))
    return _seconds_each(actor.batch.remote, ray.get)


def _seconds_each(ask, receive) -> float:
    """As a loader does it: some are asked for before one is received."""
    asked, taken = collections.deque(ask() for _ in range(_ASKED)), []
    for _ in range(_TRANSFERS):
        begin = time.perf_counter()
        asked.append(ask())
        receive(asked.popleft())
        taken.append(time.perf_counter() - begin)
    while asked:
        receive(asked.popleft())
    return statistics.mean(taken[_ASKED:])


def _tasks(ray, data: Dataset, args) -> float:
    """images/s with a task for every sample."""
    ids, held = itertools.cycle(range(len(data))), ray.put(data)
    sample = ray.remote(_sample)

    def batch():
        samples = ray.get([sample.remote(held, next(ids)) for _ in range(args.batch_size)])
        return torch.stack([image for image, _ in samples])

    batch()
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < args.seconds:
        count += len(batch())
    return count / (time.perf_counter() - begin)


def _sample(data: Dataset, id: int):
    return data[id]


def _transport(args) -> float:
    """Seconds for a batch that lies ready in a worker."""
    pool, keys = Pool(_Ready(args.batch_size, args.image_size), 1), itertools.count()

    def ask():
        key = (next(keys),)
        pool.submit(key, None)
        return key

    try:
        return _seconds_each(ask, pool.take)
    finally:
        pool.close()


def _rates(args, index) -> dict[str, list[float]]:
    """Row -> images/s of every round."""
    data = Samples(index, args.image_size)
    options = {"batch_size": args.batch_size, "shuffle": True, "drop_last": True, "persistent_workers": True}

    def plan():
        return measure.Head(
            Plan(index, BatchSampler(len(index), args.batch_size, 0), random_resized_crop, args.image_size)
        )

    found: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for name, made in {
            "torch": lambda: DataLoader(data, num_workers=args.workers, **options),
            "ray, same transforms": lambda: RayDataLoader(data, True, num_workers=args.workers, **options),
            "ray": lambda: Loader(RayEngine(FileStore(index), args.workers), plan(), _CPU),
            "ray, one worker": lambda: Loader(RayEngine(FileStore(index), 1), plan(), _CPU),
            "threads": lambda: Loader(Threads(FileStore(index), args.workers), plan(), _CPU),
        }.items():
            loader = made()
            batches = _endless(loader)
            for _ in range(2 * args.workers + 2):
                next(batches)  # what was made ready while nobody waited does not count
            rate = measure.rate(batches, args.seconds)
            found.setdefault(name, []).append(rate)
            del batches
            if hasattr(loader, "close"):
                loader.close()
            del loader
    return found


def _endless(loader):
    while True:
        yield from loader


def _text(found: dict) -> str:
    way, naive = found["transport_ms"], found["transport_as_float_tensor_ms"]
    lines = [
        f"{found['nodes']} nodes, {found['cpus']:g} CPUs, load average {found['load_average']:.2f}; "
        f"batches of {found['batch_size']}, {found['image_size']} pixels, {found['workers']} workers",
        f"way of a batch: {way:.1f} ms as uint8, {naive:.1f} ms as a float32 tensor that an actor returns: "
        f"{way / naive:.3f}x",
        f"{'':<24}{'images/s':>10}{'of torch':>10}",
    ]
    stock = found["rates"]["torch"][0]
    for name, (median, low, high) in found["rates"].items():
        lines.append(f"{name:<24}{median:>10.0f}{median / stock:>9.2f}x  ({low:.0f}-{high:.0f})")
    return "\n".join([*lines, _prediction(found)])


def _prediction(found: dict) -> str:
    """Two sentences: what the cluster could bring, and whether that is more than this machine makes."""
    here, needed = found["rates"]["threads"][0], found["compute_images_per_s"]
    each, way = found["images_per_s_of_one_worker"], found["images_per_s_of_the_way"]
    whole = min(way, each * found["cpus"])
    limit = "the way" if way < each * found["cpus"] else "their CPUs"
    said = (
        f"prediction: workers on all {found['cpus']:g} CPUs would bring {whole:.0f} images/s, limited by "
        f"{limit}; threads here make {here:.0f}, and {found['arch']} takes {needed:.1f}"
    )
    if needed <= here:
        return f"{said}\nremote workers do not pay: this machine makes more than the model takes"
    if whole <= here:
        return f"{said}\nremote workers do not pay: they would bring no more than this machine makes"
    return f"{said}\nremote workers pay: up to {min(whole, needed) / here:.1f}x of what this machine makes"

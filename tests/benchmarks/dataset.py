"""Measure the tips of "Diving into DALI": DALI through `Dataset` compared with torchvision, and each tip.

    python -m tests.benchmarks.dataset                 some minutes on two cores
    python -m tests.benchmarks.dataset --images 128 --rounds 1 --seconds 0.2    a short trial

"stock" is torch's DataLoader with torchvision's ImageFolder and transforms; "torchvision" is `Dataset`
without DALI. The images are those of tests/benchmarks/loaders.py. All rows run in one process and take turns
of some seconds. The first batches of a turn do not count: they were prepared during other turns. The output
has the median and range of the ratios of two rows in one round. What concerns a GPU (pinned memory, the
memory of the validation pipeline) needs `make gpu`.
"""

import itertools
import tempfile
import time
from functools import partial

import torch
from torchvision.datasets import ImageFolder

from datasets.compat.dali_dataset import Dataset
from datasets.folders import image_folder
from datasets.loaders import backends
from datasets.sampling.augment import center_crop
from datasets.sampling.sampler import Plan, SequentialBatchSampler
from datasets.stores.files import FileStore
from tests.benchmarks.loaders import BATCH, SIDE, SIZES, WORKERS, data_loader, transforms, write_images
from tests.benchmarks.rounds import describe, divide, make_parser, spread, take_turns

SKIPPED = 10  # batches of a turn that do not count: more than any engine prepares ahead
CPU = torch.device("cpu")
FIGURES = [  # row, reference, the article's figure
    ("dali", "stock", "1.72x on a V100's host; aim 1.7x"),
    ("torchvision", "stock", "not in the article"),
    ("threads", "stock", "not in the article"),
    ("torchvision, pack", "stock", "not in the article"),
    ("dali, pack", "stock", "not in the article"),
    ("threads, pack", "stock", "not in the article"),
    ("dali, 1 worker", "dali", "workers: one per virtual core"),
    ("dali, 4 workers", "dali", "workers: one per virtual core"),
    ("dali, plain", "dali", "without triangular interpolation it is faster"),
    ("val, 60 of 480", "val, 64 of 480", "a validation batch that divides the set is faster"),
]


def forever(iterable):
    while True:
        yield from iterable


def rows(root: str) -> dict:
    """Return {name: endless batches}."""
    cache, pack = f"{root}/cache", f"{root}/packs"

    def training(**options):
        options = {"workers": WORKERS, "cache_dir": cache, "cuda": False} | options
        return forever(Dataset(root, BATCH, **options).get_train_loader())

    index = image_folder.load(root, "val", cache)

    def validation(batch: int):
        plan = Plan(index, SequentialBatchSampler(480, batch), center_crop, SIDE)
        return forever(backends.build("dali", FileStore(index), plan, CPU, WORKERS))

    return {
        "stock": forever(data_loader(ImageFolder(f"{root}/train", transforms()))),
        "torchvision": training(),
        "dali": training(use_dali=True),
        "threads": training(backend="threads"),
        "torchvision, pack": training(pack=pack),
        "dali, pack": training(use_dali=True, pack=pack),
        "threads, pack": training(backend="threads", pack=pack),
        "dali, 1 worker": training(use_dali=True, workers=1),
        "dali, 4 workers": training(use_dali=True, workers=4),
        "dali, plain": training(use_dali=True, antialias=False),
        "val, 64 of 480": validation(64),
        "val, 60 of 480": validation(60),
    }


def rate(batches, seconds: float) -> float:
    """Return the images/s of one turn."""
    for _ in itertools.islice(batches, SKIPPED):
        pass
    count, begin = 0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        count += len(next(batches)[0])
    return count / (time.perf_counter() - begin)


def main() -> None:
    parser = make_parser(__doc__, 5)
    parser.add_argument("--images", type=int, default=4096, help="of training (default: 4096)")
    parser.add_argument("--seconds", type=float, default=1.5, help="of a turn (default: 1.5)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the two cores are for the workers
    for kilobytes, size in SIZES.items():
        with tempfile.TemporaryDirectory() as root:
            print(f"\n{write_images(root, size, kilobytes, max(args.images, 8 * 480))}\n{describe()}")
            turns = {name: partial(rate, each, args.seconds) for name, each in rows(root).items()}
            rates = take_turns(turns, args.rounds)
            for row, reference, figure in FIGURES:
                ratios = spread(divide(rates[row], rates[reference]), ".2f", "x")
                rate_of = f"{row:<24}{spread(rates[row], '.0f')} images/s"
                print(f"{rate_of}, of {reference:<15}{ratios}  article: {figure}")
            print(describe(), flush=True)
            del turns


if __name__ == "__main__":
    main()

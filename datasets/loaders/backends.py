"""Select a backend by name or by its speed here, and build a loader or an engine. Every backend except
synthetic delivers the same samples, labels and boxes.

To add one: write an Engine (bootfile/loaders/loader.py) into engines/, as dali.py. Add its name to BACKENDS,
reasons() and engine() here, and to tests/datasets/loaders/test_loaders.py.
"""

import argparse
import importlib.util
import itertools
import os
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from bootfile.ground import accelerator
from bootfile.ground.errors import BadInput, MissingPackage
from bootfile.ground.numbers import count_in
from bootfile.loaders.loader import Data, Engine, Loader, NotDelivered
from bootfile.loaders.workers import WorkerEngine, Workers
from bootfile.machine.cores import available_cores
from bootfile.processes import ranks
from bootfile.sampling.plan import Batch, Plan
from common.run.log import Log
from datasets.folders.resize import BILINEAR
from datasets.loaders.engines.crops import RemoteCrops, Threads, TorchvisionCrops
from datasets.loaders.engines.dali import Dali, missing
from datasets.loaders.image_loader import ImageLoader
from datasets.loaders.ray.pool import RAY
from datasets.stores.files import Store

CACHED = {"kspeed": "threads", "dali-kspeed": "dali"}  # backend with a cache of samples -> its engine
BACKENDS = ("pytorch", "threads", "dali", "dali-gpu", "synthetic", *CACHED, "ray")
SPELLINGS = {"syntetic": "synthetic", "torchvision": "pytorch", "dali-cpu": "dali"}
_SECONDS = 2.0  # for each backend, after its first batches
HEAD = 8  # batches that are measured repeatedly
_WARM_UP = 2  # first batches, not measured because they include the start of processes and pipelines
# images/s of one process with which no GPU waits: more than a ResNet-50 trains on an H200 (estimated: 4,300)
_SUFFICIENT = 5000
_ENOUGH = 0.03  # share of waiting: below it another backend gains nothing
# Threads of dali-gpu, each with buffers of 350 MB. nvJPEG decodes the Huffman code of images of less than a
# million pixels on the host, so a GPU with much memory (bytes) gets more threads.
_MIXED_THREADS = 4
_MORE_THREADS = 12
_MUCH_MEMORY = 40e9


def reasons(device: torch.device) -> dict[str, str | None]:
    """Return engine -> the reason why it is not available with this device; None if it is available."""
    dali = missing()
    dali_gpu = dali or (None if device.type == "cuda" else "it needs a GPU")
    return {"pytorch": None, "threads": None, "dali": dali, "dali-gpu": dali_gpu, "synthetic": None}


def resolve(backend: str, device: torch.device) -> str:
    """Return the backend's own name. Raises BadInput if it is unknown or not available."""
    backend = SPELLINGS.get(backend, backend)
    known = reasons(device)
    known |= {name: known[engine] for name, engine in CACHED.items()}
    known["ray"] = None if importlib.util.find_spec("ray") else f"Ray is not installed: pip install {RAY}"
    reason = known.get(backend, "unknown backend")
    if reason is None:
        return backend
    available = ", ".join(name for name, why in known.items() if why is None)
    raise BadInput(f"data_backend {backend}: {reason}; available here: {available}")


def build(
    backend: str,
    store: Any,
    plan: Plan,
    device: torch.device,
    workers: int | None = None,
    interpolation: str = BILINEAR,
    **delivery: Any,
) -> ImageLoader:
    """Return a Loader of the plan's batches on `device`. delivery: mean, std and dtype of Loader. The others:
    see engine(). Every rank calls it, once a loader."""
    loader = ImageLoader(engine(backend, store, device, workers, interpolation), plan, device, **delivery)
    loader.backend = backend
    return loader


def engine(
    backend: str, store: Any, device: torch.device, workers: int | None = None, interpolation: str = BILINEAR
) -> Engine:
    """Return an engine. Raises BadInput as resolve() does. Every rank calls it; "threads" and "dali" start
    their threads here, and "pytorch" its processes with the first batch.

    backend: one of BACKENDS or SPELLINGS.
    store: of datasets/stores. The caller closes it.
    workers: threads or processes (default: cores()).
    interpolation: BILINEAR or BICUBIC of datasets/folders/resize.py.
    """
    backend = resolve(backend, device)
    backend = CACHED.get(backend, backend)
    # each rank has its own: the cores of a node are divided by its processes
    workers = workers or cores()
    pinned = accelerator.has_streams(device)
    if backend == "synthetic":
        return Synthetic(device)
    if backend == "dali-gpu":
        # each thread has buffers on the GPU: more of them only if it has room
        memory = accelerator.of(device).get_device_properties(device).total_memory
        most = _MORE_THREADS if memory >= _MUCH_MEMORY else _MIXED_THREADS
        return Dali(store, min(workers, most), device, interpolation)
    if backend == "dali":
        return Dali(store, workers, None, interpolation)
    if backend == "ray":
        from datasets.loaders.ray.engine import CPUS, RayWorkers

        return WorkerEngine(RayWorkers(workers, cpus=CPUS), RemoteCrops(store, interpolation))
    if backend == "pytorch":
        return WorkerEngine(Workers(workers, pinned), TorchvisionCrops(store, interpolation))
    return Threads(store, workers, pinned, interpolation)


def cores() -> int:
    """Return the CPU cores for the loader of one process: the available cores divided among the node's
    processes."""
    return max(1, available_cores() // (count_in(os.environ, "LOCAL_WORLD_SIZE") or 1))


class SyntheticIndex:
    """The index of a data set without files: `count` images of 500x375 pixels."""

    unit = "images", 1  # as that of ImageFolderIndex

    def __init__(self, count: int, split: str, classes: int = 1000):
        self.classes = tuple(map(str, range(classes)))
        self.labels = np.arange(count) % classes
        self.widths = np.full(count, 500)
        self.heights = np.full(count, 375)
        self.split = split
        self.root = "synthetic"
        self.source = "synthetic"
        self.fingerprint = "synthetic"

    def __len__(self) -> int:
        return len(self.labels)


class Synthetic(Engine):
    """An engine for Loader: the plan's ids and labels, and always the same random images on the device. Its
    batches have no boxes, so its receipt differs from that of real data."""

    def __init__(self, device: torch.device):
        self.device = device
        self._images: torch.Tensor | None = None  # a batch of them, kept from epoch to epoch

    def run(self, plan: Plan) -> Data:
        """Yield the batches of an epoch, each with the first of the same images."""
        # again only if the image size of the epoch has changed
        shape = (plan.largest, plan.size, plan.size, 3)
        if self._images is None or self._images.shape != shape:
            generator = torch.Generator().manual_seed(0)
            images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
            self._images = images.to(self.device)
        for batch in plan:
            yield batch._replace(crops=()), self._images[: len(batch.ids)]

    def close(self) -> None:
        """Free the images."""
        self._images = None


def rates(
    store: Store,
    plan: Plan,
    device: torch.device,
    workers: int | None,
    seconds: float = _SECONDS,
    interpolation: str = BILINEAR,
) -> dict[str, float]:
    """Return backend -> images/s of this process, for every available backend that reads data. The backends
    load the same batches one after the other, repeatedly for `seconds` each. The files are read once before,
    so they are in the page cache if they fit: this compares engines, not disks."""
    # the same few batches for each backend: what differs is the engine
    head = Head(plan)
    measured: dict[str, float] = {}
    for backend, reason in reasons(device).items():
        if reason is not None or backend == "synthetic":
            continue
        try:
            with build(backend, store, head, device, workers, interpolation) as loader:
                if not measured:  # otherwise only the first backend reads from the disk
                    for _ in itertools.islice(loader, HEAD):
                        pass
                measured[backend] = rate(loader, seconds)
        # an old driver, no memory left
        except (RuntimeError, OSError, MissingPackage, NotDelivered) as error:
            print(f"data_backend {backend} does not work here: {' '.join(str(error).split())[:200]}")
    if not measured:
        raise BadInput("no data_backend works here; --data_backend NAME shows why")
    return measured


def choose(rates: dict[str, float]) -> str:
    """Return the fastest backend of rates(), or one that does not use the GPU if its rate is sufficient:
    in training dali-gpu takes time of the GPU, which is idle while it is measured."""
    sufficient = [name for name, rate in rates.items() if rate >= _SUFFICIENT and name != "dali-gpu"]
    return max(sufficient or rates, key=lambda name: rates[name], default="")


def rate(loader: Iterable[tuple[torch.Tensor, torch.Tensor]], seconds: float) -> float:
    """Return the images/s of a loader alone, measured for `seconds` or the whole epoch."""
    count = 0
    begin = time.perf_counter()
    for step, (images, _) in enumerate(loader):
        # the batch counts when it is on the device, which the host alone would not see
        accelerator.of(images.device).synchronize()
        if step < _WARM_UP:
            begin = time.perf_counter()
            continue
        count += len(images)
        if time.perf_counter() - begin > seconds:
            break
    return count / (time.perf_counter() - begin)


def profile(args: argparse.Namespace, backend: str, seconds: float) -> str:
    """Return the text of --prof. args: prof (batches), batch_size. seconds: the time of these batches."""
    return f"prof: {args.prof * args.batch_size / seconds:.1f} images/s with {backend}, {args.prof} batches"


def text(rates: dict[str, float]) -> str:
    """Return the rates as text: "threads 812, dali 401 images/s"."""
    ordered = sorted(rates, key=rates.__getitem__, reverse=True)
    return ", ".join(f"{backend} {rates[backend]:.0f}" for backend in ordered) + " images/s"


def log_waiting(loader: Loader, log: Log) -> None:
    """Log the share of a training's time that the rank which waited longest for data has waited. Call it on
    every rank at the end."""
    # all ranks wait for the slowest loader, so its share counts
    share = ranks.maximum(loader.waited, loader.to_device.device) / log.training_seconds
    if ranks.is_first():
        hint = "; `python -m launch bench loaders` compares the backends" if share >= _ENOUGH else ""
        text = f"the device waited for data for {share:.1%} of the training time with {loader.backend}"
        log.info(text + hint)


class Head(Plan):
    """A plan that repeats the first batches of another plan, without an end. rates() makes it."""

    def __init__(self, plan: Plan):
        super().__init__(plan.index, plan.sampler, plan.augment, plan.size, plan.views)
        plan.seek(0)
        self.batches = list(itertools.islice(plan, HEAD))

    def __len__(self) -> int:
        return sys.maxsize

    def __iter__(self) -> Iterator[Batch]:
        return itertools.cycle(self.batches)

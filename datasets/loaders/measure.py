"""Measure the speed of the backends on this machine with these data, and the waiting of a job."""

import argparse
import itertools
import sys
import time
from collections.abc import Iterable, Iterator

import torch

from bootfile.ground import accelerator
from bootfile.ground.errors import BadInput, MissingPackage
from bootfile.loaders.loader import Loader, NotDelivered
from bootfile.processes import ranks
from bootfile.sampling.plan import Batch, Plan
from common.run.log import Log
from datasets.folders.resize import BILINEAR
from datasets.loaders import backends
from datasets.stores.store import Store

_SECONDS = 2.0  # for each backend, after its first batches
HEAD = 8  # batches that are measured repeatedly
_WARM_UP = 2  # first batches, not measured because they include the start of processes and pipelines
# images/s of one process with which no GPU waits: more than a ResNet-50 trains on an H200 (estimated: 4,300)
_SUFFICIENT = 5000
_ENOUGH = 0.03  # share of waiting: below it another backend gains nothing


def rates(
    store: Store,
    plan: Plan,
    device: torch.device,
    workers: int | None,
    seconds: float = _SECONDS,
    interpolation: str = BILINEAR,
) -> dict[str, float]:
    """Return backend -> images/s of this process, for every available backend that reads data.

    The backends load the same batches one after the other, repeatedly for `seconds` each. The files are read
    once before, so they are in the page cache if they fit: this compares engines, not disks. open_loaders()
    calls it on rank 0 of a new run while the other ranks wait for the choice.
    """
    # the same few batches for each backend: what differs is the engine
    head = Head(plan)
    measured: dict[str, float] = {}
    for backend, reason in backends.reasons(device).items():
        if reason is None and backend != "synthetic":
            try:
                with backends.build(backend, store, head, device, workers, interpolation) as loader:
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
    sufficient = {}
    for name, rate_of_backend in rates.items():
        if rate_of_backend >= _SUFFICIENT and name != "dali-gpu":
            sufficient[name] = rate_of_backend
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
        hint = ""
        if share >= _ENOUGH:
            hint = "; `python -m launch bench loaders` compares the backends"
        log.info(
            f"the device waited for data for {share:.1%} of the training time with {loader.backend}{hint}"
        )


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

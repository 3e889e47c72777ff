"""Measure the loaders of `launch bench loaders` and its model, and print the table."""

import argparse
import itertools
import math
import os
import platform
import statistics
import sys
import time
from typing import NamedTuple

import torch
from tqdm import tqdm

from bootfile.ground import accelerator
from bootfile.machine.cores import available_cores
from bootfile.sampling.plan import Plan
from bootfile.sampling.sampler import BatchSampler
from common.compute import classifiers
from common.distributed import devices
from datasets.folders import image_folder, tar_files
from datasets.loaders import backends
from datasets.sampling.augment import random_resized_crop
from datasets.stores import pack
from datasets.stores.files import FileStore, Store

_STEPS = 50  # steps of the model that are timed
_CPU_STEPS = 4
_CPU_BATCH = 8  # at most: a step of 64 images takes minutes


class Row(NamedTuple):
    """The images/s of a backend: median, least and most of the rounds, and the median with cold files."""

    backend: str
    warm: float
    least: float
    most: float
    cold: float | None


def compare(args: argparse.Namespace) -> int:
    """Measure, print a table and the choice, and return 0. Raises BadInput."""
    device = torch.device(accelerator.kind() if devices.count_gpus(args) else "cpu")
    options = {"max_bad": args.max_bad_images, "splits": args.splits, "log": log}
    index = image_folder.load(args.data_url, "train", args.cache_dir, **options)
    plan = Plan(index, BatchSampler(len(index), args.batch_size, 0), random_resized_crop, args.image_size)
    stores: dict[str, Store] = {"": FileStore(index)}
    if args.pack:
        stores[" + pack"] = pack.build(index, pack.place(args.pack, index))
    rows = _rows(args, stores, plan, device)
    log(f"measuring the speed of {args.arch} without data, the last part")
    ceiling = _compute_rate(args, len(index.classes), device)
    slowest = next(row.warm for row in rows if row.backend == "pytorch")
    machine = f"{platform.processor() or platform.machine()}, {available_cores()} cores, {device.type}"
    print(f"\n{machine}, load average {os.getloadavg()[0]:.2f}")
    print(f"{index.root}: {len(index)} images, {int(index.bytes.mean()) / 1000:.0f} kB on average")
    print(f"{'backend':<18}{'images/s':>10}{'range':>14}{'ratio':>8}{'cold':>10}{'wait':>8}{'(cold)':>8}")
    for row in rows:
        waits = [_describe_wait(rate, ceiling, device) for rate in (row.warm, row.cold)]
        cold = f"{row.cold:.0f}" if row.cold else "-"
        print(
            f"{row.backend:<18}{row.warm:>10.0f}{f'{row.least:.0f}-{row.most:.0f}':>14}"
            f"{row.warm / slowest:>7.1f}x{cold:>10}{waits[0]:>8}{waits[1]:>8}"
        )
    print(f"{args.arch} computes {ceiling:.1f} images/s here, without data")
    print(f"choice: {next(row.backend for row in rows if row.backend != 'synthetic')}")
    return 0


def _rows(args: argparse.Namespace, stores: dict, plan: Plan, device: torch.device) -> list[Row]:
    """Return a row for each backend and store, the fastest first."""
    candidates = list[tuple]()
    for backend, reason in backends.reasons(device).items():
        if reason:
            log(f"{backend}: {reason}")
        elif backend == "synthetic":
            candidates.append((backend, backend, stores[""]))
        else:
            candidates += [(backend + suffix, backend, store) for suffix, store in stores.items()]
    # in rounds, not one backend after the other: a busy machine then slows all of them down
    rates = dict[str, list[tuple]]()
    for name, backend, store in tqdm(candidates * args.rounds, f"loaders, {args.rounds} rounds"):
        rates.setdefault(name, []).append(_measure(args, backend, store, backends.Head(plan), device))
    rows = []
    for name, rounds in rates.items():
        warm = [warm_rate for warm_rate, _ in rounds if warm_rate]
        cold = [cold_rate for _, cold_rate in rounds if cold_rate]
        cold_rate = statistics.median(cold) if cold else None
        rows.append(Row(name, statistics.median(warm), min(warm), max(warm), cold_rate))
    return sorted(rows, key=lambda row: row.warm, reverse=True)


def _measure(
    args: argparse.Namespace, backend: str, store: FileStore, head: backends.Head, device: torch.device
) -> tuple[float, float | None]:
    """Return images/s warm and cold. Without files, cold is None."""
    reads = backend != "synthetic"
    if reads:
        _drop_from_page_cache(store, head)
    with backends.build(backend, store, head, device, args.workers or backends.cores()) as loader:
        # each file once, from the disk: later reads come from the page cache
        cold = backends.rate(itertools.islice(loader, backends.HEAD), math.inf) if reads else None
        return backends.rate(loader, args.seconds), cold


def _drop_from_page_cache(store: FileStore, head: backends.Head) -> None:
    """Drop the files of these batches from the page cache, before the round that reads them cold."""
    if isinstance(store, pack.PackStore):
        store.close()
        paths = [entry.path for entry in os.scandir(store.path)]
    else:
        images = [store.index.path(id) for id in {id for batch in head.batches for id in batch.ids}]
        # the tar file of an image in one
        paths = [(tar_files.split_path(path) or [path])[0] for path in images]
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def _compute_rate(args: argparse.Namespace, classes: int, device: torch.device) -> float:
    """Return images/s of training steps of the model, without data."""
    # the ceiling: what the model computes if it never waits for data
    model = classifiers.build(args.arch, classes, args.image_size)
    model = model.to(device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = min(args.batch_size, _CPU_BATCH) if device.type == "cpu" else args.batch_size
    images = torch.randn(batch, 3, args.image_size, args.image_size, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.zeros(batch, dtype=torch.int64, device=device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
            loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()

    steps = _CPU_STEPS if device.type == "cpu" else _STEPS
    for count in (1, steps):  # the first is slower
        begun = time.perf_counter()
        for _ in range(count):
            step()
        accelerator.of(device).synchronize()
    return batch * steps / (time.perf_counter() - begun)


def _describe_wait(rate: float | None, compute: float, device: torch.device) -> str:
    """Return the share of the time that the model would wait for data; "-" if it is not known."""
    if not rate:
        return "-"
    wait = compute / (rate + compute) if device.type == "cpu" else max(0, 1 - rate / compute)
    return f"{wait:.1%}"


def log(line: str) -> None:
    """Print a line about the progress to stderr, because the result is printed to stdout."""
    print(line, file=sys.stderr, flush=True)

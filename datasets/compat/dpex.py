"""torch's DataLoader with workers on the nodes of a Ray cluster. It replaces DataLoader by changing one name.

The content of a batch depends on the loader's seed and the number of the batch, not on the worker. So a batch
that was lost with a worker, a node or the cluster is the same when it is computed again.
"""

import collections
import contextlib
import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, _DatasetKind
from torch.utils.data._utils import worker as torch_worker

from common.exits import BadInput
from datasets.loaders.ray import cluster
from datasets.loaders.ray.pool import Pool

_CURE = "leave head_address= and RAY_ADDRESS out: a cluster is then started on this machine"
_END = "end of this worker's data"
_fetcher = _DatasetKind.create_fetcher


class RayDataLoader(DataLoader):
    """A DataLoader whose workers are actors on the nodes of a Ray cluster if distribute_mode is true.

    distribute_mode: false, or num_workers=0, is the plain DataLoader.
    head_address: HOST:PORT of the cluster, or "auto": RAY_ADDRESS, or the cluster of which this machine is a
        node. If "auto" finds none, a cluster is started on this machine. All loaders of this process and the
        job's ranks on this machine share it. It ends with this process.
    num_workers: actors (fewer run if the cluster has fewer CPUs). They run until close(), or until the loader
        is garbage-collected.
    cpus_per_worker: CPUs of each actor.
    log: called with one line about lost workers (default: print).
    The other arguments are those of DataLoader, but multiprocessing_context has no effect, and batches always
    keep their order. Batches have the types that collate_fn returns; uint8 has a quarter of the bytes of
    float32.

    torch, NumPy and random are seeded for every batch. If the data set has changed since the last epoch, new
    workers are started with it; with persistent_workers this is not checked. Iterating raises the exceptions
    of the data set, with the worker's traceback and the sample's id. It raises BadInput if there is no
    cluster, or if the cluster is full.
    """

    def __init__(
        self,
        dataset: Dataset,
        distribute_mode: bool = False,
        head_address: str = "auto",
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler | Iterable | None = None,
        batch_sampler: Sampler[list] | Iterable[list] | None = None,
        num_workers: int = 0,
        *arguments: Any,
        prefetch_factor: int | None = 2,
        cpus_per_worker: float = 1.0,
        log: Callable[[str], None] | None = None,
        **options: Any,
    ):
        self.distribute_mode = bool(distribute_mode) and num_workers > 0
        self.head_address, self.cpus_per_worker, self.log = head_address, cpus_per_worker, log
        self._pool: Pool | None = None
        self._epochs = itertools.count()
        self._seed: Any = None
        options["prefetch_factor"] = prefetch_factor if num_workers else None
        arguments = (batch_size, shuffle, sampler, batch_sampler, num_workers, *arguments)
        super().__init__(dataset, *arguments, **options)
        if self.distribute_mode and head_address != "auto" and not cluster.is_address(head_address):
            raise BadInput(f"head_address {head_address} is not auto or HOST:PORT")
        if self.distribute_mode and prefetch_factor is not None and prefetch_factor < 1:
            raise BadInput(f"prefetch_factor {prefetch_factor} is not above 0")

    def check_worker_number_rationality(self) -> None:
        """Compare num_workers with this machine's cores, unless other machines do the work."""
        if not self.distribute_mode:
            super().check_worker_number_rationality()

    def __iter__(self) -> Any:
        return _Epoch(self) if self.distribute_mode else super().__iter__()

    def close(self) -> None:
        """End the workers. Iterating again starts new workers."""
        if self._pool:
            self._pool.close()
        self._pool = None

    def __enter__(self) -> "RayDataLoader":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_pool": None, "_epochs": itertools.count()}

    def pool(self) -> Pool:
        """Return a pool of workers with the current state of the data set."""
        if self._pool and self.persistent_workers:
            return self._pool
        fetcher = _Fetcher(self)
        if self._pool is None or not self._pool.runs(fetcher):
            iterable = isinstance(self.dataset, IterableDataset)
            options = (self.cpus_per_worker, self.log, _CURE, iterable)
            try:
                self._pool = Pool(fetcher, self.num_workers, self.head_address, *options)
            except cluster.NoCluster as error:
                if self.head_address != "auto" or "RAY_ADDRESS" in os.environ:
                    raise
                cluster.start_own(error.reason, self.log or print)
                self._pool = Pool(fetcher, self.num_workers, self.head_address, *options)
        return self._pool


DpexDataLoader = RayDataLoader


class _Epoch:
    """An iterator over the batches of one epoch, in order, with a bounded number of running tasks."""

    def __init__(self, loader: RayDataLoader):
        self._loader = loader  # a reference, so that the loader is not garbage-collected
        self._ids = iter(loader.batch_sampler if loader.batch_sampler is not None else loader.sampler)
        if not loader.persistent_workers or loader._seed is None:
            # drawn at the same place as in torch's DataLoader, so shuffling is the same
            loader._seed = torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item()
        self._seed, self._epoch = loader._seed, next(loader._epochs)
        self._pool = loader.pool()
        self._waiting: collections.deque = collections.deque()  # (key, lane), oldest first
        self._numbers, self._positions = itertools.count(), collections.Counter()
        # an iterable data set has one lane for each worker that may have more data
        workers = range(loader.num_workers)
        self._lanes = collections.deque(workers if isinstance(loader.dataset, IterableDataset) else [None])
        for _ in range((loader.prefetch_factor or 2) * loader.num_workers):
            self._submit()

    def __iter__(self) -> "_Epoch":
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        while self._waiting:
            key, lane = self._waiting.popleft()
            if lane not in self._lanes:
                self._pool.forget([key])
                continue
            batch = self._pool.take(key, self._loader.timeout)
            if isinstance(batch, str) and batch == _END:
                self._lanes.remove(lane)
                self._submit()
                continue
            self._submit()
            if self._loader.pin_memory and torch.cuda.is_available():
                batch = torch.utils.data._utils.pin_memory.pin_memory(batch)
            return batch
        raise StopIteration

    def __del__(self):
        if waiting := getattr(self, "_waiting", None):
            self._pool.forget([key for key, _ in waiting])

    def _submit(self) -> None:
        ids = next(self._ids, _END) if self._lanes else _END
        if ids is not _END:
            lane = self._lanes[0]
            self._lanes.rotate(-1)
            task = self._epoch, self._seed, next(self._numbers), self._positions[lane], ids
            self._positions[lane] += 1
            self._waiting.append((self._pool.submit(task, lane), lane))


class _Fetcher:
    """The function of a worker: returns a batch, or _END. It restores the process's random generators."""

    def __init__(self, loader: RayDataLoader):
        self.dataset, self.init = loader.dataset, loader.worker_init_fn
        self.persistent = loader.persistent_workers
        self.collation = loader._auto_collation, _Collate(loader.collate_fn), loader.drop_last

    def begin(self, worker: int, workers: int) -> None:
        """Set the number of this worker and of all workers."""
        self.worker, self.workers, self.epoch = worker, workers, None
        self.streams: dict[int, _Stream] = {}

    def __call__(self, task: tuple) -> Any:
        epoch, seed, number, position, ids = task
        info = {"num_workers": self.workers, "seed": seed + self.worker, "dataset": self.dataset}
        state = _get_state()
        try:
            with _worker_info(torch_worker.WorkerInfo(id=self.worker, **info)):
                if self.epoch != epoch:
                    _seed(seed, 0, self.worker)
                    if self.init is not None and not (self.persistent and self.epoch is not None):
                        self.init(self.worker)
                    self.epoch = epoch
                if not isinstance(self.dataset, IterableDataset):
                    _seed(seed, 1, number)
                    return _fetcher(_DatasetKind.Map, _Named(self.dataset), *self.collation).fetch(ids)
                if epoch not in self.streams:
                    for old in sorted(self.streams)[:-3]:  # the last three may still be iterated
                        del self.streams[old]
                    _seed(seed, 0, self.worker)
                    self.streams[epoch] = _Stream(self.dataset, self.collation)
                return self.streams[epoch].at(position, ids)
        finally:
            _set_state(state)


class _Stream:
    """A worker's batches of an iterable data set, from the first on, with its own random state."""

    def __init__(self, dataset: IterableDataset, collation: tuple):
        self.dataset, self.collation, self.position = dataset, collation, 0
        self.source: Any = None
        self.state = _get_state()

    def at(self, position: int, ids: Any) -> Any:
        """Return the batch at this position. Compute earlier batches first if they are missing."""
        _set_state(self.state)
        try:
            if self.source is None:
                self.source = _fetcher(_DatasetKind.Iterable, self.dataset, *self.collation)
            batch = None
            while self.position <= position:
                self.position += 1
                try:
                    batch = self.source.fetch(ids)
                except StopIteration:
                    batch = _END
            return batch
        finally:
            self.state = _get_state()


class _Named:
    """A data set whose errors name the sample."""

    def __init__(self, dataset: Any):
        self.dataset = dataset

    def __getitem__(self, id: Any) -> Any:
        try:
            return self.dataset[id]
        except Exception as error:
            raise _name(error, f"sample {id}") from error

    def __getitems__(self, ids: list) -> list:
        together = getattr(self.dataset, "__getitems__", None)
        if together is None:
            return [self[id] for id in ids]
        try:
            return together(ids)
        except Exception as error:
            more = ", ..." if len(ids) > 8 else ""
            raise _name(error, f"samples {', '.join(map(str, ids[:8]))}{more}") from error


def _name(error: Exception, sample: str) -> Exception:
    """Return an exception of the same type, if possible, whose message names the sample."""
    if isinstance(error, BadInput):
        return error
    with contextlib.suppress(Exception):
        return type(error)(f"{sample}: {error.args[0] if len(error.args) == 1 else error}")
    return RuntimeError(f"{sample}: {type(error).__name__}: {error}")


class _Collate:
    """A collate_fn. In a worker torch's own would put batches into shared memory; this one prevents it."""

    def __init__(self, function: Callable):
        self.function = function

    def __call__(self, samples: Any) -> Any:
        if getattr(self.function, "__module__", "") != "torch.utils.data._utils.collate":
            return self.function(samples)
        with _worker_info(None):
            return self.function(samples)


@contextlib.contextmanager
def _worker_info(info: Any) -> Iterator[None]:
    """Let torch.utils.data.get_worker_info() return `info`."""
    before, torch_worker._worker_info = torch_worker._worker_info, info
    try:
        yield
    finally:
        torch_worker._worker_info = before


def _seed(seed: int, kind: int, number: int) -> None:
    """Seed the global generators. kind: 0 for the worker of this number, 1 for the batch of this number."""
    words = np.random.SeedSequence([seed & (2**64 - 1), kind, number]).generate_state(3, np.uint64)
    torch.random.default_generator.manual_seed(int(words[0]))
    random.seed(int(words[1]))
    np.random.seed(int(words[2]) & (2**32 - 1))


def _get_state() -> tuple:
    return torch.random.get_rng_state(), random.getstate(), np.random.get_state()


def _set_state(state: tuple) -> None:
    torch.random.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])

"""torch's DataLoader with workers on other machines: the nodes of a Ray cluster.

It replaces DataLoader by changing one name, as Dpex's DpexDataLoader does (the seed of this module). What a
batch holds follows from the loader's seed and the number of the batch, not from the worker that computes it,
so a batch that was lost with a worker, a node or the cluster comes out the same when it is computed again.
"""

import collections
import itertools
import os
import random

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from common.exits import BadInput
from datasets.loaders.ray import cluster as ray_cluster
from datasets.loaders.ray.pool import Pool, is_address

_CURE = "leave head_address= and RAY_ADDRESS out: a cluster is then started on this machine"
_END = "end of this worker's data"


class RayDataLoader(DataLoader):
    """A DataLoader whose workers are actors on the nodes of a Ray cluster where distribute_mode is true.

    distribute_mode: false is the plain DataLoader, and so is num_workers=0. head_address: HOST:PORT of the
    cluster; "auto": that of RAY_ADDRESS, or of this machine, which is a node of it; if there is none, one is
    started on this machine, which ends with the process that started it and is shared by all loaders of the
    process, or of the job's ranks on this machine. num_workers: actors, each with `cpus_per_worker` CPUs (if
    the cluster has fewer CPUs, fewer run); they live until close(), until the loader is garbage or its
    process ends. All other arguments are those of torch.utils.data.DataLoader; multiprocessing_context does
    not count, and batches always keep their order. Batches arrive as the tensors and arrays that collate_fn
    made, of the same types: uint8 is a quarter of float32's way. say: takes a line of text about workers that
    were lost (default: print).

    A data set that draws random numbers of torch, NumPy or random is seeded for every batch. The data set
    is sent to the workers when it has changed since the last epoch; with persistent_workers nobody looks.
    Iterating raises what the data set raised, with the worker's traceback and the sample's id, and BadInput
    where there is no cluster, or no room in it.
    """

    def __init__(
        self,
        dataset,
        distribute_mode: bool = False,
        head_address: str = "auto",
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler=None,
        batch_sampler=None,
        num_workers: int = 0,
        collate_fn=None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn=None,
        multiprocessing_context=None,
        generator=None,
        *,
        prefetch_factor: int | None = 2,
        persistent_workers: bool = False,
        cpus_per_worker: float = 1.0,
        say=None,
        **others,
    ):
        self.distribute_mode = bool(distribute_mode) and num_workers > 0
        self.head_address, self.cpus_per_worker, self.say = head_address, cpus_per_worker, say
        self._pool, self._epochs = None, itertools.count()
        super().__init__(
            dataset, batch_size, shuffle, sampler, batch_sampler, num_workers, collate_fn, pin_memory,
            drop_last, timeout, worker_init_fn, None if self.distribute_mode else multiprocessing_context,
            generator, prefetch_factor=prefetch_factor if num_workers else None,
            persistent_workers=persistent_workers, **others,
        )  # fmt: skip
        if self.distribute_mode and head_address != "auto" and not is_address(head_address):
            raise BadInput(f"head_address {head_address} is not auto or HOST:PORT")
        if self.distribute_mode and self.prefetch_factor < 1:
            raise BadInput(f"prefetch_factor {self.prefetch_factor} is not above 0")

    def check_worker_number_rationality(self) -> None:
        """The workers are not on this machine alone: its cores are no measure."""
        if not self.distribute_mode:
            super().check_worker_number_rationality()

    def __iter__(self):
        if not self.distribute_mode:
            return super().__iter__()
        return _Epoch(self)

    def close(self) -> None:
        """End the workers. Iterating again starts new ones."""
        if self._pool:
            self._pool.close()
        self._pool = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __getstate__(self):
        return self.__dict__ | {"_pool": None, "_epochs": itertools.count()}

    def pool(self) -> Pool:
        """The workers, who have the data set as it is now."""
        if self._pool and self.persistent_workers:
            return self._pool
        fetcher = Fetcher(
            self.dataset, self.collate_fn, self.worker_init_fn, self.batch_size is not None or
            self.batch_sampler is not None, self.drop_last, self.persistent_workers,
        )  # fmt: skip
        if self._pool is None:
            if self.head_address == "auto" and "RAY_ADDRESS" not in os.environ:
                ray_cluster.find_own()
            self._pool = Pool(
                fetcher, self.num_workers, self.head_address, self.cpus_per_worker, self.say, _CURE,
                ray_cluster.start_own, isinstance(self.dataset, IterableDataset),
            )  # fmt: skip
        else:
            self._pool.replace(fetcher)
        return self._pool


DpexDataLoader = RayDataLoader


class _Epoch:
    """Iterates the batches of one epoch, in order, with a bounded number of them under way."""

    def __init__(self, loader: RayDataLoader):
        self._loader = loader  # which must not be garbage while this is used
        self._ids = iter(loader.batch_sampler if loader.batch_sampler is not None else loader.sampler)
        if not loader.persistent_workers or not hasattr(loader, "_seed"):
            # drawn where torch's own draws it, so that shuffling is that of the plain DataLoader
            seed = torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item()
            loader._seed = seed
        self._seed, self._epoch = loader._seed, next(loader._epochs)
        self._pool = loader.pool()
        self._iterable = isinstance(loader.dataset, IterableDataset)
        self._waiting: collections.deque = collections.deque()  # (key, lane), oldest first
        self._keys, self._positions = itertools.count(), [0] * loader.num_workers
        self._lanes = collections.deque(range(loader.num_workers))  # workers that may have more data
        for _ in range(loader.prefetch_factor * loader.num_workers):
            self._submit()

    def __iter__(self):
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self):
        while self._waiting:
            key, lane = self._waiting.popleft()
            if lane is not None and lane not in self._lanes:
                self._pool.forget([key])
                continue
            batch = self._pool.take(key, self._loader.timeout)
            if self._iterable and isinstance(batch, str) and batch == _END:
                self._lanes.remove(lane)
                self._submit()
                continue
            self._submit()
            if self._loader.pin_memory and torch.cuda.is_available():
                batch = torch.utils.data._utils.pin_memory.pin_memory(batch)
            return batch
        raise StopIteration

    def __del__(self):
        waiting = getattr(self, "_waiting", None)
        if waiting:
            self._pool.forget([key for key, _ in waiting])

    def _submit(self) -> None:
        lane, position = None, None
        if self._iterable:
            if not self._lanes:
                return
            lane = self._lanes[0]
        ids = next(self._ids, None) if not self._iterable else next(self._ids)
        if ids is None and not self._iterable:
            return
        if self._iterable:
            self._lanes.rotate(-1)
            position = self._positions[lane]
            self._positions[lane] += 1
        number = next(self._keys)
        key = self._epoch, number
        self._pool.submit(key, (self._epoch, self._seed, number, position, ids), lane)
        self._waiting.append((key, lane))


class Fetcher:
    """What a worker does: one batch of a data set.

    batched: whether tasks are lists of ids. drop_last: of an iterable data set's worker. kept: worker_init_fn
    is called once, not once an epoch.
    """

    def __init__(self, dataset, collate_fn, worker_init_fn, batched: bool, drop_last: bool, kept: bool):
        self.dataset, self.collate_fn, self.worker_init_fn = dataset, collate_fn, worker_init_fn
        self.batched, self.drop_last, self.kept = batched, drop_last, kept

    def begin(self, worker: int, workers: int) -> None:
        self._worker, self._workers, self._epoch, self._streams = worker, workers, None, {}

    def __call__(self, task: tuple):
        epoch, seed, number, position, ids = task
        with _WorkerInfo(self._worker, self._workers, seed + self._worker, self.dataset):
            first = self._epoch is None
            if self._epoch != epoch:
                self._epoch = epoch
                _seed(seed, 0, self._worker)
                if self.worker_init_fn is not None and (first or not self.kept):
                    self.worker_init_fn(self._worker)
            if isinstance(self.dataset, IterableDataset):
                return self._stream(epoch, seed).at(position, ids)
            _seed(seed, 1, number)
            return _collated(self.collate_fn, self._samples(ids))

    def _samples(self, ids):
        if not self.batched:
            return self._sample(ids)
        together = getattr(self.dataset, "__getitems__", None)
        if together is None:
            return [self._sample(id) for id in ids]
        try:
            return together(ids)
        except Exception as error:
            raise _named(error, f"samples {_listed(ids)}") from error

    def _sample(self, id):
        try:
            return self.dataset[id]
        except Exception as error:
            raise _named(error, f"sample {id}") from error

    def _stream(self, epoch: int, seed: int) -> "_Stream":
        if epoch not in self._streams:
            for old in sorted(self._streams)[:-3]:  # epochs that somebody may still iterate
                del self._streams[old]
            self._streams[epoch] = _Stream(self, _state_of(seed, 0, self._worker))
        return self._streams[epoch]


class _Stream:
    """A worker's batches of an iterable data set, from the first on. Its random numbers are its own."""

    def __init__(self, fetcher: Fetcher, state: tuple):
        self._fetcher, self._state, self._position = fetcher, state, 0
        self._items, self._ended = None, False

    def at(self, position: int, ids):
        """The batch at this position; those before it are computed where they were not."""
        _set_state(self._state)
        try:
            if self._items is None:
                self._items = iter(self._fetcher.dataset)
            while self._position < position:
                self._next(ids)
            return self._next(ids)
        finally:
            self._state = _get_state()

    def _next(self, ids):
        self._position += 1
        fetcher = self._fetcher
        if self._ended:
            return _END
        if not fetcher.batched:
            item = next(self._items, _END)
            self._ended = isinstance(item, str) and item == _END
            return item if self._ended else _collated(fetcher.collate_fn, item)
        items = list(itertools.islice(self._items, len(ids)))
        self._ended = len(items) < len(ids)
        if not items or (fetcher.drop_last and self._ended):
            return _END
        return _collated(fetcher.collate_fn, items)


class _WorkerInfo:
    """What torch.utils.data.get_worker_info() says meanwhile."""

    def __init__(self, worker: int, workers: int, seed: int, dataset):
        from torch.utils.data._utils import worker as torch_worker

        self._module = torch_worker
        self._info = torch_worker.WorkerInfo(id=worker, num_workers=workers, seed=seed, dataset=dataset)

    def __enter__(self):
        self._before, self._module._worker_info = self._module._worker_info, self._info

    def __exit__(self, *_):
        self._module._worker_info = self._before


def _collated(collate_fn, samples):
    """Without shared memory, into which torch's own collation puts batches where it is in a worker."""
    if getattr(collate_fn, "__module__", "") != "torch.utils.data._utils.collate":
        return collate_fn(samples)
    from torch.utils.data._utils import worker as torch_worker

    before, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        return collate_fn(samples)
    finally:
        torch_worker._worker_info = before


def _seed(seed: int, kind: int, number: int) -> None:
    """Seed all that a data set may draw from. kind: 0 for the worker of this number, 1 for the batch."""
    _set_state(_state_of(seed, kind, number))


def _state_of(seed: int, kind: int, number: int) -> tuple:
    words = np.random.SeedSequence([seed & (2**64 - 1), kind, number]).generate_state(3, np.uint64)
    return tuple(int(word) for word in words)


def _set_state(state: tuple) -> None:
    if isinstance(state[0], int):
        torch.random.default_generator.manual_seed(state[0])
        random.seed(state[1])
        np.random.seed(state[2] & (2**32 - 1))
        return
    torch.random.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


def _get_state() -> tuple:
    return torch.random.get_rng_state(), random.getstate(), np.random.get_state()


def _named(error: Exception, what: str) -> Exception:
    """The same kind of exception, whose message says which sample it was."""
    if isinstance(error, BadInput):
        return error
    text = error.args[0] if len(error.args) == 1 else error
    try:
        return type(error)(f"{what}: {text}")
    except Exception:
        return RuntimeError(f"{what}: {type(error).__name__}: {error}")


def _listed(ids) -> str:
    shown = ", ".join(str(id) for id in itertools.islice(ids, 8))
    return shown + (", ..." if len(ids) > 8 else "")

"""torch's DataLoader with actors of Ray as workers, and the Workers of an engine that are such actors.

The content of a batch depends on the loader's seed and the number of the batch, not on the worker. So a batch
that was lost with a worker or a node is the same when another actor computes it.
"""

import collections
import itertools
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, _DatasetKind
from torch.utils.data._utils import worker as torch_worker

from bootfile.ground import accelerator
from bootfile.loaders.workers import Workers
from bootfile.sampling.generators import EPOCH_START, derive_seed, seed_all
from datasets.loaders.ray.pool import Pool

_Batch = TypeVar("_Batch")
CPUS = 0.5  # per worker of images: the workers of training and of evaluation do not work at the same time


class RayDataLoader(DataLoader[_Batch]):
    """A DataLoader whose workers are actors of Ray if distribute_mode is true.

    distribute_mode: false, num_workers=0 or an IterableDataset is the plain DataLoader.
    head_address: HOST:PORT of the cluster, or "auto": RAY_ADDRESS, or the cluster of which this machine is a
        node, or an instance of Ray that this process starts, and that ends with it. The first loader of a
        process decides; each rank of a job has its own connection.
    num_workers: actors (fewer run if the cluster has fewer CPUs). They run until close(), or until the loader
        is garbage-collected.
    cpus_per_worker: CPUs of each actor on a cluster.
    The other arguments are those of DataLoader, but multiprocessing_context has no effect, and batches always
    keep their order. Batches have the types that collate_fn returns; uint8 has a quarter of the bytes of
    float32.

    torch, NumPy and random are seeded for every batch. Each epoch sends the data set to the workers; with
    persistent_workers only the first one does. Iterating raises the exceptions of the data set, with the
    worker's traceback, and those of Pool.take(). After an exception, next() returns the next batch. Without a
    cluster, or if it is full, it raises BadInput.
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
        **options: Any,
    ):
        is_iterable = isinstance(dataset, IterableDataset)  # it cannot be read again from the middle
        self.distribute_mode = bool(distribute_mode) and num_workers > 0 and not is_iterable
        self.head_address = head_address
        self.cpus_per_worker = cpus_per_worker
        self._pool: Pool | None = None  # None until the first epoch
        self._served: tuple = ()  # what the workers call, and the numbers of the batches
        options["prefetch_factor"] = prefetch_factor if num_workers else None
        arguments = (batch_size, shuffle, sampler, batch_sampler, num_workers, *arguments)
        super().__init__(dataset, *arguments, **options)

    def __iter__(self) -> Any:
        return _Batches(self, *self._serve()) if self.distribute_mode else super().__iter__()

    def close(self) -> None:
        """End the workers. Iterating again starts new workers."""
        if self._pool:
            self._pool.close()
        self._pool = None
        self._served = ()

    def __enter__(self) -> "RayDataLoader":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _serve(self) -> tuple[Pool, list, Iterable[int]]:
        """Return the workers, what they call for each batch, and the numbers of the batches."""
        pool = self._pool
        if pool is None:
            pool = Pool(self.num_workers, self.head_address, self.cpus_per_worker)
            self._pool = pool
        if not (self.persistent_workers and self._served):
            # drawn at the same place as in torch's DataLoader, so shuffling is the same
            seed = torch.empty((), dtype=torch.int64).random_(generator=self.generator).item()
            self._served = pool.put(_Fetcher(self, int(seed), pool.workers)), itertools.count()
        return pool, *self._served


class _Batches:
    """The batches of an epoch in order, while prefetch_factor tasks of each worker run or wait."""

    def __init__(self, loader: RayDataLoader, pool: Pool, function: list, numbers: Iterable[int]):
        self._loader = loader
        self._pool = pool
        self._function = function
        # batch_size=None: the data set makes whole batches
        self._keys: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._tasks = ((number, key) for key, number in zip(self._keys, numbers, strict=False))
        self._waiting = collections.deque[Any]()  # references to the results of tasks, in order
        self._submit((loader.prefetch_factor or 2) * pool.workers)

    def _submit(self, count: int) -> None:
        """Submit the next `count` tasks: several at the start of an epoch, then one with each batch."""
        for task in itertools.islice(self._tasks, count):
            self._waiting.append(self._pool.submit(self._function, task))

    def __iter__(self) -> "_Batches":
        return self

    def __len__(self) -> int:
        return len(self._keys)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        self._submit(1)  # in place of the task whose batch is taken now
        if not self._waiting:
            raise StopIteration
        batch = self._pool.take(self._waiting.popleft(), self._loader.timeout)
        if self._loader.pin_memory and accelerator.count():
            batch = torch.utils.data._utils.pin_memory.pin_memory(batch)
        return batch


class _Fetcher:
    """The function of the workers: it returns a batch."""

    def __init__(self, loader: RayDataLoader, seed: int, workers: int):
        self.dataset = loader.dataset
        self.init = loader.worker_init_fn  # None after its call
        self.seed = seed
        self.workers = workers
        self.collation = loader._auto_collation, loader.collate_fn, loader.drop_last

    def __call__(self, task: tuple) -> Any:
        """Return the batch of a task (number, key of the sampler). If the actor is lost, another one calls it
        again, so the random numbers follow from the number of the batch."""
        number, key = task
        # torch's DataLoader gives batch n to this worker: get_worker_info() shows it, whichever actor runs it
        worker = number % self.workers
        info = {"num_workers": self.workers, "seed": self.seed + worker, "dataset": self.dataset}
        torch_worker._worker_info = torch_worker.WorkerInfo(id=worker, **info)
        if self.init is not None:  # once in each worker
            seed_all(derive_seed(self.seed % 2**64, worker, 0, EPOCH_START))
            self.init(worker)
            self.init = None
        seed_all(derive_seed(self.seed % 2**64, 0, number))
        return _DatasetKind.create_fetcher(_DatasetKind.Map, self.dataset, *self.collation).fetch(key)


class RayWorkers(Workers):
    """Workers that are actors of Ray, which start at the first batch. The arguments are those of Pool."""

    def __init__(self, workers: int, address: str = "auto", cpus: float = 1.0):
        super().__init__(workers, pinned=False)
        self.forks = False
        self._pool_options: dict[str, Any] = {"head_address": address, "cpus_per_worker": cpus}

    def open_loader(self, results: Dataset, **options: Any) -> DataLoader:
        """Return the loader that Workers iterates."""
        return RayDataLoader(results, True, **self._pool_options, **options)

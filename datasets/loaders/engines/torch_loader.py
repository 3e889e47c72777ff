"""The batches of a torch DataLoader, the same after any restart.

At the start of each epoch all generators are seeded, and those that the loader holds; without workers also
before each batch. A restart within an epoch reads the epoch's first batches again, and passes over them.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from common.distributed import ranks
from common.ground.exits import BadInput
from datasets.loaders.engines.map_style import MoveToDevice
from datasets.loaders.loader import Loader
from datasets.sampling import generators
from datasets.sampling.loop_receipt import hash_batch
from datasets.sampling.sampler import Batch, BatchSampler, Plan

_ORDER, _READ = 10, 11  # moments of generators.derive_seed()


def torch_loader(loader: DataLoader, device: torch.device, *, seed: int = 0, epochs: int = 1) -> Loader:
    """Return a Loader of (inputs, targets) on the device, of a torch DataLoader.

    loader: of a map-style Dataset; a batch is (inputs, targets), nested in any way. Its sampler and its items
        may draw from the generators of torch, NumPy and `random`, and from those that the loader holds. Each
        rank has its own, for example with a DistributedSampler, whose set_epoch() is called here.
    seed, epochs: of the training.
    Raises BadInput if the number of batches is not known.

    The receipt covers the contents of the samples (loop_receipt.py). The data are not compared at a restart.
    With another number of processes the batches are others.
    """
    try:
        steps = len(loader)
    except TypeError as error:
        raise BadInput("the DataLoader does not know its number of batches: give it a map-style Dataset") from error
    count, rank = ranks.world_size(), ranks.rank()
    sampler = BatchSampler(steps * count, count, seed, epochs).shard(rank, count)  # it counts the steps
    return Loader(TorchBatches(loader), Plan(_Index(steps * count), sampler), device, to_device=MoveToDevice(device))


class _Index:
    fingerprint = ""

    def __init__(self, size: int):
        self.labels = np.broadcast_to(np.int64(0), size)

    def __len__(self) -> int:
        return len(self.labels)


class TorchBatches:
    """An engine for Loader. loader: a DataLoader."""

    reuses_memory = False

    def __init__(self, loader: DataLoader):
        self._loader, self.collate_fn = loader, loader.collate_fn

    def run(self, plan: Plan) -> Iterator[tuple[Batch, Any]]:
        """Yield the batches of an epoch from the position of the plan's sampler. Ids are hashes of samples."""
        sampler, samplers = plan.sampler, (self._loader.sampler, self._loader.batch_sampler)
        first, last = sampler.step, sampler.step + sampler.remaining
        begin = (sampler.epoch - 1) * len(sampler)
        for each in samplers:
            if hasattr(each, "set_epoch"):
                each.set_epoch(sampler.epoch)
        self._seed(sampler, sampler.epoch, _ORDER)
        batches = iter(self._loader)
        for step in range(begin, last):
            if not self._loader.num_workers:  # a step of the training draws, too
                self._seed(sampler, step, _READ)
            batch = next(batches, None)
            if batch is None:
                return
            if step >= first:
                ids = hash_batch(batch).astype(np.int64)
                yield Batch(ids, np.zeros_like(ids), ()), batch

    def example(self, count: int) -> Any:
        """Return the inputs of the first `count` samples of the data set."""
        dataset = self._loader.dataset
        with generators.restored():
            items = [dataset[place % len(dataset)] for place in range(count)]  # type: ignore[arg-type]
            return self.collate_fn(items)[0]

    def close(self) -> None:
        """Do nothing: the DataLoader ends its workers."""

    def _seed(self, sampler: BatchSampler, step: int, moment: int) -> None:
        seed = generators.derive_seed(sampler.seed, sampler.rank, step, moment)
        generators.seed_all(seed)
        for place, each in enumerate(generators.find_generators(self._loader), 1):
            each.seed((seed + place) % 2**63)

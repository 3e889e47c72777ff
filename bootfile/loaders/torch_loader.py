"""The batches of a torch DataLoader, the same after any restart.

At the start of each epoch all generators are seeded, and those that the loader holds; without workers also
before each batch. A restart within an epoch reads the epoch's first batches again, and passes over them.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from bootfile.exact.state import COMPUTED
from bootfile.ground.errors import BadInput, print_line
from bootfile.loaders.data_fingerprint import (
    find_unstable,
    fingerprint,
    hash_value,
    is_data,
    warn_of_unstable,
)
from bootfile.loaders.loader import Data, Engine, Index, Loader, pair_of
from bootfile.processes import ranks
from bootfile.receipt.contents import hash_batch
from bootfile.sampling import generators
from bootfile.sampling.plan import Batch, Plan
from bootfile.sampling.positions import Positions

# moments of generators.derive_seed()
_ORDER = 10
_READ = 11
_LOOK = 12


def torch_loader(
    loader: DataLoader[Any],
    device: torch.device | str,
    *,
    seed: int = 0,
    epochs: int = 1,
) -> Loader:
    """Return a Loader of (inputs, targets) on the device, of a torch DataLoader.

    loader: of a map-style Dataset. A batch is (inputs, targets), nested in any way, or a dictionary with
        one of loader.TARGETS. Its sampler and its items may draw from the generators of torch, NumPy and
        `random`, and from those that the loader holds. Each rank has its own, with a DistributedSampler: its
        set_epoch() is called here.
    seed, epochs: of the training.
    Raises BadInput for another kind of loader, an IterableDataset, a BatchSampler of this package, and for
        persistent workers, which keep their random numbers.

    The receipt covers the contents of the samples (contents.py). A restart compares the data set by a
    fingerprint (data_fingerprint.py: its length, its lists, its numbers and 64 items; a batch of two items if
    you have a collate_fn; the kind and the weights of the sampler), and the batches that it reads again with
    the receipt. It needs the same number of processes: with another one the batches are others.
    """
    if not isinstance(loader, DataLoader):
        raise BadInput(
            f"expected a DataLoader of torch, got {type(loader).__name__}: torch_loader(DataLoader(...), "
            "device), or map_style_loader(dataset, sampler, device)"
        )
    is_iterable = isinstance(loader.dataset, IterableDataset)
    # the order of the one and the random numbers of the other cannot be repeated
    if is_iterable or loader.persistent_workers:
        kind = "an IterableDataset" if is_iterable else "persistent_workers=True"
        raise BadInput(f"the DataLoader has {kind}: its batches are not the same after a restart")
    # an own loop would move it with seek(); set_epoch(), which is called here, is not one of its methods
    if isinstance(loader.batch_sampler, Positions):
        raise BadInput(
            "a BatchSampler of bootfile in a DataLoader would give each epoch the order of the first: use "
            "map_style_loader(dataset, batch_sampler, device)"
        )
    if not len(loader):
        order = _find_order(loader)
        raise BadInput(
            f"the DataLoader has no batch: the len() of its {type(order).__name__} is {len(order)}, its "
            f"batch_size {loader.batch_size}: expected more samples, a smaller batch_size, or drop_last=False"
        )
    if loader.num_workers:
        from bootfile.processes.sockets import find_short_folder

        find_short_folder()
    # each rank has a DataLoader of its own, and counts its own steps: they are equally many
    steps = LoaderSteps(len(loader), seed, epochs, ranks.rank(), ranks.world_size())
    steps.choices = _name_choices(loader)
    further = {}
    if type(loader.dataset) is not TensorDataset:
        from bootfile.loaders.data_lists import list_of  # tensors are in the fingerprint

        further = list_of(loader.dataset)  # before an item is read
    digest, batch, is_stable = find_fingerprint(loader)
    if batch:
        further["batch of collate_fn"] = batch
    plan = Plan(Index(steps.size, digest, further=further), steps)
    made = Loader(TorchBatches(loader, is_stable), plan, torch.device(device))
    made.has_stable_items = is_stable
    # a sampler that divides the data among the ranks has their number; else each rank may have its own data
    made.shares_data = any(hasattr(part, "num_replicas") for part in (loader.sampler, loader.batch_sampler))
    return made


def _name_choices(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return what decides which samples a batch has, and may be edited without another number of steps."""
    choices = {"batch size": getattr(loader.batch_sampler, "batch_size", None)}
    # without a batch_size the DataLoader uses no sampler
    sampler: Any = loader.sampler if loader.batch_size else loader.batch_sampler
    if not type(sampler).__module__.startswith("torch."):  # a class may have another name at a restart
        return choices | {"order": "of your own"}
    choices["order"] = type(sampler).__name__
    for name, value in vars(sampler).items():
        listed = list(value) if isinstance(value, range) else value
        if is_data(listed):  # weights, or ids
            choices[f"order's {name}"] = f"{hash_value(listed):016x}"
        elif isinstance(value, bool) or name == "seed":
            choices[f"order's {name}"] = value
    return choices


def find_fingerprint(loader: DataLoader[Any]) -> tuple[str, str, bool]:
    """Return (fingerprint of the data set of a DataLoader, "" if it has no length; digest of a batch of the
    user's collate_fn, "" without one; whether items are stable).

    If the DataLoader has forked workers, one of them reads the items: a file that an item opens stays closed
    in this process. Items that differ when they are read twice do not count, and a warning is printed.
    """
    dataset: Any = loader.dataset
    collate = loader.collate_fn
    # its items cannot be asked for by number: only the batches that a restart reads again are compared
    if not hasattr(dataset, "__len__"):
        return "", "", True
    held = generators.find_generators(loader)

    def read(ids: np.ndarray) -> list[Any]:
        """Return items, each with the same random numbers at every start."""
        items = []
        for id in ids.tolist():
            generators.seed_with(generators.derive_seed(0, 0, id, _LOOK), held)
            items.append(dataset[id])
        return items

    def read_batch() -> str:
        """Return a digest of what collate_fn makes of two items."""
        return f"{hash_value(collate(read(np.array([0, len(dataset) - 1])))):016x}"

    def look(_: Any = None) -> tuple[str, str, str]:
        """Return (fingerprint, digest of a batch, what is unstable or "")."""
        with generators.restored():
            digest = batch = name = ""
            # its keys may not be 0, 1, ..., a bad item ends an epoch, and "".join has the module None
            with contextlib.suppress(Exception):
                # some items are read twice, for half a second at most
                unstable = find_unstable(dataset, lambda ids: hash_value(read(ids)))
                if unstable is None:
                    is_own = not getattr(collate, "__module__", "").startswith("torch.")
                    digest = fingerprint(dataset, read)
                else:
                    name = f"sample {unstable} of {type(dataset).__name__} differs when it is read twice"
            if digest and is_own:
                with contextlib.suppress(Exception):  # the first batch will raise it
                    batches = {read_batch(), read_batch()}
                    batch = batches.pop() if len(batches) == 1 else ""
            return digest or fingerprint(dataset, lambda ids: []), batch, name

    if loader.num_workers:
        from bootfile.loaders.workers import Workers

        # the worker ends after it: those of the training are forked from a process that has read nothing
        [(digest, batch, unstable)] = Workers(1, pinned=False).call(look)
    else:
        digest, batch, unstable = look()
    if unstable:
        warn_of_unstable(unstable)
    return COMPUTED + digest, batch, not unstable


def _find_order(loader: DataLoader[Any]) -> Any:
    """Return what decides how many batches an epoch of a DataLoader has, of torch or of the user."""
    order: Any = loader.batch_sampler
    # a batch sampler of torch counts the ids of its sampler
    is_own = order is not None and not type(order).__module__.startswith("torch.")
    return order if is_own else loader.sampler


class LoaderSteps(Positions):
    """Counts the steps of a DataLoader, whose own sampler chooses the samples. Each rank has such a loader.
    steps: of an epoch. seed, epochs: of the training. rank, world_size: of this process."""

    name = "BatchSampler"  # a checkpoint holds it, and the numbers below
    shards = 1
    largest = 1

    def __init__(self, steps: int, seed: int, epochs: int, rank: int, world_size: int):
        self.size = steps * world_size
        self.global_batch = world_size
        self.processes = world_size
        self.seed = seed
        self.rank = rank
        self.first_shard = rank
        self.choices: dict[str, Any] = {}  # the DataLoader's kind of sampler and batch size
        self._steps = steps
        super().__init__(epochs)

    def __len__(self) -> int:
        return self._steps


class TorchBatches(Engine):
    """An engine for Loader, which reads the batches of a DataLoader. is_stable: whether an item is the same
    when it is read again. `repeated`: the ids of the samples of each step that was read again after a
    restart, from the step `first_repeated` on. Loader.commit() compares them with the receipt."""

    def __init__(self, loader: DataLoader[Any], is_stable: bool = True):
        self._compares = is_stable  # whether run() fills `repeated`: only its first call does
        self.repeated: list[np.ndarray] = []
        self.first_repeated = 0
        self._loader = loader
        self.data_set = loader.dataset
        self.collate_fn = loader.collate_fn
        self._held: list[generators.Generator] = []  # generators that the DataLoader holds
        self._order = _find_order(loader)
        self._has_looked = False  # whether _look_for_more() was called

    def run(self, plan: Plan) -> Data:
        """Yield the rest of an epoch. Ids are hashes of the samples."""
        sampler: LoaderSteps = plan.sampler
        begin = (sampler.epoch - 1) * len(sampler)  # global steps, from 0
        first = sampler.step
        end = first + sampler.remaining
        samplers: list[Any] = [self._loader.sampler, self._loader.batch_sampler]
        for sampler_of_user in samplers:
            if hasattr(sampler_of_user, "set_epoch"):
                sampler_of_user.set_epoch(sampler.epoch)
        # again in each epoch: the sampler may have made a new generator
        self._held = generators.find_generators(self._loader)
        # before iter(): the sampler draws the order, and the workers get their base seed
        self._seed(sampler, sampler.epoch, _ORDER)
        compares = self._compares
        self._compares = False  # what is read again later belongs to this start
        if self._loader.num_workers:
            from bootfile.loaders.workers import check_tasks  # a loop without workers needs no limits

            # a process, the thread that sends its results, and one here that sends it the ids
            check_tasks(self._loader.num_workers, 3)
        # the workers start here, and end with this iterator
        batches = iter(self._loader)
        for step in range(begin, end):
            if not self._loader.num_workers:  # the steps of the training draw in this process, too
                self._seed(sampler, step, _READ)
            batch = next(batches, None)
            if batch is None:  # the epoch is too short
                raise BadInput(
                    f"{type(self._order).__name__} ended after {step - begin} batches, and its len() is "
                    f"{len(sampler)}: let len() return the number of batches of each epoch"
                )
            if step < first and not compares:
                continue
            # a DataLoader does not tell which samples it has read, so their contents are the ids
            ids = hash_batch(batch).astype(np.int64)
            if step < first:  # the starts before this one have used it
                self.first_repeated = begin + 1
                self.repeated.append(ids)
            else:
                yield Batch(ids, np.zeros_like(ids), ()), pair_of(batch)
        if end == begin + len(sampler):  # the batches after a part of an epoch belong to the next part
            self._look_for_more(batches, len(sampler))

    def _look_for_more(self, batches: Iterator[Any], count: int) -> None:
        """Print a warning if an order of the user has more batches than its length says: at the end of the
        first epoch that this process reads."""
        if self._has_looked or type(self._order).__module__.startswith("torch."):
            return
        self._has_looked = True
        with generators.restored():
            if next(batches, None) is not None and ranks.is_first():
                name = type(self._order).__name__
                print_line(
                    f"warning: {name} has more batches than its len() of {count}: those after them are left "
                    "out of each epoch. Let len() return their number"
                )

    def example(self, count: int) -> Any:
        """Return the inputs of the first `count` samples of the data set."""
        dataset: Any = self._loader.dataset
        with generators.restored():
            items = [dataset[place % len(dataset)] for place in range(count)]
            inputs, _ = pair_of(self._loader.collate_fn(items))
        return inputs

    def _seed(self, sampler: LoaderSteps, step: int, moment: int) -> None:
        """Seed all generators of this process, and those that the loader holds, for a moment of a step."""
        generators.seed_with(generators.derive_seed(sampler.seed, sampler.rank, step, moment), self._held)

"""Batches of any map-style torch Dataset, the same at any number of workers and ranks and after any restart.

For each item the generators of torch, NumPy, `random` and the dataset are seeded by (seed, epoch, sample id).
So random transforms do not depend on the worker or on other samples.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from common.distributed import ranks
from common.ground import accelerator
from common.ground.exits import BadInput, print_line
from common.run.metrics import check_map_style, class_names_of
from datasets.data_fingerprint import find_unstable, fingerprint, hash_rows, hash_value
from datasets.loaders.engines.workers import WorkerEngine, Workers, check_connections
from datasets.loaders.loader import Copy, Loader, Stage
from datasets.sampling import generators
from datasets.sampling.philox import Operation, draw
from datasets.sampling.sampler import Batch, Plan

TARGETS = ("label", "labels", "target", "targets", "y")  # the first of these keys in a dictionary is used


def map_style_loader(
    dataset: Dataset,
    sampler: Any,
    device: torch.device,
    augment: bool = False,
    *,
    collate_fn: Callable[[list], Any] | None = None,
    workers: Any = 0,
) -> Loader:
    """Return a loader of (inputs, targets) on the device, of any map-style Dataset.

    dataset: has __getitem__ and __len__; an item is (input, target), or a dictionary with one of TARGETS.
    sampler: of datasets/sampling.
    augment: not used, because the dataset transforms its items.
    collate_fn: gets a list of items and returns (inputs, targets), nested in any way (default: torch's
        default_collate).
    workers: processes; 0: this process loads. Or a RayWorkers (datasets/loaders/ray/engine.py).
    Raises BadInput, for example for an IterableDataset.

    The receipt covers ids, targets and the seed of each item, not the inputs. The `fingerprint` of the
    dataset (any text) identifies its data; if it has none, it is computed (datasets/data_fingerprint.py).
    """
    fetcher = Fetcher(dataset, collate_fn)
    if isinstance(workers, int):
        workers = Workers(workers, accelerator.has_streams(device))
    fetcher.look(workers)
    plan = Plan(Index(fetcher), sampler, draw_seeds)
    return Loader(MapStyle(workers, fetcher), plan, device, to_device=MoveToDevice(device))


class Seeds(NamedTuple):
    """The seeds of the generators for each item. seed: int64 [n], at least 0."""

    seed: np.ndarray


def draw_seeds(index: Any, ids: np.ndarray, seed: int, epoch: int) -> Seeds:
    """Return a seed for each sample, a function of (seed, epoch, sample id): a Plan's `augment`."""
    low, high, *_ = draw(seed, epoch, ids, Operation.ITEM)
    return Seeds((low | (high >> np.uint64(1)) << np.uint64(32)).astype(np.int64))


class Index:
    """The index of a Plan for any Dataset. All labels are 0, because they are known only after reading."""

    def __init__(self, fetcher: "Fetcher"):
        self.labels = np.broadcast_to(np.int64(0), len(fetcher.dataset))  # type: ignore[arg-type]
        self.fingerprint = fetcher.fingerprint
        self.class_names = class_names_of(fetcher.dataset)

    def __len__(self) -> int:
        return len(self.labels)


class Fetcher:
    """A reader that loads and collates the items of a batch, each item with its own seed.

    It can be pickled, and runs in any process. The arguments are those of map_style_loader(). Raises BadInput
    if the dataset has no __getitem__ or __len__.
    """

    def __init__(self, dataset: Dataset, collate_fn: Callable[[list], Any] | None = None):
        check_map_style(dataset)
        if not hasattr(dataset, "__getitem__"):
            raise BadInput(f"{type(dataset).__name__} has no __getitem__, as every map-style Dataset has")
        self.dataset, self.collate_fn = dataset, collate_fn
        self._table, self._rows = _table_of(dataset) if collate_fn is None else (None, None)
        self._draws = False  # whether an item has used a global generator

    @functools.cached_property
    def _held(self) -> list[generators.Generator]:
        """The generators that the dataset and collate_fn hold."""
        return generators.find_generators([self.dataset, self.collate_fn])

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of the samples and their targets."""
        return self._look()[0]

    def look(self, workers: Workers) -> None:
        """Compute the fingerprint, in a worker if there are some. Warn if an item differs when it is read
        again. Raises BadInput if workers would share a connection of the dataset."""
        if workers.forks:
            check_connections({"dataset": self.dataset, "collate_fn": self.collate_fn}, "")
        self.__dict__["fingerprint"], self._draws, changed = workers.call(self._look)
        if changed is not None and ranks.is_first():
            print_line(
                f"warning: sample {changed} of {self._name} differs when it is read twice with one seed: it "
                "depends on something that is not seeded, such as a counter, the time, os.urandom or a new "
                "numpy.random.default_rng(). A restart or another number of workers will not be exact. Draw "
                "from the global generators of torch, NumPy or random"
            )

    def _look(self, batch: Any = None, size: int = 0) -> tuple[str, bool, int | None]:
        """Return (fingerprint; whether an item draws random numbers; the first sample that differs when it is
        read again, or None). batch, size: not used."""
        read = lambda ids: self.items(ids, draw_seeds(None, ids, 0, 0).seed)  # noqa: E731
        with generators.restored():
            return fingerprint(self.dataset, read), self._draws, find_unstable(self.dataset, read)

    @property
    def _name(self) -> str:
        return type(self.dataset).__name__

    def __call__(self, batch: Batch, size: int = 0) -> tuple[np.ndarray, tuple[Any, Any]]:
        """Return (labels for the receipt, int64 [n]; (inputs, targets)) of a batch. size: not used."""
        ids, [seeds] = batch.ids, batch.crops
        if self._table:  # all rows in one call; they are not random
            rows = torch.from_numpy(ids if self._rows is None else self._rows[ids])
            inputs, targets = _pair(tuple(tensor[rows] for tensor in self._table.tensors))
            return hash_rows(targets), (inputs, targets)
        if not len(ids):
            return self._empty()
        return self.collate(self.items(ids, seeds), int(seeds[-1]))

    def collate(self, items: list, seed: int) -> tuple[np.ndarray, tuple[Any, Any]]:
        """Return collated items as a call does. seed: of the last item, for a random collate_fn."""
        if self.collate_fn:
            self._seed(seed)
        inputs, targets = _pair((self.collate_fn or default_collate)(items))
        if self.collate_fn is None and isinstance(targets, torch.Tensor):
            return hash_rows(targets), (inputs, targets)
        # not of the batch's rows, because it may be padded
        labels = [hash_value(pair[1] if (pair := _split(item)) else item) for item in items]
        return np.array(labels, np.int64), (inputs, targets)

    def items(self, ids: np.ndarray, seeds: np.ndarray) -> list:
        """Return the items of samples.

        Seeding costs 8 us per item, so it starts only after an item has used a generator. This is detected,
        and that batch is read again. The call changes the state of the global generators.
        """
        if not self._draws and not self._held:
            before = generators.snapshot()
            items = [self._read(id) for id in ids.tolist()]
            if generators.snapshot() == before:
                return items
            self._draws = True
        items = []
        for id, seed in zip(ids.tolist(), seeds.tolist(), strict=True):
            self._seed(seed)
            items.append(self._read(id))
        return items

    def _read(self, id: int) -> Any:
        try:
            return self.dataset[id]
        except (StopIteration, SystemExit) as error:  # the epoch, or the job, would end without an error
            raise RuntimeError(f"sample {id} of {type(self.dataset).__name__} raised {error!r}") from error

    def _seed(self, seed: int) -> None:
        generators.seed_all(seed)
        for place, each in enumerate(self._held, 1):
            each.seed((seed + place) % 2**63)

    def _empty(self) -> tuple[np.ndarray, tuple[Any, Any]]:
        """Return a batch without rows: a rank's part of a last batch may be empty."""
        labels, batch = self.collate(self.items(np.zeros(1, np.int64), np.zeros(1, np.int64)), 0)
        return labels[:0], tree_map_only(torch.Tensor, lambda tensor: tensor[:0], batch)

    def example(self, count: int) -> Any:
        """Return the inputs of the first `count` samples."""
        ids = np.arange(count) % len(self.dataset)  # type: ignore[arg-type]
        with generators.restored():
            return self(Batch(ids, ids, Seeds(ids)))[1][0]

    def __getstate__(self) -> dict:
        return {"dataset": self.dataset, "collate_fn": self.collate_fn}

    def __setstate__(self, state: dict) -> None:
        self.__init__(**state)  # type: ignore[misc]  # finds the generators of the copy


class MapStyle(WorkerEngine):
    """An engine for Loader, whose workers read items."""

    def __init__(self, workers: Any, fetcher: Fetcher):
        super().__init__(workers, fetcher)
        self.example = lambda count: workers.call(lambda *_: fetcher.example(count))
        self.collate_fn, self.items = fetcher.collate_fn, fetcher.items

    def run(self, plan: Plan) -> Any:
        """Yield each batch with its (inputs, targets). Its labels are digests of the targets."""
        for batch, (labels, data) in self._workers.load(plan, self._function):
            yield batch._replace(labels=labels), data


class MoveToDevice(Stage):
    """The last stage of a loader of any Dataset: it moves nested tensors to the device."""

    def begin(self, batch: Batch, data: tuple[Any, Any]) -> Copy:
        """Start moving (inputs, targets) to the device."""
        if self._stream is None:
            return Copy(self._move(data[0]), self._move(data[1]))
        with accelerator.of(self.device).stream(self._stream):
            inputs, targets = self._move(data[0]), self._move(data[1])
            ready = accelerator.new_event(self.device)
            ready.record()
        return Copy(inputs, targets, ready)

    def _move(self, data: Any) -> Any:
        move = lambda tensor: tensor.to(self.device, non_blocking=bool(self._stream))  # noqa: E731
        return tree_map_only(torch.Tensor, move, data)


def _table_of(dataset: Any) -> tuple[TensorDataset | None, np.ndarray | None]:
    """Return the TensorDataset of a dataset or its Subsets, and the rows (None: all); else (None, None)."""
    rows = None
    while type(dataset) is Subset:
        indices = np.asarray(dataset.indices, np.int64)
        dataset, rows = dataset.dataset, indices if rows is None else indices[rows]
    return (dataset, rows) if type(dataset) is TensorDataset else (None, None)


def _pair(batch: Any) -> tuple[Any, Any]:
    """Return (inputs, targets) of a collated batch. Raises BadInput."""
    if pair := _split(batch):
        return pair
    kind = type(batch).__name__
    if isinstance(batch, dict):
        kind = f"a dictionary of {', '.join(map(str, batch))}"
    elif hasattr(batch, "__len__"):
        kind = f"{kind} of {len(batch)}"
    raise BadInput(
        f"a batch of this dataset is {kind}: let an item be (input, target), or a dictionary with one of "
        f"{', '.join(TARGETS)}, or give map_style_loader a collate_fn that returns (inputs, targets)"
    )


def _split(value: Any) -> tuple[Any, Any] | None:
    """Return (inputs, targets) of an item or a batch; None if it has no separate target."""
    if isinstance(value, dict):
        key = next((key for key in TARGETS if key in value), None)
        if key is not None:
            return {name: each for name, each in value.items() if name != key}, value[key]
    elif isinstance(value, list | tuple) and len(value) == 2:
        return value[0], value[1]
    return None

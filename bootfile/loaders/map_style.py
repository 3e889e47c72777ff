"""Batches of any map-style torch Dataset, the same at any number of workers and ranks and after any restart.

For each item the generators of torch, NumPy, `random` and the dataset are seeded by (seed, epoch, sample id).
So random transforms do not depend on the worker or on other samples.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from bootfile.ground import accelerator
from bootfile.ground.data_sets import check_map_style, class_names_of
from bootfile.ground.errors import BadInput
from bootfile.ground.files import read_again
from bootfile.ground.mixing import mix, to_words
from bootfile.loaders.data_fingerprint import (
    find_unstable,
    fingerprint,
    hash_value,
    warn_of_unstable,
)
from bootfile.loaders.data_lists import list_of
from bootfile.loaders.loader import Index, Loader, pair_of, split
from bootfile.loaders.reading import reading
from bootfile.loaders.workers import WorkerEngine, Workers, check_connections, not_delivered
from bootfile.sampling import generators
from bootfile.sampling.philox import Operation, draw
from bootfile.sampling.plan import Batch, Plan

_COLLATED = 2  # items of which collate_fn makes a batch twice


def map_style_loader(
    dataset: Dataset[Any],
    sampler: Any,
    device: torch.device | str,
    augment: bool = False,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    workers: Any = 0,
) -> Loader:
    """Return a loader of (inputs, targets) on the device, of any map-style Dataset.

    dataset: has __getitem__ and __len__; an item is (input, target), or a dictionary with one of TARGETS.
    augment: not used, because the dataset transforms its items.
    collate_fn: gets a list of items and returns (inputs, targets), nested in any way (default: torch's
        default_collate).
    workers: processes; 0: this process loads. Or a RayWorkers (datasets/loaders/ray/engine.py).
    Raises BadInput, for example for an IterableDataset.

    The receipt covers ids, targets and the seed of each item, not the inputs. The `fingerprint` of the
    dataset (any text) identifies its data; if it has none, it is computed (data_fingerprint.py).
    """
    device = torch.device(device)
    fetcher = Fetcher(dataset, collate_fn)
    if isinstance(workers, int):
        workers = Workers(workers, accelerator.has_streams(device))
    # before an item is read; the tensors of a TensorDataset are in the fingerprint
    further = {} if type(dataset) is TensorDataset else list_of(dataset)
    # before the workers of the training start: what it finds is part of the plan
    fetcher.look(workers)
    size = len(dataset)  # type: ignore[arg-type]
    index = Index(size, fetcher.fingerprint, class_names_of(dataset), further)
    plan = Plan(index, sampler, draw_seeds)
    loader = Loader(MapStyle(workers, fetcher), plan, device)
    loader.has_stable_items = fetcher.is_stable
    return loader


class Seeds(NamedTuple):
    """The seeds of the generators for each item. seed: int64 [n], at least 0."""

    seed: np.ndarray


def draw_seeds(index: Any, ids: np.ndarray, seed: int, epoch: int) -> Seeds:
    """Return a seed for each sample, a function of (seed, epoch, sample id): a Plan's `augment`."""
    low, high, *_ = draw(seed, epoch, ids, Operation.ITEM)
    return Seeds((low | (high >> np.uint64(1)) << np.uint64(32)).astype(np.int64))


class Fetcher:
    """A reader that loads and collates the items of a batch, each item with its own seed. It can be pickled,
    and runs in any process. The arguments are those of map_style_loader(). Raises BadInput if the dataset has
    no __getitem__ or __len__."""

    def __init__(self, dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Any] | None = None):
        check_map_style(dataset)
        self.dataset = dataset
        self.collate_fn = collate_fn
        # the rows of a TensorDataset are taken in one call
        self._table, self._rows = _table_of(dataset) if collate_fn is None else (None, None)
        self.fingerprint = ""  # of the samples and their targets; look() computes it
        self.is_stable = True  # items are the same when they are read again
        self._draws = False  # whether an item has used a global generator

    @functools.cached_property
    def _held(self) -> list[generators.Generator]:
        """The generators that the dataset and collate_fn hold."""
        return generators.find_generators([self.dataset, self.collate_fn])

    def look(self, workers: Any) -> None:
        """Compute the fingerprint, in workers if there are some. Warn if an item differs when it is read
        again, or in another worker. Raises BadInput if workers would share a connection of the dataset."""
        if workers.forks:
            check_connections({"dataset": self.dataset, "collate_fn": self.collate_fn})
        # two workers, if there are some: an item may differ from process to process
        results = workers.call(self._look, min(2, workers.count))
        digest, self._draws, changed = results[0]
        self.fingerprint = digest
        if not changed and any(other_digest != digest for other_digest, _, _ in results[1:]):
            changed = f"a sample of {self._name} differs in two workers"
        self.is_stable = not changed
        if changed:
            warn_of_unstable(changed)

    def attributes(self) -> Any:
        """Return the plain attributes of the dataset and collate_fn, of which workers have a copy."""
        from bootfile.loaders.worker_copies import read_attributes  # a loop without workers has no copy

        return read_attributes(self.dataset, self.collate_fn)

    def _look(self, _: Any = None) -> tuple[str, bool, str]:
        """Return (fingerprint; whether an item draws random numbers; which sample differs when it is read
        again, or "")."""
        reads = itertools.count()

        def read(ids: np.ndarray) -> list[Any]:
            generators.seed_all(next(reads))  # an item may use torch.initial_seed(), and draw nothing
            return self.items(ids, draw_seeds(None, ids, 0, 0).seed)

        def read_again(id: np.ndarray) -> tuple[int, Any]:
            [item] = read(id)
            try:
                value = hash_value(item)
            except (TypeError, RuntimeError) as error:
                raise BadInput(
                    f"sample {id[0]} of {self._name} has no numbers ({error}): return ordinary tensors"
                ) from error
            # an item that draws must leave the generators in the same state each time
            state = generators.snapshot() if self._draws else None
            return value, state

        def collate_again(id: np.ndarray) -> int:
            ids = np.repeat(id, _COLLATED)
            _, batch = self.collate(read(ids), 0, ids)
            return hash_value(batch)

        # before the first step: the random numbers of the training must not depend on this look
        with generators.restored():
            changed = ""
            id = find_unstable(self.dataset, read_again)
            if id is not None:
                changed = f"sample {id} of {self._name} differs when it is read twice"
            elif self.collate_fn:
                with contextlib.suppress(Exception):  # the first batch will raise it
                    if find_unstable(self.dataset, collate_again) is not None:
                        changed = "collate_fn returns another batch for the same items and seed"
            digest = fingerprint(self.dataset, read)
            return digest, self._draws, changed

    @property
    def _name(self) -> str:
        return type(self.dataset).__name__

    def __call__(self, batch: Batch) -> tuple[np.ndarray, tuple[Any, Any]]:
        """Return (labels for the receipt, int64 [n]; (inputs, targets)) of a batch."""
        ids = batch.ids
        [seeds] = batch.crops
        if self._table:  # all rows in one call; they are not random
            rows = torch.from_numpy(ids if self._rows is None else self._rows[ids])  # a Subset has some
            inputs, targets = pair_of(tuple(tensor[rows] for tensor in self._table.tensors))
            return hash_rows(targets), (inputs, targets)
        return self.collate(self.items(ids, seeds), int(seeds[-1]), ids) if len(ids) else self._empty()

    def collate(self, items: list[Any], seed: int, ids: np.ndarray) -> tuple[np.ndarray, tuple[Any, Any]]:
        """Return collated items as a call does. seed: of the last item, for a random collate_fn. Raises
        BadInput if torch cannot make a batch of the items."""
        try:
            if self.collate_fn:
                generators.seed_with(seed, self._held)
                batch = self.collate_fn(items)
            elif _keys_differ(items):  # torch would drop keys that the first item does not have
                raise KeyError
            else:
                batch = default_collate(items)
        except Exception as error:
            # these have a line of their own already, or the node is at fault and not the items
            if isinstance(error, BadInput) or not_delivered(error):
                raise
            if self.collate_fn:
                raise RuntimeError(f"collate_fn raised {error!r} for samples {ids[:9].tolist()}") from error
            raise BadInput(self._explain_items(items, ids)) from error
        inputs, targets = pair_of(batch)
        if self.collate_fn is None and isinstance(targets, torch.Tensor):
            return hash_rows(targets), (inputs, targets)
        # not of the batch's rows, because it may be padded
        pairs = zip(map(split, items), items, strict=True)
        labels = [hash_value(pair[1] if pair else item) for pair, item in pairs]
        return np.array(labels, np.int64), (inputs, targets)

    def items(self, ids: np.ndarray, seeds: np.ndarray) -> list[Any]:
        """Return the items of samples. Seeding costs 8 us per item, so it starts only after an item has used
        a generator. This is detected, and that batch is read again. The call changes the state of the global
        generators."""
        if not self._draws and not self._held:
            # nothing was seeded: if the state is the same afterwards, no item has drawn
            before = generators.snapshot()
            items = [self._read_again(id) for id in ids.tolist()]
            if generators.snapshot() == before:
                return items
            # from here on this process seeds each item; the items of this batch are read again, seeded
            self._draws = True
        return [self._read_again(*each) for each in zip(ids.tolist(), seeds.tolist(), strict=True)]

    def _read_again(self, id: int, seed: int | None = None) -> Any:
        """Return _read(), which is called again if a file system does not answer."""
        name = f"sample {id} of {self._name}"
        return read_again(functools.partial(self._read, id, seed, name), name)

    def _read(self, id: int, seed: int | None, name: str) -> Any:
        """Return the item of a sample, for which all generators get the seed. name: of it, for an error."""
        if seed is not None:
            generators.seed_with(seed, self._held)
        try:
            with reading(name):
                return self.dataset[id]
        except BadInput:
            raise
        except (Exception, SystemExit) as error:  # StopIteration and SystemExit would end the job as if done
            from bootfile.ground.again import is_temporary, refusal  # no run loads it without an error

            line = f"{name} raised {error!r}"
            raise (refusal(line, error) if is_temporary(error) else RuntimeError(line)) from error

    def _empty(self) -> tuple[np.ndarray, tuple[Any, Any]]:
        """Return a batch without rows: a rank's part of a last batch may be empty."""
        # one item is read for its shape: the step has as many collectives on this rank as on the others
        first = np.zeros(1, np.int64)
        labels, batch = self.collate(self.items(first, first), 0, first)
        return labels[:0], tree_map_only(torch.Tensor, lambda tensor: tensor[:0], batch)

    def example(self, count: int) -> Any:
        """Return the inputs of the first `count` samples."""
        ids = np.arange(count) % len(self.dataset)  # type: ignore[arg-type]
        with generators.restored():
            _, (inputs, _) = self(Batch(ids, ids, Seeds(ids)))
        return inputs

    def _explain_items(self, items: list[Any], ids: np.ndarray) -> str:
        """Return why torch cannot make a batch of the items: the type of the first sample that differs from
        most others, and of these."""
        kinds = [_describe(item) for item in items]
        usual = max(kinds, key=kinds.count)
        place = next((place for place, kind in enumerate(kinds) if kind != usual), 0)
        others = "" if kinds[place] == usual else f", and sample {ids[kinds.index(usual)]} is {usual}"
        item = f"sample {ids[place]} of {self._name} is {kinds[place]}{others}"
        return (
            f"{item}: torch cannot make a batch of them: return "
            "dense tensors of one shape and type, without gradients (images: ToTensor), or numbers; or give "
            "map_style_loader a collate_fn"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "collate_fn": self.collate_fn}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # finds the generators of the copy


class MapStyle(WorkerEngine):
    """An engine for Loader, whose workers read items."""

    def __init__(self, workers: Any, fetcher: Fetcher):
        super().__init__(workers, fetcher)
        self._fetcher = fetcher
        self.data_set = fetcher.dataset
        self.collate_fn = fetcher.collate_fn

    def example(self, count: int) -> Any:
        """Return the inputs of the first `count` samples, which a worker reads."""
        return self._workers.call(lambda _: self._fetcher.example(count))[0]

    def run(self, plan: Plan) -> Any:
        """Yield each batch with its (inputs, targets). Its labels are digests of the targets."""
        for batch, (labels, data) in self._workers.load(plan, self._function):
            yield batch._replace(labels=labels), data


def _table_of(dataset: Any) -> tuple[TensorDataset | None, np.ndarray | None]:
    """Return the TensorDataset of a dataset or its Subsets, and the rows (None: all); else (None, None)."""
    rows = None
    # exact types: a class that inherits one may change the items, which are then read one by one
    while type(dataset) is Subset:
        indices = np.asarray(dataset.indices, np.int64)
        rows = indices if rows is None else indices[rows]  # those of a Subset are places in the inner one
        dataset = dataset.dataset
    return (dataset, rows) if type(dataset) is TensorDataset else (None, None)


def _keys_differ(items: list[Any]) -> bool:
    """Return whether items, or their inputs, are dictionaries with other keys than the first."""
    inputs = [item[0] if isinstance(item, list | tuple) and item else item for item in items]
    keys = [value.keys() if isinstance(value, dict) else None for value in inputs]
    return keys[0] is not None and any(other != keys[0] for other in keys)


def _describe(value: Any) -> str:
    """Return the types and shapes of an item as text."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_describe(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list | tuple):
        rest = ["..."] if len(value) > 8 else []
        return f"({', '.join([*map(_describe, value[:8]), *rest])})"
    return type(value).__name__


def hash_rows(values: Any) -> np.ndarray:
    """Return an int64 for each row: the number of an integer label, or a hash of the bytes, for a tensor not
    that of hash_value(). values: a tensor [n, ...] on any device, or a list."""
    if isinstance(values, torch.Tensor) and values.dtype != torch.bfloat16 and len(values):
        # one call for all rows: a loop over them would take longer than reading the batch
        rows = values.detach().cpu().numpy()
        if rows.ndim == 1 and rows.dtype.kind in "iub":
            return rows.astype(np.int64)
        return _hash_words(np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8))
    return np.array([hash_value(value) for value in values], np.int64)


def _hash_words(rows: np.ndarray) -> np.ndarray:
    """Return a 63-bit hash of each row of uint8 [n, m]. Each word is mixed with its position (SplitMix64)."""
    words = to_words(rows)
    mixed = mix(words + np.arange(words.shape[1], dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    hashes: np.ndarray = (mixed.sum(axis=1) >> np.uint64(1)).astype(np.int64)
    return hashes

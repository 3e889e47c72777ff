"""Batches of any map-style torch Dataset, the same at any number of workers and ranks and after any restart.

For each item the generators of torch, NumPy, `random` and the dataset are seeded by (seed, epoch, sample id).
So random transforms do not depend on the worker or on other samples.
"""

import contextlib
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from bootfile.ground import accelerator
from bootfile.ground.data_sets import check_map_style, class_names_of
from bootfile.ground.errors import BadInput, print_line
from bootfile.loaders.data_fingerprint import find_unstable, fingerprint, hash_rows, hash_value
from bootfile.loaders.loader import Loader
from bootfile.loaders.pairs import Index, pair_of, split
from bootfile.loaders.reading import reading
from bootfile.loaders.workers import WorkerEngine, Workers, check_connections, not_delivered
from bootfile.processes import ranks
from bootfile.sampling import generators
from bootfile.sampling.philox import Operation, draw
from bootfile.sampling.plan import Batch, Plan

# a part of the description of an item -> what to do in __getitem__
_HINTS = {
    "PIL image": "make a tensor of the image (torchvision.transforms.ToTensor)",
    "None": "return another sample, or leave it out of the data set",
    "requires grad": "return tensor.detach()",
    "sparse": "return tensor.to_dense()",
}
_COLLATED = 2  # items of which collate_fn makes a batch twice


def map_style_loader(
    dataset: Dataset[Any],
    sampler: Any,
    device: torch.device,
    augment: bool = False,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
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
    dataset (any text) identifies its data; if it has none, it is computed (data_fingerprint.py).
    """
    fetcher = Fetcher(dataset, collate_fn)
    if isinstance(workers, int):
        workers = Workers(workers, accelerator.has_streams(device))
    fetcher.look(workers)
    index = Index(len(dataset), fetcher.fingerprint, class_names_of(dataset))  # type: ignore[arg-type]
    plan = Plan(index, sampler, draw_seeds)
    return Loader(MapStyle(workers, fetcher), plan, device)


class Seeds(NamedTuple):
    """The seeds of the generators for each item. seed: int64 [n], at least 0."""

    seed: np.ndarray


def draw_seeds(index: Any, ids: np.ndarray, seed: int, epoch: int) -> Seeds:
    """Return a seed for each sample, a function of (seed, epoch, sample id): a Plan's `augment`."""
    low, high, *_ = draw(seed, epoch, ids, Operation.ITEM)
    return Seeds((low | (high >> np.uint64(1)) << np.uint64(32)).astype(np.int64))


class Fetcher:
    """A reader that loads and collates the items of a batch, each item with its own seed.

    It can be pickled, and runs in any process. The arguments are those of map_style_loader(). Raises BadInput
    if the dataset has no __getitem__ or __len__.
    """

    def __init__(self, dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Any] | None = None):
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

    def look(self, workers: Any) -> None:
        """Compute the fingerprint, in workers if there are some. Warn if an item differs when it is read
        again, or in another worker. Raises BadInput if workers would share a connection of the dataset."""
        if workers.forks:
            check_connections({"dataset": self.dataset, "collate_fn": self.collate_fn}, "")
        [first, *others] = workers.call(self._look, min(2, workers.count))
        self.__dict__["fingerprint"], self._draws, changed = first
        if any(other[0] != first[0] for other in others):
            changed = changed or f"a sample of {self._name} differs in two workers"
        if changed and ranks.is_first():
            print_line(
                f"warning: {changed}: it depends on something that is not seeded, such as a counter, the "
                "time, os.urandom, a new numpy.random.default_rng(), the worker, or random numbers that are "
                "kept. A restart or another number of workers will not be exact. Draw from the global "
                "generators of torch, NumPy or random"
            )

    def _look(self, _: Any = None) -> tuple[str, bool, str]:
        """Return (fingerprint; whether an item draws random numbers; which sample differs when it is read
        again, or "")."""
        begun = itertools.count()

        def read(ids: np.ndarray) -> list[Any]:
            generators.seed_all(next(begun))  # an item may use torch.initial_seed(), and draw nothing
            return self.items(ids, draw_seeds(None, ids, 0, 0).seed)

        def read_again(id: np.ndarray) -> tuple[int, Any]:
            [item] = read(id)
            try:
                value = hash_value(item)
            except (TypeError, RuntimeError) as error:
                raise BadInput(
                    f"sample {id[0]} of {self._name} has no numbers ({error}): return ordinary tensors"
                ) from error
            return value, generators.snapshot() if self._draws else None  # equal, if it draws each time

        def collate_again(id: np.ndarray) -> int:
            ids = np.repeat(id, _COLLATED)
            return hash_value(self.collate(read(ids), 0, ids)[1])

        with generators.restored():
            id = find_unstable(self.dataset, read_again)
            changed = "" if id is None else f"sample {id} of {self._name} differs when it is read twice"
            with contextlib.suppress(Exception):  # the first batch will raise it
                if self.collate_fn and not changed and find_unstable(self.dataset, collate_again) is not None:
                    changed = "collate_fn returns another batch for the same items and seed"
            return fingerprint(self.dataset, read), self._draws, changed

    @property
    def _name(self) -> str:
        return type(self.dataset).__name__

    def __call__(self, batch: Batch) -> tuple[np.ndarray, tuple[Any, Any]]:
        """Return (labels for the receipt, int64 [n]; (inputs, targets)) of a batch."""
        ids, [seeds] = batch.ids, batch.crops
        if self._table:  # all rows in one call; they are not random
            rows = torch.from_numpy(ids if self._rows is None else self._rows[ids])
            inputs, targets = pair_of(tuple(tensor[rows] for tensor in self._table.tensors))
            return hash_rows(targets), (inputs, targets)
        if not len(ids):
            return self._empty()
        return self.collate(self.items(ids, seeds), int(seeds[-1]), ids)

    def collate(self, items: list[Any], seed: int, ids: np.ndarray) -> tuple[np.ndarray, tuple[Any, Any]]:
        """Return collated items as a call does. seed: of the last item, for a random collate_fn. Raises
        BadInput if torch cannot make a batch of the items."""
        try:
            if self.collate_fn:
                self._seed(seed)
            elif _keys_differ(items):  # torch would drop keys that the first item does not have
                raise KeyError
            batch = (self.collate_fn or default_collate)(items)
        except Exception as error:
            if isinstance(error, BadInput) or not_delivered(error):
                raise
            if self.collate_fn:
                raise RuntimeError(f"collate_fn raised {error!r} for samples {ids[:9].tolist()}") from error
            raise BadInput(self._misfit(items, ids)) from error
        inputs, targets = pair_of(batch)
        if self.collate_fn is None and isinstance(targets, torch.Tensor):
            return hash_rows(targets), (inputs, targets)
        # not of the batch's rows, because it may be padded
        labels = [hash_value(pair[1] if (pair := split(item)) else item) for item in items]
        return np.array(labels, np.int64), (inputs, targets)

    def items(self, ids: np.ndarray, seeds: np.ndarray) -> list[Any]:
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
            with reading(f"sample {id} of {self._name}"):
                return self.dataset[id]
        except BadInput:
            raise
        except (Exception, SystemExit) as error:  # StopIteration and SystemExit would end the job as if done
            raise RuntimeError(f"sample {id} of {self._name} raised {error!r}") from error

    def _seed(self, seed: int) -> None:
        generators.seed_all(seed)
        for place, each in enumerate(self._held, 1):
            each.seed((seed + place) % 2**63)

    def _empty(self) -> tuple[np.ndarray, tuple[Any, Any]]:
        """Return a batch without rows: a rank's part of a last batch may be empty."""
        first = np.zeros(1, np.int64)
        labels, batch = self.collate(self.items(first, first), 0, first)
        return labels[:0], tree_map_only(torch.Tensor, lambda tensor: tensor[:0], batch)

    def example(self, count: int) -> Any:
        """Return the inputs of the first `count` samples."""
        ids = np.arange(count) % len(self.dataset)  # type: ignore[arg-type]
        with generators.restored():
            return self(Batch(ids, ids, Seeds(ids)))[1][0]

    def _misfit(self, items: list[Any], ids: np.ndarray) -> str:
        """Return why torch makes no batch of the items, and what to do."""
        text = self._odd(items, ids)
        hint = "return tensors, arrays of numbers, or numbers"
        if " and sample " in text:
            hint = "return tensors of one shape and type (resize, crop, pad)"
        hint = next((hint for word, hint in _HINTS.items() if word in text), hint)
        return f"{text}: torch cannot make a batch of them: {hint}, or give map_style_loader a collate_fn"

    def _odd(self, items: list[Any], ids: np.ndarray) -> str:
        """Return what the sample is that differs from most others, or the first one."""
        kinds = [_describe(item) for item in items]
        usual = max(kinds, key=kinds.count)
        place = next((place for place, kind in enumerate(kinds) if kind != usual), 0)
        text = f"sample {ids[place]} of {self._name} is {kinds[place]}"
        if kinds[place] != usual:
            text += f", and sample {ids[kinds.index(usual)]} is {usual}"
        return text

    def explain(self, error: str, batch: Batch) -> str:
        """Return one line for an error of the model or the loss that is due to the type or the target of a
        sample of the batch; else ""."""
        if match := re.search(r"Target (-?\d+) is out of bounds", error):
            ids = batch.ids[batch.labels == int(match[1])]
            return (
                f"sample {ids[0]} of {self._name} has the target {match[1]}, for which the model has no "
                "output: expected 0 to its number of outputs - 1"
            )
        [seeds] = batch.crops
        items = self.items(batch.ids, seeds)
        inputs, targets = self.collate(items, int(seeds[-1]), batch.ids)[1]
        if not _names_type(error, inputs, [torch.float32]) and not _names_type(
            error, targets, [torch.float32, torch.int64]
        ):
            return ""
        return (
            f"{error}: {self._odd(items, batch.ids)}; the batch is inputs {_describe(inputs)}, targets "
            f"{_describe(targets)}: convert it in __getitem__. Models take inputs of their own type, mostly "
            "float32; losses take targets int64 or float32"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "collate_fn": self.collate_fn}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # finds the generators of the copy


class MapStyle(WorkerEngine):
    """An engine for Loader, whose workers read items."""

    def __init__(self, workers: Any, fetcher: Fetcher):
        super().__init__(workers, fetcher)
        self.example = lambda count: workers.call(lambda *_: fetcher.example(count))[0]
        self.collate_fn, self.explain = fetcher.collate_fn, fetcher.explain

    def run(self, plan: Plan) -> Any:
        """Yield each batch with its (inputs, targets). Its labels are digests of the targets."""
        for batch, (labels, data) in self._workers.load(plan, self._function):
            yield batch._replace(labels=labels), data


def _table_of(dataset: Any) -> tuple[TensorDataset | None, np.ndarray | None]:
    """Return the TensorDataset of a dataset or its Subsets, and the rows (None: all); else (None, None)."""
    rows = None
    while type(dataset) is Subset:
        indices = np.asarray(dataset.indices, np.int64)
        dataset, rows = dataset.dataset, indices if rows is None else indices[rows]
    return (dataset, rows) if type(dataset) is TensorDataset else (None, None)


def _keys_differ(items: list[Any]) -> bool:
    """Return whether items, or their inputs, are dictionaries with other keys than the first."""
    items = [item[0] if isinstance(item, list | tuple) and item else item for item in items]
    return isinstance(items[0], dict) and any(
        not isinstance(item, dict) or item.keys() != items[0].keys() for item in items
    )


def _names_type(error: str, data: Any, usual: list[torch.dtype]) -> bool:
    """Return whether an error of torch is about a type in nested data that is not usual."""
    for value in tree_flatten(data)[0]:
        if not isinstance(value, torch.Tensor):
            if "must be Tensor" in error:
                return True
        elif value.dtype not in usual:  # torch writes "float64", "double" or "Double"
            names = str(value.dtype).split(".")[-1], value.type().split(".")[-1].removesuffix("Tensor")
            if any(re.search(rf"\b{name}\b", error, re.IGNORECASE) for name in names):
                return True
    return False


def _describe(value: Any) -> str:
    """Return the types and shapes of an item or a batch as text."""
    if isinstance(value, torch.Tensor | np.ndarray):
        more = ", requires grad" if getattr(value, "requires_grad", False) else ""
        if getattr(value, "layout", torch.strided) != torch.strided:
            more = f" {str(value.layout).removeprefix('torch.')}"  # type: ignore[union-attr]
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{more}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_describe(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        more = ", ..." * (len(value) > 8)
        return f"({', '.join(map(_describe, value[:8]))}{more})"
    if type(value).__module__.startswith("PIL."):
        return f"PIL image {value.mode} {value.size}"
    return "None" if value is None else type(value).__name__

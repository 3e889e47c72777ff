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
from bootfile.ground.files import read_again
from bootfile.loaders.data_fingerprint import find_unstable, fingerprint, hash_rows, hash_value
from bootfile.loaders.loader import Loader
from bootfile.loaders.pairs import Index, list_of, pair_of, split
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
    "], requires grad": "return tensor.detach()",
    "] sparse": "return tensor.to_dense()",
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
    further = list_of(dataset)  # before an item is read
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
    """A reader that loads and collates the items of a batch, each item with its own seed.

    It can be pickled, and runs in any process. The arguments are those of map_style_loader(). Raises BadInput
    if the dataset has no __getitem__ or __len__.
    """

    def __init__(self, dataset: Dataset[Any], collate_fn: Callable[[list[Any]], Any] | None = None):
        check_map_style(dataset)
        if not hasattr(dataset, "__getitem__"):
            raise BadInput(f"{type(dataset).__name__} has no __getitem__, as every map-style Dataset has")
        self.dataset = dataset
        self.collate_fn = collate_fn
        # the rows of a TensorDataset are taken in one call
        self._table: TensorDataset | None = None
        self._rows: np.ndarray | None = None
        if collate_fn is None:
            self._table, self._rows = _table_of(dataset)
        self.is_stable = True  # items are the same when they are read again
        self._draws = False  # whether an item has used a global generator

    @functools.cached_property
    def _held(self) -> list[generators.Generator]:
        """The generators that the dataset and collate_fn hold."""
        return generators.find_generators([self.dataset, self.collate_fn])

    @functools.cached_property
    def fingerprint(self) -> str:
        """A digest of the samples and their targets."""
        digest, _, _ = self._look()
        return digest

    def look(self, workers: Any) -> None:
        """Compute the fingerprint, in workers if there are some. Warn if an item differs when it is read
        again, or in another worker. Raises BadInput if workers would share a connection of the dataset."""
        if workers.forks:
            check_connections({"dataset": self.dataset, "collate_fn": self.collate_fn}, "")
        # two workers, if there are some: an item may differ from process to process
        results = workers.call(self._look, min(2, workers.count))
        digest, self._draws, changed = results[0]
        self.__dict__["fingerprint"] = digest  # the cached_property
        if not changed and any(other_digest != digest for other_digest, _, _ in results[1:]):
            changed = f"a sample of {self._name} differs in two workers"
        self.is_stable = not changed
        if changed and ranks.is_first():
            print_line(
                f"warning: {changed}: it depends on something that is not seeded, such as a counter, the "
                "time, os.urandom, a new numpy.random.default_rng(), the worker, or random numbers that are "
                "kept. A restart or another number of workers will not be exact. Draw from the global "
                "generators of torch, NumPy or random"
            )

    def attributes(self) -> Any:
        """Return the plain attributes of the dataset and collate_fn, of which workers have a copy."""
        from bootfile.loaders.attributes import read_attributes  # a loop without workers has no copy

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
            if self._rows is not None:  # a Subset has them
                ids = self._rows[ids]
            rows = torch.from_numpy(ids)
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
        labels = []
        for item in items:
            target = item
            pair = split(item)
            if pair is not None:
                target = pair[1]
            labels.append(hash_value(target))
        return np.array(labels, np.int64), (inputs, targets)

    def items(self, ids: np.ndarray, seeds: np.ndarray) -> list[Any]:
        """Return the items of samples.

        Seeding costs 8 us per item, so it starts only after an item has used a generator. This is detected,
        and that batch is read again. The call changes the state of the global generators.
        """
        if not self._draws and not self._held:
            # nothing was seeded: if the state is the same afterwards, no item has drawn
            before = generators.snapshot()
            items = [self._read_again(id) for id in ids.tolist()]
            if generators.snapshot() == before:
                return items
            # from here on this process seeds each item; the items of this batch are read again, seeded
            self._draws = True
        items = []
        for id, seed in zip(ids.tolist(), seeds.tolist(), strict=True):
            items.append(self._read_again(id, seed))
        return items

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
            if is_temporary(error):
                raise refusal(line, error) from error
            raise RuntimeError(line) from error

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
        """Return why torch cannot make a batch of the items, and what to do: "sample 3 of Photos is uint8
        [3, 4, 5], and sample 0 is uint8 [3, 8, 8]: ..."."""
        text = self._describe_items(items, ids)
        hint = "return tensors, arrays of numbers, or numbers"
        if " and sample " in text:  # the items are not all of the same kind
            hint = "return tensors of one shape and type (resize, crop, pad)"
        for part, hint_for_part in _HINTS.items():
            if part in text:
                hint = hint_for_part
                break
        return f"{text}: torch cannot make a batch of them: {hint}, or give map_style_loader a collate_fn"

    def _describe_items(self, items: list[Any], ids: np.ndarray) -> str:
        """Return the types of the first sample that differs from most others, and of those; if all samples
        are of one kind, those of the first."""
        kinds = [_describe(item) for item in items]
        usual = max(kinds, key=kinds.count)
        for id, kind in zip(ids, kinds, strict=True):
            if kind != usual:
                usual_id = ids[kinds.index(usual)]
                return f"sample {id} of {self._name} is {kind}, and sample {usual_id} is {usual}"
        return f"sample {ids[0]} of {self._name} is {usual}"

    def explain(self, error: str, batch: Batch) -> str:
        """Return one line for an error of the model or the loss that is due to the type or the target of a
        sample of the batch; else ""."""
        match = re.search(r"Target (-?\d+) is out of bounds", error)
        if match:
            target = int(match[1])
            [seeds] = batch.crops
            pairs = zip(batch.ids, map(split, self.items(batch.ids, seeds)), strict=True)
            ids = [number for number, pair in pairs if pair and np.any(np.asarray(pair[1]) == target)]
            if not ids:
                return ""
            return (
                f"sample {ids[0]} of {self._name} has the target {match[1]}, for which the model has no "
                "output: expected 0 to its number of outputs - 1"
            )
        # only after an error: the batch is read a second time, to describe its items
        [seeds] = batch.crops
        items = self.items(batch.ids, seeds)
        _, (inputs, targets) = self.collate(items, int(seeds[-1]), batch.ids)
        is_about_inputs = _names_type(error, inputs, [torch.float32])
        is_about_targets = _names_type(error, targets, [torch.float32, torch.int64])
        if not is_about_inputs and not is_about_targets:
            return ""
        text = self._describe_items(items, batch.ids)
        return (
            f"{error}: {text}; the batch is inputs {_describe(inputs)}, targets {_describe(targets)}: "
            "convert it in __getitem__. Models take inputs of their own type, mostly float32; losses take "
            "targets int64 or float32"
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
        self.explain = fetcher.explain

    def example(self, count: int) -> Any:
        """Return the inputs of the first `count` samples, which a worker reads."""

        def read(_: Any) -> Any:
            return self._fetcher.example(count)

        return self._workers.call(read)[0]

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
        if rows is not None:  # a Subset of a Subset: its rows are places in the inner one
            indices = indices[rows]
        rows = indices
        dataset = dataset.dataset
    return (dataset, rows) if type(dataset) is TensorDataset else (None, None)


def _keys_differ(items: list[Any]) -> bool:
    """Return whether items, or their inputs, are dictionaries with other keys than the first."""
    inputs = []
    for item in items:
        if isinstance(item, list | tuple) and item:
            inputs.append(item[0])
        else:
            inputs.append(item)
    first = inputs[0]
    if not isinstance(first, dict):
        return False
    return any(not isinstance(value, dict) or value.keys() != first.keys() for value in inputs)


def _names_type(error: str, data: Any, usual: list[torch.dtype]) -> bool:
    """Return whether an error of torch is about a type in nested data that is not usual."""
    for value in tree_flatten(data)[0]:
        if not isinstance(value, torch.Tensor):
            if "must be Tensor" in error:
                return True
        elif value.dtype not in usual:  # torch writes "float64", "double" or "Double"
            # the spelling differs from one error of torch to another
            name = str(value.dtype).split(".")[-1]
            old_name = value.type().split(".")[-1].removesuffix("Tensor")
            if any(re.search(rf"\b{name}\b", error, re.IGNORECASE) for name in (name, old_name)):
                return True
    return False


def _describe(value: Any) -> str:
    """Return the types and shapes of an item or a batch as text."""
    if isinstance(value, torch.Tensor | np.ndarray):
        more = ""
        if getattr(value, "layout", torch.strided) != torch.strided:  # sparse
            more = f" {str(value.layout).removeprefix('torch.')}"  # type: ignore[union-attr]
        elif getattr(value, "requires_grad", False):
            more = ", requires grad"
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{more}"
    if isinstance(value, dict):
        parts = [f"{key}: {_describe(part)}" for key, part in value.items()]
        return "{" + ", ".join(parts) + "}"
    if isinstance(value, list | tuple):
        parts = [_describe(part) for part in value[:8]]
        if len(value) > 8:
            parts.append("...")
        return f"({', '.join(parts)})"
    if type(value).__module__.startswith("PIL."):
        return f"PIL image {value.mode} {value.size}"
    if value is None:
        return "None"
    return type(value).__name__

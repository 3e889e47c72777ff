"""Record the samples that a training loop gets, in any PyTorch program.

`python -m launch new --receipt FOLDER` writes it as one file, receipt.py, which needs only torch and NumPy.

    receipt = Receipt("OUT", seed=0, rank=rank, world_size=world_size)    # before batches move to a GPU
    for step, batch in enumerate(receipt.watch(loader), start=first_step):
        ...

    python receipt.py RUN            one run: is something unusual, and where did each restart continue?
    python receipt.py RUN_A RUN_B    two runs: did the same steps get the same samples?

Unusual: epochs with the same order, samples that come twice or never in an epoch, equal samples of ranks. If
that is right, say so: --repeats (sampling with replacement, a repeated stream, copies on ranks), --same_order
(a stream in its order, a curriculum). With --augmented, samples may not look the same in two epochs.

Each process appends to its own files, and nothing is sent between processes:
    OUT/receipt-RANK.bin    32 bytes for each start of the program and for each step
    OUT/samples-RANK.bin    8 bytes for each sample: its hash

The record of a step has sums of hashes modulo 2^64. So the order inside a step and its division among the
processes do not matter. A sample is known by its id if the loop gives ids, and by its content: shapes, types
and at most 4 KB of each tensor, in lines of 64 bytes at equal distances. Hash of a word: the finalizer of
SplitMix64 (Steele et al., OOPSLA 2014). Sum of words: Lemire, Kaser, "Strongly Universal String Hashing".
"""

import argparse
import contextlib
import hashlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from bootfile.ground.mixing import mix
from bootfile.receipt.loop_records import FILE, SAMPLES, ReceiptError, report
from bootfile.receipt.one_run import add_arguments
from bootfile.receipt.records import RECORD, parse_records

_LINES, _LINE = 64, 64  # parts of a tensor that are hashed, and their size in bytes


class Receipt:
    """The record of what one process of a run reads.

    folder: that of all processes and restarts of the run; it is created.
    seed: of the data, if there is one. Runs with different seeds are not compared.
    rank, world_size: of this process.
    ids: the key of the samples' ids in a batch that is a dictionary, or a function that takes a batch and
        returns the ids (integers or strings, one for each sample). None: samples are known by their contents.
    first_step: steps that were completed before this start, if known. A checkpoint can have the state_dict.
    `step`: batches since the start of training, if first_step was given.
    """

    def __init__(
        self,
        folder: str,
        seed: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        ids: str | Callable[[Any], Any] | None = None,
        first_step: int | None = None,
    ):
        if not 0 <= rank < world_size:
            raise ReceiptError(f"rank {rank} is not in 0..{world_size - 1}")
        os.makedirs(folder, exist_ok=True)
        self._find_ids = (lambda batch: batch[ids]) if isinstance(ids, str) else ids
        self._paths = [os.path.join(folder, name.format(rank)) for name in (FILE, SAMPLES)]
        self._files: list[Any] = []
        self._seed, self._world_size = seed, world_size
        self._first, self.step, self._epoch = first_step, first_step or 0, 0

    def watch(self, loader: Iterable) -> Iterator:
        """Yield the batches of an epoch, and record each one before it is used."""
        self._epoch += 1
        for batch in loader:
            self.add(batch, self._epoch)
            yield batch

    def add(self, batch: Any, epoch: int = 1) -> None:
        """Record a batch. For a program whose loop is out of reach, for example in a callback.

        epoch: its number, ascending. Raises ReceiptError if the batch cannot be hashed.
        """
        samples = hash_batch(batch) if self._find_ids is None else hash_ids(self._find_ids(batch))
        contents = samples
        if self._find_ids is not None:
            with contextlib.suppress(ReceiptError):  # ids are enough
                contents = hash_batch(batch)
        receipt, hashes = self._files or self._open()
        self.step += 1
        hashes.write(samples.tobytes())
        sums = samples.sum(), len(samples), contents.sum()
        receipt.write(np.array([(epoch, self.step - (self._first or 0), sums)], RECORD).tobytes())

    def _open(self) -> list[Any]:
        """Open the files after their last whole record, and append the record of this start."""
        # before they are opened: s3fs has no name for a new file that is open
        records = np.zeros(0, RECORD)
        with contextlib.suppress(FileNotFoundError), open(self._paths[0], "rb") as file:
            records, _ = parse_records(file.read())
        receipt, hashes = self._files = [open(path, "ab", 0) for path in self._paths]  # noqa: SIM115
        receipt.truncate(records.nbytes)
        hashes.truncate(8 * int(records["sums"][records["step"] > 0, 1].sum()))
        sums = self._world_size, 0 if self._seed is None else self._seed + 1, time.time_ns()
        first = 0 if self._first is None else self._first + 1
        receipt.write(np.array([(first, 0, sums)], RECORD).tobytes())
        return self._files

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set first_step. Raises ReceiptError after the first batch of this start."""
        if self._files:
            raise ReceiptError(f"step {state['step']} is set after the first batch")
        self._first = self.step = int(state["step"])


def hash_ids(ids: Any) -> np.ndarray:
    """Return a hash of each id, uint64 [n]. ids: integers (tensor, array or list) or strings."""
    array = np.asarray(ids.cpu() if isinstance(ids, torch.Tensor) else ids)
    if array.dtype.kind in "iu":
        return mix(array.reshape(-1).astype(np.uint64))
    return np.array([_hash_text(each) for each in ids], np.uint64)


def hash_batch(batch: Any) -> np.ndarray:
    """Return a hash of the content of each sample, uint64 [n].

    batch: tensors, arrays, numbers and strings in nested dictionaries, lists and tuples. The number of
    samples is the first dimension, or the length, that most parts have. Other parts count for each sample.
    Raises ReceiptError if a part is of another type.
    """
    count = next(iter(_sizes(batch)), 1)
    return np.broadcast_to(_hash(batch, count), count).copy()


def _sizes(value: Any) -> list[int]:
    """Return the possible numbers of samples in a part of a batch, the most likely one first."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return [len(value)] if value.ndim else []
    if not isinstance(value, Mapping | list | tuple):
        return []
    own = [] if isinstance(value, Mapping) or hasattr(value, "_fields") else [len(value)]
    parts = list(value.values()) if isinstance(value, Mapping) else list(value)
    if isinstance(value, list) and all(isinstance(each, str | Mapping | tuple) for each in parts):
        return own  # a list of samples
    sizes = Counter(size for each in parts for size in _sizes(each))
    return [*[size for size, times in sizes.items() if times == max(sizes.values())], *own]


def _hash(value: Any, count: int) -> np.ndarray:
    """Return the hashes of `count` samples (-1: the value is one), or one hash [1] that is of all samples."""
    if hasattr(value, "__array_interface__"):  # NumPy's arrays and numbers, images of PIL
        value = torch.from_numpy(np.array(value))
    if isinstance(value, torch.Tensor):
        return _hash_rows(value if value.ndim and len(value) == count else value[None])
    if isinstance(value, Mapping):
        parts = [part for key in sorted(value, key=repr) for part in (key, value[key])]
    elif isinstance(value, list | tuple):
        parts = list(value)
        if len(parts) == count and not any(count in _sizes(part) for part in parts):
            return np.concatenate([_hash(part, -1) for part in parts])
    elif isinstance(value, str | bytes | int | float | complex | None):
        return np.array([_hash_text(value)], np.uint64)
    else:
        raise ReceiptError(f"a batch holds a {type(value).__name__}, which cannot be hashed: give ids")
    hashes = mix(np.array([len(parts)], np.uint64))
    for part in parts:
        hashes = mix(hashes ^ _hash(part, count))
    return hashes


def _hash_rows(rows: torch.Tensor) -> np.ndarray:
    """Return a hash of each row of a tensor [n, ...], uint64 [n]."""
    rows = rows.detach()
    starts, length = _lines(rows[:1].numel(), rows.element_size())
    if rows.is_contiguous() or rows.ndim == 1:
        flat = rows.reshape(len(rows), rows[:1].numel())
        chosen = torch.cat([flat[:, start : start + length] for start in starts], 1)
    else:  # elements in the order of the indices too, without a copy of the whole tensor
        places = np.add.outer(starts, np.arange(length)).reshape(-1)
        offsets = np.dot(rows.stride()[1:], np.unravel_index(places, tuple(rows.shape[1:])))
        flat = rows.as_strided((len(rows), int(offsets.max()) + 1), (rows.stride(0), 1))
        chosen = flat.index_select(1, torch.from_numpy(offsets).to(rows.device))
    content = chosen.contiguous().view(torch.uint8).cpu().numpy()
    values = np.pad(content, ((0, 0), (0, -content.shape[1] % 8))).view(np.uint64)
    keys = mix(np.arange(values.shape[1], dtype=np.uint64)) | np.uint64(1)
    kind = _hash_text(f"{rows.dtype} {list(rows.shape[1:])}")
    return mix(np.einsum("ij,j->i", values, keys) ^ np.uint64(kind))


def _lines(count: int, size: int) -> tuple[list[int], int]:
    """Return the first elements of the lines that are hashed, and their length. size: bytes of an element."""
    length = _LINE // size
    if count <= _LINES * length:
        return [0], count
    return np.linspace(0, count - length, _LINES).astype(np.int64).tolist(), length


def _hash_text(value: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("folders", nargs="*", metavar="RUN")
    add_arguments(parser.add_argument)
    arguments = vars(parser.parse_args())
    try:
        are_equal, text = report(arguments.pop("folders"), **arguments)
    except ReceiptError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print("\n".join(text))
    sys.exit(0 if are_equal else 1)

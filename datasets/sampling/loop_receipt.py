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
from typing import Any, NamedTuple

import numpy as np
import torch

from common.ground.mixing import mix
from datasets.sampling.one_run import add_arguments, find_unusual
from datasets.sampling.records import RECORD, find_difference, parse_records

# A record of step 0 is a start. Sums: world size, seed + 1 or 0, time in ns. Epoch: first step + 1 or 0.
FILE, SAMPLES = "receipt-{}.bin", "samples-{}.bin"
_LINES, _LINE = 64, 64  # parts of a tensor that are hashed, and their size in bytes


class ReceiptError(ValueError):
    """A receipt cannot be read or compared. The message has the path and the reason."""


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


class Step(NamedTuple):
    """One step. sums: of ids (or contents), number of samples, of contents. samples: hashes, uint64 [n], rank
    after rank. sizes: the samples of each rank."""

    epoch: int
    sums: tuple[int, ...]
    samples: np.ndarray
    sizes: tuple[int, ...] = ()


class Start(NamedTuple):
    """One start of a program. first: number of steps that were completed before it; None if unknown."""

    first: int | None
    world_size: int
    seed: int | None
    time: int
    steps: list[Step]


def read(folder: str) -> list[Start]:
    """Return the starts that have steps, each with the samples of all ranks. Raises ReceiptError."""
    starts = _read_rank(folder, 0)
    others = [_read_rank(folder, rank) for rank in range(1, max(each.world_size for each in starts))]
    whole = []
    for start in starts:  # the start of another rank is the nearest one in time, unless it has none
        same = [_nearest(rank, start.time) for rank in others[: start.world_size - 1]]
        steps = _merge([each.steps for each in (start, *same)])
        if steps and all(_nearest(starts, each.time) is start for each in same):
            whole.append(start._replace(steps=steps))
    if not whole:
        raise ReceiptError(f"the receipt in {folder} holds no step of all processes")
    return whole


def _nearest(starts: list[Start], moment: int) -> Start:
    return min(starts, key=lambda start: abs(start.time - moment))


def _read_rank(folder: str, rank: int) -> list[Start]:
    path = os.path.join(folder, FILE.format(rank))
    try:
        with open(path, "rb") as file:
            records, is_cut = parse_records(file.read())
        hashes = np.fromfile(os.path.join(folder, SAMPLES.format(rank)), "<u8")
    except OSError as error:
        raise ReceiptError(f"no receipt of a loop at {path}: {error.strerror}") from error
    starts, last = list[Start](), 0
    for record in records:
        epoch, sums = int(record["epoch"]), tuple(map(int, record["sums"]))
        if record["step"]:
            last += sums[1]
            if not starts or int(record["step"]) != len(starts[-1].steps) + 1 or last > len(hashes):
                raise ReceiptError(f"{path} is damaged: step {record['step']} does not follow")
            starts[-1].steps.append(Step(epoch, sums, hashes[last - sums[1] : last]))
        else:
            starts.append(Start(epoch - 1 if epoch else None, sums[0], (sums[1] or None), sums[2], []))
    if not starts or is_cut:
        raise ReceiptError(f"{path} is cut: it ends within a record, or holds no start")
    return starts


def _merge(ranks: list[list[Step]]) -> list[Step]:
    """Return the steps that all ranks have reached, each with the samples of all ranks."""
    parts: dict[tuple[int, int], list[Step]] = {}  # (epoch, number in the epoch) -> steps
    ends = []
    for steps in ranks:
        seen, key = Counter[int](), (0, 0)
        for step in steps:
            seen[step.epoch] += 1
            key = step.epoch, seen[step.epoch]
            parts.setdefault(key, []).append(step)
        ends.append(key)
    return [
        Step(
            key[0],
            tuple(sum(column) % 2**64 for column in zip(*(step.sums for step in parts[key]), strict=True)),
            np.concatenate([step.samples for step in parts[key]]),
            tuple(len(step.samples) for step in parts[key]),
        )
        for key in sorted(parts)
        if key <= min(ends)
    ]


def follow(starts: list[Start]) -> tuple[list[Step], list[str], bool]:
    """Return the steps that a run kept, a line for each restart, and whether its restarts read equal samples.

    A start without a first step continues where its first steps were read before, or after the last step.
    """
    steps = [_MISSING] * (starts[0].first or 0) + starts[0].steps
    lines, equal = [], True
    for number, start in enumerate(starts[1:], 2):
        first = _find_first(steps, start) if start.first is None else start.first
        text = f"start {number} continues at step {first + 1}"
        again = min(len(steps) - first, len(start.steps))
        if again < 0:
            text, equal = f"{text}: {_name(len(steps), first)} have no record", False
        elif again:
            text += f": {_name(first, first + again)} {'was' if again == 1 else 'were'} read twice, "
            place = _count_equal(steps[first:], start.steps)
            text += "with the same samples" if place == again else describe(steps, first, start.steps, place)
            equal &= place == again
        lines.append(text)
        steps = steps[:first] + [_MISSING] * -again
        steps += _renumber(steps, start.steps)
    return steps, lines, equal


def _renumber(before: list[Step], steps: list[Step]) -> list[Step]:
    """Return the steps of a start, which may count its epochs from 1, with numbers that follow the others."""
    last, own = before[-1].epoch if before else 0, steps[0].epoch
    if own > last:
        return steps
    counts, new = (Counter(step.epoch for step in each) for each in (before, steps))
    is_same = counts[last] + new[own] <= max(*counts.values(), *new.values())
    shift = last - own + (not is_same)
    return [step._replace(epoch=step.epoch + shift) for step in steps]


_MISSING = Step(0, (0, 0, 0), np.zeros(0, np.uint64))


def _find_first(steps: list[Step], start: Start) -> int:
    """Return the last place where the steps continue as the start does; their end if none does."""
    same = [k for k, step in enumerate(steps) if step.sums == start.steps[0].sums]
    ends = ((k, min(len(steps) - k, len(start.steps))) for k in reversed(same))
    return next((k for k, end in ends if _count_equal(steps[k:], start.steps) == end), len(steps))


def _count_equal(first: list[Step], second: list[Step]) -> int:
    """Return the number of steps before the first difference. Epochs are not compared: each start counts its
    own."""
    return find_difference(*(_number(steps[: min(len(first), len(second))]) for steps in (first, second)))[1]


def _number(steps: list[Step]) -> np.ndarray:
    """Return steps as records."""
    return np.array([(0, number, step.sums) for number, step in enumerate(steps, 1)], RECORD)


def compare(first: list[Start], second: list[Start]) -> tuple[bool, str]:
    """Return (whether two runs read the same samples in the same steps, one line). Raises ReceiptError."""
    if first[0].seed != second[0].seed:
        seeds = " and ".join(str(run[0].seed and run[0].seed - 1) for run in (first, second))
        raise ReceiptError(f"the runs have the seeds {seeds}: their samples differ by design")
    a, b = follow(first)[0], follow(second)[0]
    place, both = _count_equal(a, b), min(len(a), len(b))
    if place < both:
        difference = describe(a, 0, b, place)
        if (place, difference) == (0, "other samples"):
            raise ReceiptError("the runs have no sample in common: other data, or ids are needed")
        return False, f"different from step {place + 1} on: {difference}"
    if len(a) != len(b):
        return False, f"equal in the {both} steps of both; one run ends there"
    return True, f"equal for {len(a)} steps"


def describe(theirs: list[Step], first: int, ours: list[Step], place: int) -> str:
    """Return how our steps differ from theirs[first:]. place: of the first difference."""
    expected, step = theirs[first + place], ours[place]
    if expected.sums[1] != step.sums[1]:
        return f"{expected.sums[1]} and {step.sums[1]} samples: compare runs with the same global batch"
    if expected.sums[0] == step.sums[0]:
        return "the same samples with other contents (augmentation, random numbers)"
    same = [other for other, each in enumerate(theirs) if each.sums == step.sums]
    length, other = max(((_count_equal(theirs[k:], ours[place:]), k) for k in same), default=(0, 0))
    if length >= min(3, len(ours) - place):  # the same steps at another place
        if other > first + place:
            return f"the samples of {_name(first + place, other)} were skipped"
        return f"the samples of {_name(other, other + length)} were read again"
    epoch = [k for k in range(len(theirs)) if theirs[k].epoch == expected.epoch]  # the same samples, mixed
    rest = [k for k in epoch if first + place <= k < first + len(ours)]
    before = np.concatenate([theirs[k].samples for k in epoch if k < first + place] or [_MISSING.samples])
    wanted = np.concatenate([theirs[k].samples for k in rest])
    got = np.concatenate([ours[k - first].samples for k in rest])
    if np.array_equal(np.sort(wanted), np.sort(got)):
        return f"the samples of {_name(rest[0], rest[-1] + 1)} were reordered"
    if not np.isin(got, [*before, *wanted]).any():
        return "other samples"
    twice, skipped = np.isin(got, before).sum(), np.isin(wanted, got, invert=True).sum()
    return f"{twice} samples of the epoch were read twice, {skipped} were skipped up to step {rest[-1] + 1}"


def _name(first: int, last: int) -> str:
    """Return the steps first..last-1, counted from 0, in words, counted from 1."""
    return f"step {last}" if last - first == 1 else f"steps {first + 1}-{last}"


def report(folders: list[str], **usual: bool) -> tuple[bool, list[str]]:
    """Return (whether one or two runs read what they should, lines about them). usual: the options of
    find_unusual(), for one run. Raises ReceiptError."""
    if len(folders) not in (1, 2):
        raise ReceiptError(f"expected RUN or RUN_A RUN_B, got {len(folders)} folders")
    runs, equal, lines = [read(folder) for folder in folders], True, []
    followed = [follow(run) for run in runs]
    for folder, (steps, restarts, is_equal) in zip(folders, followed, strict=True):
        lines += [f"{folder}: {len(steps)} steps", *restarts]
        equal &= is_equal
    if len(runs) == 2:
        is_equal, text = compare(*runs)
        return equal and is_equal, [*lines, f"data {text}"]
    unusual = find_unusual(followed[0][0], len(runs[0]) - 1, **usual)
    return equal and not unusual, [*lines, *(f"unusual: {line}" for line in unusual)]


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

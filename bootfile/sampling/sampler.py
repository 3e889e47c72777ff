"""The samples of each step: a pure function of (seed, epoch, step).

The epoch's permutation is never stored. It is a keyed bijection on 0..size-1: a Feistel network over two
digits of the sample number, with Philox as round function. The ids of a batch are the images of its
positions. So any step of any epoch costs the time and memory of one batch, also for 10^9 samples. The state
to resume is the number of completed steps. Source: J. Black and P. Rogaway, "Ciphers with Arbitrary Finite
Domains", CT-RSA 2002 (the generalised Feistel cipher and cycle walking).

With weights, an epoch draws its samples with replacement: the sample at a position is found by a Philox
uniform of (seed, epoch, position) in the cumulative weights.
"""

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained
from bootfile.ground.numbers import part_of
from bootfile.sampling.philox import Operation, draw, philox4x32
from bootfile.sampling.positions import Positions

_Sampler = TypeVar("_Sampler", bound="BatchSampler")
_ROUNDS = 8  # even; with 4 the tests of its quality fail, with 6 they pass
# positions computed at a time while iterating: spreads NumPy's cost per call over several steps
_CHUNK = 4096


def permute(values: ArrayLike, size: int, seed: int, epoch: ArrayLike, inverse: bool = False) -> np.ndarray:
    """Return the sample ids at these positions of the epoch's permutation of 0..size-1, int64 [n]. values:
    integers [n] in 0 <= value < size <= 2^62. epoch: a number, or one for each value, integers [n]. inverse:
    the values are ids, and their positions are returned."""
    # a value has the digits (high, low) with high < rows and low < side: few more pairs than samples
    side = math.isqrt(size - 1) + 1
    bases = np.uint64(-(-size // side)), np.uint64(side)
    values = np.array(values, np.uint64)
    epochs = np.broadcast_to(np.asarray(epoch), values.shape)
    outside = np.arange(len(values))  # places of the values that are not permuted yet
    while True:
        values[outside] = _feistel(values[outside], bases, seed, epochs[outside], inverse)
        outside = np.flatnonzero(values >= size)  # cycle walking: repeat until the value is below size
        if not len(outside):
            return values.astype(np.int64)


def _feistel(
    values: np.ndarray, bases: tuple[np.uint64, np.uint64], seed: int, epochs: np.ndarray, inverse: bool
) -> np.ndarray:
    """Encrypt values below the product of the bases, uint64 [n], one round after the other. inverse: decrypt
    them: the rounds in reverse order, each with the opposite shift."""
    digits = [*np.divmod(values, bases[1])]
    for number in range(_ROUNDS)[:: -1 if inverse else 1]:
        digit = number % 2  # each round changes one digit by a random function of the other one
        base = bases[digit]
        words = philox4x32((digits[1 - digit], number, epochs, int(Operation.ORDER)), seed)
        shift = words[0] ^ (words[1] << np.uint64(31))  # 63 bits: the remainder is even to 2^-31, and it fits
        if inverse:
            shift = base - shift % base
        digits[digit] = (digits[digit] + shift) % base
    joined: np.ndarray = digits[0] * bases[1] + digits[1]
    return joined


def split_batch(global_batch: int, parts: int, kind: str = "processes") -> int:
    """Return the number of samples of each part. kind: of the parts, for the message. Raises BadInput with
    the nearest divisible sizes."""
    local, rest = divmod(global_batch, parts)
    if rest:
        sizes = [str(size) for size in (local * parts, (local + 1) * parts) if size]
        raise BadInput(
            f"batch size {global_batch} is not divisible by {parts} {kind}; "
            f"expected {' or '.join(sizes)}, for example, or in place of {parts} a number that divides it"
        )
    return local


class BatchSampler(Positions):
    """A batch sampler whose k-th global batch is the same set of samples at any world size.

    Iterating yields int64 arrays of ids [global_batch / world_size]: this rank's contiguous part of each
    global batch, from the position to the end of the epoch, or to `total_steps`. Every rank has the same
    number of steps, at most size // global_batch in an epoch. The remaining samples, others each epoch, are
    skipped.

    size: samples in the data set.
    global_batch: samples of one optimizer step over all ranks.
    epochs, max_steps: limits of the training.
    epoch_steps: the step after which each epoch ends; its other samples are skipped.
    weights: numbers of at least 0 [size]. Each epoch then draws `size` samples with replacement, each with
        the probability weight / sum of the weights.
    `epoch`: of the position, counted from 1.
    `total_steps`: of the training; None without epochs and max_steps.
    `part`: iterating also stops after each global step that is a multiple of it; 0 (default): never.
    `shards`: arrays that this rank yields for each global batch, see split(). `first_shard`: number of the
        first one over all ranks.
    Raises BadInput if the numbers are not valid.
    """

    def __init__(
        self,
        size: int,
        global_batch: int,
        seed: int,
        epochs: int | None = None,
        max_steps: int | None = None,
        epoch_steps: int | None = None,
        *,
        weights: ArrayLike | None = None,
        rank: int = 0,
        world_size: int = 1,
    ):
        self.size = size
        self.global_batch = global_batch
        self.seed = seed
        self.epoch_steps = epoch_steps
        self.shares = None if weights is None else _cumulative(weights, size)
        if min(global_batch, epoch_steps or 1) < 1:
            cut = f", steps of an epoch {epoch_steps}" if epoch_steps else ""
            raise BadInput(f"batch size {global_batch}{cut}: expected at least 1")
        if not len(self):
            raise BadInput(
                f"batch size {global_batch} is larger than the data set ({size} samples): expected at most "
                f"{size}, with a learning rate that is smaller by the same factor"
            )
        if not 0 <= seed < 2**64:
            raise BadInput(f"seed {seed} is not in 0..2^64-1")
        self._set_rank(rank, world_size)
        # only for its error: here, before long work, and not at the first batch
        split_batch(global_batch, world_size)
        super().__init__(epochs, max_steps)

    def for_rank(self: _Sampler, rank: int, world_size: int) -> _Sampler:
        """Return a batch sampler of this rank's part of every global batch. Raises BadInput."""
        part = copy.copy(self)
        part._set_rank(rank, world_size)
        return part

    def split(self: _Sampler, shards: int) -> _Sampler:
        """Return a batch sampler of global batches of `shards` equal arrays. It yields those of this rank one
        after the other, about shards / world_size. Raises BadInput."""
        part = copy.copy(self)
        part._split_among(shards, "shards")
        split_batch(self.global_batch, shards, "shards")
        return part

    def _set_rank(self, rank: int, world_size: int) -> None:
        if not 0 <= rank < world_size:
            raise BadInput(f"rank {rank} is not in 0..{world_size - 1}")
        self.rank = rank
        self.world_size = world_size
        self._split_among(world_size, "processes")

    def _split_among(self, parts: int, kind: str) -> None:
        """Divide each global batch into parts, and take those of this rank. kind: of the parts, for a
        message."""
        self._parts = parts
        self._kind = kind
        parts_of_rank = part_of(parts, self.rank, self.world_size)
        self.first_shard = parts_of_rank.start
        self.shards = len(parts_of_rank)

    @property
    def largest(self) -> int:
        """Return the number of ids in the largest array of this rank. Raises BadInput if the global batch has
        no equal parts: for_rank() allows that, because split() may divide it into others."""
        return split_batch(self.global_batch, self._parts, self._kind)

    def __len__(self) -> int:
        """Return the number of steps of a whole epoch. It does not depend on the position."""
        return min(self._whole, self.epoch_steps or self._whole)

    @property
    def _whole(self) -> int:
        """Return the number of steps of an epoch that is not cut."""
        return self.size // self.global_batch

    def batch(self, step: int) -> np.ndarray:
        """Return this rank's ids of global step `step` (from 0), int64 [n]. The position is not used."""
        parts = self._batches(step // len(self) + 1, step % len(self), 1)
        return np.concatenate([ids for ids, _ in parts])

    def find(self, id: int, epochs: ArrayLike) -> np.ndarray:
        """Return the global step (from 0) that has a sample on any rank, for each epoch, int64 [n].

        It is -1 for an epoch that skips the sample. epochs: numbers from 1, integers [n]. Nothing is stored
        or searched: it takes microseconds an epoch, also for 10^9 samples. Raises BadInput if the sample does
        not exist, or if the sampler has weights, because a sample may then be in several steps.
        """
        if self.shares is not None:
            raise BadInput("a sample has no single step in an epoch that draws its samples with weights")
        if not 0 <= id < self.size:
            raise BadInput(f"sample {id} is not in 0..{self.size - 1}")
        epochs = np.asarray(epochs, np.int64)
        # a position after the last whole batch belongs to no step: -1
        steps = self._positions(id, epochs) // self.global_batch
        return np.where(steps < len(self), (epochs - 1) * len(self) + steps, -1)

    def _positions(self, id: int, epochs: np.ndarray) -> np.ndarray:
        """Return the position of a sample in each epoch, int64 [n]."""
        return permute(np.full(len(epochs), id), self.size, self.seed, epochs, inverse=True)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (ids for ids, _ in self.draws())

    def draws(self) -> Iterator[tuple[np.ndarray, int | np.ndarray]]:
        """Yield the ids that iterating yields, each with what random numbers take as their epoch: the epoch,
        or with weights a number for each id, because a sample may be drawn several times in an epoch."""
        last = self._first + self.remaining
        at_a_time = max(1, _CHUNK * self.world_size // self.global_batch)  # steps
        for step in range(self._first, last, at_a_time):
            yield from self._batches(self.epoch, step, min(at_a_time, last - step))

    def _batches(self, epoch: int, step: int, count: int) -> Iterator[tuple[np.ndarray, int | np.ndarray]]:
        """Yield the draws of `count` steps."""
        parts = self._places(step, count)
        places = np.concatenate(parts)
        ends = np.cumsum([len(part) for part in parts])[:-1]
        if self.shares is None:
            ids = self._permute(places, epoch)
            return zip(np.split(ids, ends), itertools.repeat(epoch))
        words = draw(self.seed, epoch, places, Operation.WEIGHTS)
        # 53 bits of two words, as many as a float64 holds
        uniforms = ((words[0] << np.uint64(21)) + (words[1] >> np.uint64(11))) / 2.0**53  # below 1
        ids = np.searchsorted(self.shares, uniforms * self.shares[-1], side="right")
        # the third word stands for the epoch: a sample that is drawn twice has other crops each time
        return zip(np.split(ids, ends), np.split(words[2], ends), strict=True)

    def _places(self, step: int, count: int) -> Sequence[np.ndarray] | np.ndarray:
        """Return the positions in the epoch of each array of `count` steps, from 0."""
        largest = self.largest
        first = np.arange(step, step + count)[:, None] * self.global_batch + self.first_shard * largest
        return (first + np.arange(largest * self.shards)).reshape(-1, largest)

    def _permute(self, places: np.ndarray, epoch: int) -> np.ndarray:
        """Return the ids at these positions of an epoch, int64 [n]."""
        return permute(places, self.size, self.seed, epoch)


def _cumulative(weights: ArrayLike, size: int) -> np.ndarray:
    """Return the cumulative weights, float64 [size]. Raises BadInput."""
    # NumPy and torch raise these
    with explained("weights: expected an array of numbers", TypeError, ValueError, RuntimeError):
        values = np.asarray(weights, np.float64)
    if values.shape != (size,):
        raise BadInput(f"weights of shape {list(values.shape)}: expected one for each of the {size} samples")
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(wrong):
        raise BadInput(f"the weight of sample {wrong[0]} is {values[wrong[0]]}: expected a number >= 0")
    # an overflow shows as an infinite sum, and is an error below
    with np.errstate(over="ignore"):
        sums = np.cumsum(values)
    total = sums.max(initial=0)
    if not 0 < total < np.inf:
        raise BadInput(f"the weights have the sum {total:g}: expected a finite number above 0")
    return sums


class WholeBatchSampler(BatchSampler):
    """A BatchSampler that skips no samples: the last batch of an epoch holds the remaining samples.

    The ranks' parts of that batch differ by one sample at most. Lower ranks have the larger parts. A part may
    be empty, because every rank has the same number of steps. global_batch may exceed size. shuffle: False
    yields 0..size-1 in order. The other arguments are those of a BatchSampler.
    """

    def __init__(self, *arguments: Any, shuffle: bool = True, **options: Any):
        super().__init__(*arguments, **options)
        self.shuffle = shuffle

    def split(self, shards: int) -> Any:
        raise BadInput("a WholeBatchSampler has batches of different sizes: for shards use a BatchSampler")

    @property
    def _whole(self) -> int:
        return -(-self.size // self.global_batch)

    def _positions(self, id: int, epochs: np.ndarray) -> np.ndarray:
        return super()._positions(id, epochs) if self.shuffle else np.full(len(epochs), id)

    def _places(self, step: int, count: int) -> list[np.ndarray]:
        parts = []
        for first in np.arange(step, step + count) * self.global_batch:
            here = min(self.global_batch, self.size - first)  # the last batch of an epoch may be smaller
            # rounded up at both ends: the parts differ by one at most, and together they are the batch
            begin, end = (-(-here * rank // self.world_size) for rank in (self.rank, self.rank + 1))
            parts.append(np.arange(first + begin, first + end))
        return parts

    def _permute(self, places: np.ndarray, epoch: int) -> np.ndarray:
        return super()._permute(places, epoch) if self.shuffle else places


class SequentialBatchSampler:
    """A batch sampler for evaluation: every sample exactly once over all ranks, no padding, nothing dropped.

    Iterating yields int64 arrays of at most `batch` ids: this rank's contiguous part of 0..size-1 in order.
    Ranks may have different numbers of batches (0 for some if size < world_size), so the ranks must not
    communicate inside the loop. Raises BadInput if a batch has no samples.
    """

    # random numbers are the same in every evaluation
    seed = 0
    epoch = 1
    step = 0

    def __init__(self, size: int, batch: int, *, rank: int = 0, world_size: int = 1, shards: int = 0):
        if batch < 1:
            raise BadInput(f"batch size {batch}: expected at least 1")
        self.size = size
        self.largest = batch
        self.rank = rank
        self.world_size = world_size
        self.first_shard = rank  # the random numbers of an evaluation are by rank
        count = shards or world_size
        bounds = [size * part // count for part in range(count + 1)]
        # the ranges of ids of this rank: all ids are divided into `count` ranges
        self.parts = [range(*bounds[part : part + 2]) for part in part_of(count, rank, world_size)]

    def for_rank(self, rank: int, world_size: int) -> "SequentialBatchSampler":
        """Return a batch sampler of this rank's part."""
        return SequentialBatchSampler(self.size, self.largest, rank=rank, world_size=world_size)

    def split(self, shards: int) -> "SequentialBatchSampler":
        """Return a batch sampler of this rank's part of `shards` ranges of ids, `parts`. No batch has ids of
        two ranges."""
        return SequentialBatchSampler(
            self.size, self.largest, rank=self.rank, world_size=self.world_size, shards=shards
        )

    def __len__(self) -> int:
        return sum(len(part[:: self.largest]) for part in self.parts)

    @property
    def remaining(self) -> int:
        """Return the number of batches that iterating yields."""
        return len(self)

    def draws(self) -> Iterator[tuple[np.ndarray, int]]:
        """Yield the ids that iterating yields, each with the epoch."""
        return zip(self, itertools.repeat(self.epoch))

    def __iter__(self) -> Iterator[np.ndarray]:
        for part in self.parts:
            for first in part[:: self.largest]:
                yield np.arange(first, min(first + self.largest, part.stop))

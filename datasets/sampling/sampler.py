"""Which samples a step sees: a pure function of (seed, epoch, step).

The epoch's permutation is never stored. It is a keyed bijection on 0..size-1, a Feistel network over two
digits of the sample number whose round function is Philox, and the ids of one batch are the images of that
batch's positions. So any step of any epoch costs the time and memory of one batch, also for 10^9 samples, and
the state to resume is (epoch, step). Source: J. Black and P. Rogaway, "Ciphers with Arbitrary Finite
Domains", CT-RSA 2002 (the generalised Feistel cipher and cycle walking).
"""

import math

import numpy as np

from common.exits import BadInput
from datasets.sampling.philox import Operation, philox4x32

_ROUNDS = 8  # even; with 4 the tests of its quality fail, with 6 they pass
# positions computed at a time while iterating: NumPy's cost per call, spread over several steps
_CHUNK = 4096


def permute(positions, size: int, seed: int, epoch: int) -> np.ndarray:
    """Sample ids at these positions of the epoch's permutation of 0..size-1.

    positions: integers [n] in 0 <= position < size <= 2^62. Returns int64 [n].
    """
    # digits (high, low) with high < rows, low < side: hardly more pairs than samples
    side = math.isqrt(size - 1) + 1
    rows = -(-size // side)
    ids = np.array(positions, dtype=np.uint64)
    outside = slice(None)
    while True:
        ids[outside] = _feistel(ids[outside], rows, side, seed, epoch)
        outside = np.flatnonzero(ids >= size)  # cycle walking: again until it falls inside
        if not len(outside):
            return ids.astype(np.int64)


def _feistel(values: np.ndarray, rows: int, side: int, seed: int, epoch: int) -> np.ndarray:
    rows, side = np.uint64(rows), np.uint64(side)
    high, low = values // side, values % side
    for number in range(0, _ROUNDS, 2):
        high = (high + _round(low, number, seed, epoch)) % rows
        low = (low + _round(high, number + 1, seed, epoch)) % side
    return high * side + low


def _round(half: np.ndarray, number: int, seed: int, epoch: int) -> np.ndarray:
    words = philox4x32((half, number, epoch, int(Operation.ORDER)), seed)
    return words[0] ^ (words[1] << np.uint64(31))  # 63 bits: the remainder is even to 2^-31, and the sum fits


class Order:
    """A batch sampler whose k-th global batch is the same set of samples at any world size.

    size: samples in the data set. global_batch: samples of one optimizer step over all processes. Yields
    int64 arrays [global_batch / world_size], `largest` for short: this rank's contiguous part of every global
    batch. Every rank has the same number of steps, size // global_batch; the remainder, another one each
    epoch, is left out. Raises BadInput where the numbers do not fit.
    """

    def __init__(self, size: int, global_batch: int, seed: int, rank: int = 0, world_size: int = 1):
        self.size, self.global_batch, self.seed = size, global_batch, seed
        if not len(self):
            raise BadInput(f"batch size {global_batch} is larger than the data set ({size} samples)")
        if global_batch % world_size:
            raise BadInput(f"batch size {global_batch} is not divisible by {world_size} processes")
        if not 0 <= rank < world_size:
            raise BadInput(f"rank {rank} is not in 0..{world_size - 1}")
        if not 0 <= seed < 2**64:
            raise BadInput(f"seed {seed} is not in 0..2^64-1")
        self.rank, self.world_size = rank, world_size
        self.largest = global_batch // world_size
        self.set_epoch(0)

    def set_epoch(self, epoch: int, start_step: int = 0) -> None:
        """Choose the epoch, and the step within it at which the next iteration begins."""
        if not 0 <= start_step <= len(self):
            raise BadInput(f"step {start_step} is not in 0..{len(self)}, the steps of an epoch")
        self.epoch, self.start_step = epoch, start_step

    def __len__(self) -> int:
        """Steps of a whole epoch, whatever start_step is."""
        return self.size // self.global_batch

    def batch(self, step: int) -> np.ndarray:
        """This rank's ids of one step of the epoch, int64 [global_batch / world_size], 0 <= step <
        len(self)."""
        return self._batches(step, 1)[0]

    def __iter__(self):
        steps_at_a_time = max(1, _CHUNK * self.world_size // self.global_batch)
        for step in range(self.start_step, len(self), steps_at_a_time):
            yield from self._batches(step, min(steps_at_a_time, len(self) - step))

    def _batches(self, step: int, count: int) -> np.ndarray:
        local = self.largest
        first = np.arange(step, step + count)[:, None] * self.global_batch + self.rank * local
        positions = (first + np.arange(local)).reshape(-1)
        return permute(positions, self.size, self.seed, self.epoch).reshape(count, local)


class WholeOrder(Order):
    """An Order that leaves nothing out: the last batch of an epoch is what remains, every sample comes once.

    The parts of that batch differ by one sample at most from rank to rank, the larger ones first, and may be
    empty: every rank has the same number of steps. global_batch may exceed size. shuffle: False hands out
    0..size-1 in order.
    """

    def __init__(
        self,
        size: int,
        global_batch: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
    ):
        super().__init__(size, global_batch, seed, rank, world_size)
        self.shuffle = shuffle

    def __len__(self) -> int:
        return -(-self.size // self.global_batch)

    def _batches(self, step: int, count: int) -> list[np.ndarray]:
        parts = []
        for first in range(step * self.global_batch, (step + count) * self.global_batch, self.global_batch):
            here = min(self.global_batch, self.size - first)
            begin, end = (-(-here * rank // self.world_size) for rank in (self.rank, self.rank + 1))
            parts.append(np.arange(first + begin, first + end))
        if not self.shuffle:
            return parts
        ids = permute(np.concatenate(parts), self.size, self.seed, self.epoch)
        return np.split(ids, np.cumsum([len(part) for part in parts])[:-1])


class Sequential:
    """A batch sampler for evaluation: every sample exactly once over all ranks, no padding, nothing dropped.

    Yields int64 arrays of at most `batch` ids: this rank's contiguous part of 0..size-1 in order. Ranks may
    have different numbers of batches (none at all where size < world_size), so nothing inside the loop may
    communicate.
    """

    def __init__(self, size: int, batch: int, rank: int = 0, world_size: int = 1):
        self.first, self.last = size * rank // world_size, size * (rank + 1) // world_size
        self.largest = batch

    def __len__(self) -> int:
        return -(-(self.last - self.first) // self.largest)

    def __iter__(self):
        for first in range(self.first, self.last, self.largest):
            yield np.arange(first, min(first + self.largest, self.last))

"""The records of a receipt: 32 bytes for each step, with three sums of hashes modulo 2^64.

There are two kinds of receipts, in the output folder of a run:

    receipt.bin         of a Loader: each step once, with the sums of PARTS over the samples of all ranks
    receipt-RANK.bin    of a plain loop: each start of the program and each step that it made, with the sums
                        of LOOP_PARTS over the samples of a rank
    samples-RANK.bin    of a plain loop: the hashes of these samples, 8 bytes each
"""

import dataclasses
import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from bootfile.ground.errors import BadInput

FILE = "receipt.bin"
MOST = 2**30  # bytes of FILE: 33 million steps
LOOP_FILE = "receipt-{}.bin"  # of a rank
SAMPLES_FILE = "samples-{}.bin"  # of a rank
PARTS = ("ids", "labels", "augmentation")
LOOP_PARTS = ("samples", "number of samples", "contents")
# A record of step 0 is a start of a plain loop. Its sums are the world size, seed + 1 or 0, and the time in
# ns. Its epoch is the number of its first step, or 0 if that is unknown.
RECORD = np.dtype([("epoch", "<u4"), ("step", "<u4"), ("sums", "<u8", (3,))])


class ReceiptError(BadInput):
    """A receipt cannot be read or compared. The message has the path and the reason."""


@dataclasses.dataclass(frozen=True, eq=False)
class Steps:
    """Steps of a run, in the order of their numbers.

    records: RECORD [n].
    samples: the hashes of the samples of each step, uint64, rank after rank. Empty for the receipt of a
        Loader, which has only sums.
    sizes: the number of samples of each rank, for each step that has samples.
    """

    records: np.ndarray
    samples: list[np.ndarray] = dataclasses.field(default_factory=list)
    sizes: list[tuple[int, ...]] = dataclasses.field(default_factory=list)

    def __len__(self) -> int:
        return len(self.records)

    @property
    def numbers(self) -> np.ndarray:
        """Return the numbers of the steps, int64 [n]."""
        return self.records["step"].astype(np.int64)

    @property
    def epochs(self) -> np.ndarray:
        """Return the epoch of each step, int64 [n]."""
        return self.records["epoch"].astype(np.int64)

    @property
    def sums(self) -> np.ndarray:
        """Return the sums of each step, uint64 [n, 3]."""
        sums: np.ndarray = self.records["sums"]
        return sums

    @property
    def last(self) -> int:
        """Return the number of the last step, 0 without steps."""
        return int(self.records["step"][-1]) if len(self) else 0

    def select(self, is_chosen: np.ndarray) -> "Steps":
        """Return some of the steps. is_chosen: bool [n]."""
        samples = list(itertools.compress(self.samples, is_chosen))
        sizes = list(itertools.compress(self.sizes, is_chosen))
        return Steps(self.records[is_chosen], samples, sizes)

    def renumber(self, first: int) -> "Steps":
        """Return the steps with the numbers first + 1, first + 2, ..."""
        records = self.records.copy()
        records["step"] = np.arange(first + 1, first + 1 + len(records))
        return dataclasses.replace(self, records=records)

    def shift_epochs(self, count: int) -> "Steps":
        """Return the steps, `count` epochs later."""
        records = self.records.copy()
        records["epoch"] = self.epochs + count
        return dataclasses.replace(self, records=records)

    def join(self, following: "Steps") -> "Steps":
        """Return these steps and those that follow them."""
        records = np.concatenate([self.records, following.records])
        return Steps(records, self.samples + following.samples, self.sizes + following.sizes)


class Start(NamedTuple):
    """One start of a program, with the steps that it made.

    first: number of steps that were completed before it; None: unknown, its steps are numbered from 1.
    seed: of the data; None without one.
    time: in ns.
    """

    first: int | None
    world_size: int
    seed: int | None
    time: int
    steps: Steps


class History(NamedTuple):
    """What a receipt has of a run.

    starts: those of a plain loop. A Loader's receipt has one, with all steps: a restart replaces them.
    restarts: their number.
    begin: the step before the first one that a Loader's receipt has to have.
    origin: of a run that begins at a step of another one: where it begins, in words.
    removed: the steps whose batches lack samples, see recorded_run.Run.sum_removed().
    """

    starts: list[Start]
    restarts: int
    begin: int = 0
    origin: str = ""
    removed: Mapping[int, tuple[int, int]] = MappingProxyType({})

    @property
    def is_of_loop(self) -> bool:
        """Return whether it is the receipt of a plain loop, which has the samples of the steps."""
        return bool(self.starts[0].steps.samples)

    @property
    def seed(self) -> int | None:
        """Return the seed of the data; None if the receipt has none, as that of a Loader."""
        return self.starts[0].seed


def parse_records(content: bytes) -> tuple[np.ndarray, bool]:
    """Return the whole records of a file, and whether it ends within one: a kill may leave a part of one."""
    count, rest = divmod(len(content), RECORD.itemsize)
    return np.frombuffer(content, RECORD, count), bool(rest)

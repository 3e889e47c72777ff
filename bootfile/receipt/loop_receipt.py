"""Record the samples that a training loop gets, in any PyTorch program.

    receipt = Receipt("OUT", seed=0, rank=rank, world_size=world_size)    # before batches move to a GPU
    for step, batch in enumerate(receipt.watch(loader), start=first_step):
        ...

`bootfile receipt RUN` then judges the run, and `bootfile receipt RUN_A RUN_B` compares two.

Each process appends to its own files, and nothing is sent between processes:
    OUT/receipt-RANK.bin    32 bytes for each start of the program and for each step
    OUT/samples-RANK.bin    8 bytes for each sample: its hash

The record of a step has sums of hashes modulo 2^64. So the order inside a step and its division among the
processes do not matter. A sample is known by its id if the loop gives ids, and by its content: shapes, types
and at most 4 KB of each tensor, in lines of 64 bytes at equal distances. Hash of a word: the finalizer of
SplitMix64 (Steele et al., OOPSLA 2014). Sum of words: Lemire, Kaser, "Strongly Universal String Hashing".
"""

import contextlib
import io
import operator
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from bootfile.ground.errors import BadInput
from bootfile.receipt.contents import hash_batch, hash_ids
from bootfile.receipt.records import LOOP_FILE, RECORD, SAMPLES_FILE, parse_records

_Batch = TypeVar("_Batch")


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
            raise BadInput(f"rank {rank} is not in 0..{world_size - 1}")
        os.makedirs(folder, exist_ok=True)
        self._find_ids = operator.itemgetter(ids) if isinstance(ids, str) else ids
        self._path = os.path.join(folder, LOOP_FILE.format(rank))
        self._samples_path = os.path.join(folder, SAMPLES_FILE.format(rank))
        self._files: list[io.FileIO] = []  # they are opened at the first batch
        self._seed = seed
        self._world_size = world_size
        self._first = first_step
        self.step = first_step or 0
        self._epoch = 0

    def watch(self, loader: Iterable[_Batch]) -> Iterator[_Batch]:
        """Yield the batches of one epoch, and record each one before it is used. Call it for each epoch: of
        several epochs in one call, samples seem to come twice."""
        self._epoch += 1
        for batch in loader:
            self.add(batch, self._epoch)
            yield batch

    def add(self, batch: Any, epoch: int = 1) -> None:
        """Record a batch. For a program whose loop is out of reach, for example in a callback.

        epoch: its number, ascending. Raises BadInput if the batch cannot be hashed.
        """
        samples = contents = hash_ids(self._find_ids(batch)) if self._find_ids else hash_batch(batch)
        if self._find_ids:
            with contextlib.suppress(BadInput):  # ids are enough
                contents = hash_batch(batch)
        receipt, hashes = self._files or self._open()
        self.step += 1
        # the samples first: after a kill in between, the next start cuts off samples without a record
        hashes.write(samples.tobytes())
        sums = samples.sum(), len(samples), contents.sum()
        receipt.write(np.array([(epoch, self.step - (self._first or 0), sums)], RECORD).tobytes())

    def _open(self) -> list[io.FileIO]:
        """Open the files after their last whole record, and append the record of this start.

        add() calls it at the first batch, because load_state_dict() may set the first step until then.
        """
        # before the files are opened for writing: s3fs has no name for a new file that is open
        records = np.zeros(0, RECORD)
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as file:
            records, _ = parse_records(file.read())
        receipt = open(self._path, "ab", 0)  # noqa: SIM115 - it stays open until the program ends
        hashes = open(self._samples_path, "ab", 0)  # noqa: SIM115
        self._files = [receipt, hashes]
        # a kill may have left a part of a record, or samples of a step that has no record
        receipt.truncate(records.nbytes)
        hashes.truncate(8 * int(records["sums"][records["step"] > 0, 1].sum()))
        # 0 is "unknown" in the record of a start
        seed = self._seed + 1 if self._seed is not None else 0
        first = self._first + 1 if self._first is not None else 0
        sums = self._world_size, seed, time.time_ns()
        receipt.write(np.array([(first, 0, sums)], RECORD).tobytes())
        return self._files

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the step of a state_dict(), as with first_step. Raises BadInput after the first
        batch of this start."""
        if self._files:
            raise BadInput(f"step {state['step']} is set after the first batch")
        self._first = int(state["step"])
        self.step = self._first

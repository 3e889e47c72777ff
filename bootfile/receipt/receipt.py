"""The receipt of a run: a digest over the sample ids, labels and crops of the batches that a loader yielded.

It proves that two runs passed the same samples, labels and crops to the same training steps. Their loaders,
world sizes and restarts may differ. It does not cover pixels, or batches that were prepared but not yielded.

Each sample becomes three 64-bit hashes: of its id, of (id, label), of (id, augmentation parameters). The
record of a step has their sums modulo 2^64. So the order inside a global batch and its division among the
ranks do not matter, and one all_reduce combines the ranks. The steps are chained.
"""

import functools
import hashlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bootfile.ground.errors import Once, print_line
from bootfile.ground.files import check_mounted, opener, read_file, write_atomic
from bootfile.ground.mixing import mix
from bootfile.receipt.records import FILE, MOST, PARTS, RECORD, parse_records

if TYPE_CHECKING:
    import torch  # the records of a run are read without it

_Batch = tuple[np.ndarray, np.ndarray, Sequence[np.ndarray]]
_CHUNK = 4096  # samples per computation of sums: spreads NumPy's cost per call over several steps


class Receipt:
    """The digest of one run. A loader calls add() for each batch that it yields, and take() and chain() at
    each report.

    fingerprint: a digest of the training data, any text that changes if a sample or a label does. A
    checkpoint stores it, and a run on other data does not resume from that checkpoint.
    batches: the number of batches of each step.
    """

    def __init__(self, fingerprint: str = "", batches: int = 1):
        self.fingerprint = fingerprint
        self.further: dict[str, str] = {}  # name -> digest of what else identifies the data
        self.batches = batches
        self.digest = bytes(8)
        self.step = 0  # the last step that is in the digest
        self.is_restored = False  # it continues from a checkpoint
        self.leaves_out = False  # the batches that are added now: their steps get the sums 0
        self.expects_same = True  # False on another instruction set: computed samples may have other bits
        self._batches: list[_Batch] = []  # (ids, labels, crops) whose sums are not computed yet
        self._waiting = 0  # samples in them
        self._sums: list[np.ndarray] = []
        self._content = bytearray()  # of FILE: it may be deleted or cut while the job runs
        self._stored: int | None = None  # bytes of the content that are in FILE; None: FILE was not read yet
        self._begun = 0, bytes(8)  # the step and the digest before the first record of this start
        self._first: int | None = None  # the step before the first record of FILE, if it is known
        self._warn = Once(_print_warning)
        self.shared: list[torch.Tensor] | None = None  # sums of all ranks, of steps that were not chained

    def add(
        self,
        ids: np.ndarray,
        labels: np.ndarray,
        crops: Sequence[np.ndarray] = (),
        leaves_out: bool = False,
    ) -> None:
        """Add one batch, whose arrays must not change later: sums are computed for several batches at a time.

        ids: int64 [n].
        labels: int64 [n]; bool [n, classes] if a sample has several.
        crops: arrays [n] of integers, booleans or float32.
        leaves_out: the sums of the batch are 0.
        """
        if leaves_out or self.leaves_out:
            # the step keeps a record, with sums of 0: the numbers of the records have no gap
            ids, labels, *crops = (column[:0] for column in (ids, labels, *crops))
        self._batches.append((ids, labels, crops))
        self._waiting += len(ids)
        if self._waiting >= _CHUNK:
            self._sum()

    def take(self) -> np.ndarray:
        """Return and clear this rank's steps since the last take(): int64 [steps, 3], sums modulo 2^64."""
        self._sum()
        # the empty array: at a report without a step
        sums = np.concatenate([np.zeros((0, len(PARTS)), np.int64), *self._sums])
        self._sums = []
        # a step of several shards has as many batches: their sums are added
        steps: np.ndarray = sums.reshape(-1, self.batches, len(PARTS)).sum(1)
        return steps

    def _sum(self) -> None:
        """Compute the sums of the batches that wait for it."""
        if self._batches:
            ids, labels, crops = zip(*self._batches, strict=True)
            # a batch has several columns of crops: here each column goes over all batches
            columns = [np.concatenate(column) for column in zip(*crops, strict=True)]
            ends = np.cumsum([len(ids_of_batch) for ids_of_batch in ids])
            self._sums.append(batch_sums(np.concatenate(ids), np.concatenate(labels), columns, ends))
            self._batches.clear()
            self._waiting = 0

    def chain(self, step: int, steps_per_epoch: int, sums: np.ndarray, folder: str | None) -> None:
        """Extend the digest by the last steps up to `step`, and append them to FILE in the folder, if any.

        sums: int64 [steps, 3], take() summed over all ranks. If a record cannot be written, a warning is
        printed. The digest still covers it.
        """
        records = np.zeros(len(sums), dtype=RECORD)
        records["step"] = np.arange(step - len(sums) + 1, step + 1)
        records["epoch"] = (records["step"] - 1) // steps_per_epoch + 1
        records["sums"] = sums.view(np.uint64)
        # on every rank, also on those that write no file: a checkpoint of any rank has the digest
        for record in records:
            self.digest = _extend(self.digest, record)
        self.step = step
        if folder is None:  # another rank than 0, or a run without an output folder
            return
        self._content += records.tobytes()
        try:
            # the training does not end for its receipt: close() reports that the file is not whole
            self._store(folder)
        except OSError as error:
            self._warn(f"{FILE} in {folder} is incomplete: {error.strerror or error}")

    def begins_at(self, step: int) -> None:
        """Expect the records after `step` in FILE, where the first start of this run began."""
        self._first = step

    def finish(self, folder: str) -> str:
        """Compare FILE on rank 0 with the records of this run, and write it again if it differs. Return why
        it is not whole, or ""."""
        try:
            if self.step:
                self._store(folder, compare=True)
        except OSError as error:
            return f"{FILE} in {folder} is not whole: {error}"
        return ""

    def find_other(self, first: int, sums: np.ndarray, folder: str) -> int:
        """Return the first step whose record in FILE has other sums; 0 if none has, or if FILE lacks them.

        first: the number of the first step. sums: int64 [steps, 3], over all ranks.
        """
        records = _read_records(folder)
        known = dict(zip(records["step"].tolist(), records["sums"], strict=True))
        for step, sums_now in enumerate(sums.view(np.uint64) if self.expects_same else (), first):
            sums_before = known.get(step, sums_now)
            if sums_before.any() and not np.array_equal(sums_before, sums_now):  # 0: it was left out
                return step
        return 0

    def find_last_step(self, folder: str) -> int:
        """Return the last step in FILE, before this start has written to it; 0 if it cannot be read."""
        return int(_read_records(folder)["step"].max(initial=0))

    def _store(self, folder: str, compare: bool = False) -> None:
        """Append the new records to FILE, or write it again if it is not as long as this run has left it.

        chain() and finish() call it on rank 0. compare: also read FILE, and write it again if it differs.
        FILE is open only here, and is not read meanwhile: s3fs has no name for a new file that is open.
        """
        # a lost mount leaves an empty folder, in which the records of earlier starts seem to be deleted
        check_mounted(folder)
        path = os.path.join(folder, FILE)
        if self._stored is None:  # the first records of this start: those of earlier ones come before them
            os.makedirs(folder, exist_ok=True)
            kept = self._cut_file(path)
            self._content[:0] = kept
            self._stored = len(kept)
        size = os.path.getsize(path) if os.path.exists(path) else 0
        if size != self._stored or (compare and size and read_file(path, MOST) != self._content):
            self._warn(
                f"{path} was deleted, cut or changed while the job ran ({size} bytes, expected "
                f"{self._stored}): all its records are written again"
            )
            write_atomic(path, bytes(self._content))
        elif len(self._content) > size:
            with open(path, "ab", opener=opener) as file:
                file.write(self._content[size:])
        self._stored = len(self._content)

    def _cut_file(self, path: str) -> bytes:
        """Cut FILE after the step with which this start began, because it writes the later records again, and
        return the rest: the records of earlier starts. Rank 0 calls it once, before the first record of this
        start."""
        step, _ = self._begun
        # a file that cannot be read now is not cut: OSError
        records, _ = parse_records(read_file(path, MOST) if os.path.exists(path) else b"")
        # records that do not ascend are not of this program, or damaged: the steps count as missing
        is_ascending = (np.diff(records["step"].astype(np.int64)) > 0).all()
        kept = records[records["step"] <= step] if is_ascending else records[:0]
        if os.path.exists(path) and os.path.getsize(path) != kept.nbytes:
            with open(path, "r+b", opener=opener) as file:
                file.truncate(kept.nbytes)
        self._warn_of_missing(path, kept)
        return kept.tobytes()

    def _warn_of_missing(self, path: str, kept: np.ndarray) -> None:
        """Print a warning if the records of earlier starts lack steps of this run, or are those of another
        one."""
        step, digest = self._begun
        first = self._first
        if first is None:  # the first start of this run began before its first record
            first = int(kept["step"][0]) - 1 if len(kept) else step
        missing = max(0, step - first) - int((kept["step"] > first).sum())
        # the digest before the first record is known only if that is the first step
        chained = functools.reduce(_extend, kept, bytes(8)) if first == 0 else digest
        if missing or chained != digest:
            fault = f"lacks {missing} of" if missing else "has other records than those of"
            self._warn(
                f"{path} {fault} the steps {first + 1} to {step}: it was deleted, cut or changed since"
            )

    def __str__(self) -> str:
        return self.digest.hex()

    def state_dict(self) -> dict[str, Any]:
        return {"digest": str(self), "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state. Batches that were added since do not count: they come again."""
        self.digest = bytes.fromhex(state["digest"])
        self.step = int(state["step"])
        self.is_restored = True
        self._begun = self.step, self.digest
        self._batches.clear()
        self._waiting = 0
        self._sums.clear()


def _print_warning(line: str) -> None:
    print_line(f"warning: {line}")


def _read_records(folder: str) -> np.ndarray:
    """Return the whole records in FILE, RECORD [n]; none if it cannot be read."""
    try:
        return parse_records(read_file(os.path.join(folder, FILE), MOST))[0]
    except OSError:
        return np.zeros(0, RECORD)


def batch_sums(
    ids: np.ndarray, labels: np.ndarray, crops: Sequence[np.ndarray], ends: np.ndarray
) -> np.ndarray:
    """Return the sums of consecutive batches, modulo 2^64: int64 [batches, 3].

    ids, labels, crops: one number per sample, [n]; labels may be bool [n, classes]. ends: the end of each
    batch in them, int64 [batches].
    """
    hashed = mix(_words(ids))
    augmented = hashed
    for column in crops:
        augmented = mix(augmented ^ _words(column))
    # differences of running totals modulo 2^64: one call for batches of any size
    totals = np.zeros((len(PARTS), len(hashed) + 1), np.uint64)
    np.cumsum((hashed, mix(hashed ^ _words(labels)), augmented), axis=1, out=totals[:, 1:])
    sums: np.ndarray = np.diff(totals[:, [0, *ends]]).T.copy()
    return sums.view(np.int64)


def sums_of_ids(ids: np.ndarray) -> np.ndarray:
    """Return the sums of one batch whose samples have only ids, int64 [n]: int64 [1, 3]."""
    return batch_sums(ids, np.zeros_like(ids), (), np.array([len(ids)]))


def _extend(digest: bytes, record: np.void) -> bytes:
    """Return the digest after the record of one more step."""
    return hashlib.blake2b(digest + record.tobytes(), digest_size=8).digest()


def _words(column: np.ndarray) -> np.ndarray:
    """Return a column of one number per sample as 64-bit words, uint64 [n]: a hash of all labels if there are
    several."""
    column = np.asarray(column)
    if column.ndim == 2:
        words = np.zeros(len(column), np.uint64)
        # the bits of 32 classes at a time, as an integer
        for first in range(0, column.shape[1], 32):
            part = column[:, first : first + 32]
            words = mix(words ^ (part @ (1 << np.arange(part.shape[1]))).astype(np.uint64))
        return words
    if column.dtype.kind == "f":
        column = column.astype(np.float32).view(np.uint32)
    return column.astype(np.uint64)

"""The proof of which data a run saw: a digest over what a loader DELIVERED, not over what it was asked for.

Every sample becomes three 64-bit hashes: of its id, of (id, label), of (id, augmentation parameters). A step
is their sums modulo 2^64, so the order inside a global batch and its division among processes do not matter,
and one all_reduce combines the processes. The steps are chained: two runs with the same digest saw the same
samples, labels and crops in the same steps, whichever loaders, world sizes and restarts were theirs. Hash of
a word: the finalizer of SplitMix64 (Steele et al., "Fast Splittable Pseudorandom Number Generators", OOPSLA
2014).
"""

import hashlib
import os
from typing import NamedTuple

import numpy as np
import torch

from common.exits import BadInput

FILE = "receipt.bin"  # in a run's output folder
PARTS = ("ids", "labels", "augmentation")
_RECORD = np.dtype([("epoch", "<u4"), ("step", "<u4"), ("sums", "<u8", (len(PARTS),))])


class Receipt:
    """The digest of one run. A loader calls add() for each batch that it yields, and commit() at each report.

    fingerprint: a digest of the training data, any text that changes if a sample or a label does. A
    checkpoint stores it, and a run on other data does not resume from that checkpoint.
    """

    def __init__(self, fingerprint: str = ""):
        self.fingerprint = fingerprint
        self.digest = bytes(8)
        self.step = 0  # the last step that is in the digest
        self._delivered: list[np.ndarray | torch.Tensor] = []
        self._file = None
        self._warned: set[str] = set()

    def add(self, ids: np.ndarray, labels, parameters=()) -> None:
        """One batch: ids int64 [n], labels int64 [n] (array or host tensor), parameters: arrays [n] of
        integers, booleans or float32."""
        labels = labels.numpy() if isinstance(labels, torch.Tensor) else labels
        self.record(batch_sums(ids, labels, parameters, [len(ids)]))

    def record(self, sums) -> None:
        """Batches whose sums are known: uint64 [steps, 3], or int64 on any device."""
        self._delivered.append(sums)

    def take(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """What was added since the last take(): int64 [steps, 3], one row a step, sums modulo 2^64 of this
        process."""
        delivered = [
            torch.from_numpy(sums.view(np.int64)) if isinstance(sums, np.ndarray) else sums
            for sums in self._delivered
        ]
        self._delivered.clear()
        if not delivered:
            return torch.zeros(0, len(PARTS), dtype=torch.int64, device=device)
        return torch.cat(delivered).to(device)

    def commit(
        self, step: int, steps_per_epoch: int, folder: str, device: torch.device | str = "cpu"
    ) -> None:
        """Sum the steps since the last commit over the ranks, chain them, and append them to FILE on rank 0.

        Call it on all ranks after step `step` (counted from 1). device: one on which the process group, if
        there is one, communicates. A record that cannot be written is reported and costs the record, not the
        digest.
        """
        sums, first = self.take(device), True
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(sums)
            first = torch.distributed.get_rank() == 0
        before, records = self.step, self.chain(step, steps_per_epoch, sums)
        if not first:
            return
        try:
            if self._file is None:
                os.makedirs(folder, exist_ok=True)
                self._file = _open(os.path.join(folder, FILE), before)
            self._file.write(records.tobytes())
        except OSError as error:
            line = f"warning: {FILE} in {folder} is incomplete: {error}"
            if line not in self._warned:
                self._warned.add(line)
                print(line, flush=True)

    def chain(self, step: int, steps_per_epoch: int, sums: torch.Tensor) -> np.ndarray:
        """Extend the digest by the last steps up to `step`, and return their records.

        sums: int64 [steps, 3], take() added up over all ranks.
        """
        records = np.zeros(len(sums), dtype=_RECORD)
        records["step"] = np.arange(step - len(sums) + 1, step + 1)
        records["epoch"] = (records["step"] - 1) // steps_per_epoch + 1
        records["sums"] = sums.cpu().numpy().view(np.uint64)
        for record in records:
            self.digest = hashlib.blake2b(self.digest + record.tobytes(), digest_size=8).digest()
        self.step = step
        return records

    def __str__(self) -> str:
        return self.digest.hex()

    def state_dict(self) -> dict:
        return {"digest": str(self), "step": self.step}

    def load_state_dict(self, state: dict) -> None:
        self.digest, self.step = bytes.fromhex(state["digest"]), int(state["step"])
        self._delivered.clear()


def batch_sums(ids, labels, parameters, ends):
    """The sums of batches that lie one after the other, [batches, 3]. ids, labels, parameters: one number a
    sample, [n]; ends: where each batch ends in them, int64 [batches].

    From arrays uint64; from int64 tensors, on any device, int64 of the same bits: both count modulo 2^64.
    """
    hashed = _mix(_words(ids))
    augmented = hashed
    for column in parameters:
        augmented = _mix(augmented ^ _words(column))
    parts = (hashed, _mix(hashed ^ _words(labels)), augmented)
    # Differences of running totals, which may pass 2^64 as well: batches of any size at once.
    if isinstance(hashed, torch.Tensor):
        totals = torch.nn.functional.pad(torch.stack(parts).cumsum(1), (1, 0))
        return totals[:, torch.nn.functional.pad(ends, (1, 0))].diff().t().contiguous()
    totals = np.zeros((len(parts), len(hashed) + 1), np.uint64)
    np.cumsum(parts, axis=1, out=totals[:, 1:])
    return np.diff(totals[:, [0, *ends]]).T.copy()


class Comparison(NamedTuple):
    """What two runs have in common. steps: how many both recorded; step and epoch: the first that differs (0:
    none); parts: what differs there, of PARTS."""

    steps: int
    epoch: int
    step: int
    parts: tuple[str, ...]


def read(folder: str) -> np.ndarray:
    """The records of a run's output folder: fields epoch, step, sums; steps ascend. Raises BadInput."""
    path = os.path.join(folder, FILE)
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise BadInput(f"no receipt of a run at {path}: {error.strerror}") from error
    whole = len(content) // _RECORD.itemsize * _RECORD.itemsize  # a killed run may end within a record
    records = np.frombuffer(content[:whole], dtype=_RECORD)
    if not len(records):
        raise BadInput(f"{path} holds no step")
    if (np.diff(records["step"].astype(np.int64)) <= 0).any():
        raise BadInput(f"{path} is no receipt: its steps do not ascend")
    return records


def _open(path: str, step: int):
    """FILE for appending, without the records after `step`: a resumed run writes them again."""
    file = open(path, "ab+", buffering=0)  # noqa: SIM115
    file.seek(0)
    content = file.read()
    whole = content[: len(content) // _RECORD.itemsize * _RECORD.itemsize]
    file.truncate(int((np.frombuffer(whole, dtype=_RECORD)["step"] <= step).sum()) * _RECORD.itemsize)
    return file


def compare(first: np.ndarray, second: np.ndarray) -> Comparison:
    """The first step that both runs recorded and that differs. Arguments: those of read()."""
    steps, left, right = np.intersect1d(first["step"], second["step"], return_indices=True)
    first, second = first[left], second[right]
    other = (first["sums"] != second["sums"]).any(axis=1) | (first["epoch"] != second["epoch"])
    if not other.any():
        return Comparison(len(steps), 0, 0, ())
    place = int(other.argmax())
    differs = (first["sums"] != second["sums"])[place]
    # Other ids have other labels and crops: only the ids are news then.
    parts = (
        PARTS[:1] if differs[0] else tuple(part for part, each in zip(PARTS, differs, strict=True) if each)
    )
    return Comparison(len(steps), int(first["epoch"][place]), int(steps[place]), parts or ("epoch",))


def _words(column):
    """Any column of one number a sample as 64-bit words [n]: uint64, or int64 of a tensor on a device."""
    if isinstance(column, torch.Tensor):
        return column.long()
    column = np.asarray(column)
    if column.dtype.kind == "f":
        column = column.astype(np.float32).view(np.uint32)
    return column.astype(np.uint64)


def _mix(words):
    words = words + _constant(words, 0x9E3779B97F4A7C15)
    words = (words ^ _shifted(words, 30)) * _constant(words, 0xBF58476D1CE4E5B9)
    words = (words ^ _shifted(words, 27)) * _constant(words, 0x94D049BB133111EB)
    return words ^ _shifted(words, 31)


def _constant(like, value: int):
    """As a number of the same 64 bits: tensors count from -2^63."""
    return (value ^ 2**63) - 2**63 if isinstance(like, torch.Tensor) else np.uint64(value)


def _shifted(words, bits: int):
    """To the right, with zeros from the left; a tensor's own shift repeats the sign."""
    if isinstance(words, torch.Tensor):
        return (words >> bits) & (2 ** (64 - bits) - 1)
    return words >> np.uint64(bits)

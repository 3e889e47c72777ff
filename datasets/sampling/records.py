"""The records of a receipt: 32 bytes for each step, with three sums of hashes modulo 2^64."""

import numpy as np

RECORD = np.dtype([("epoch", "<u4"), ("step", "<u4"), ("sums", "<u8", (3,))])


def parse_records(content: bytes) -> tuple[np.ndarray, bool]:
    """Return the whole records of a file, and whether it ends within one: a kill may leave a part of one."""
    count, rest = divmod(len(content), RECORD.itemsize)
    return np.frombuffer(content, RECORD, count), bool(rest)


def find_difference(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the pairs of records of the steps that two runs have, [n, 2], and the number of pairs before the
    first difference. first, second: records with ascending steps."""
    _, left, right = np.intersect1d(first["step"], second["step"], return_indices=True)
    pairs = np.stack((first[left], second[right]), 1)
    sums, epochs = pairs["sums"], pairs["epoch"]
    different = (sums[:, 0] != sums[:, 1]).any(axis=1) | (epochs[:, 0] != epochs[:, 1])
    return pairs, int(different.argmax()) if different.any() else len(pairs)


def mix(values: np.ndarray) -> np.ndarray:
    """Return the hash of each word. values: uint64 of any shape."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))

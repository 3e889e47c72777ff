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

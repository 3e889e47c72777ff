"""The records of a receipt: 32 bytes for each step, with three sums of hashes modulo 2^64."""

import numpy as np

RECORD = np.dtype([("epoch", "<u4"), ("step", "<u4"), ("sums", "<u8", (3,))])


class ReceiptError(ValueError):
    """A receipt cannot be read or compared. The message has the path and the reason."""


def parse_records(content: bytes) -> tuple[np.ndarray, bool]:
    """Return the whole records of a file, and whether it ends within one: a kill may leave a part of one."""
    count, rest = divmod(len(content), RECORD.itemsize)
    return np.frombuffer(content, RECORD, count), bool(rest)

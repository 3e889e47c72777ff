"""The records of a receipt: 32 bytes for each step, with three sums of hashes modulo 2^64.

There are two kinds of receipts, in the output folder of a run:

    receipt.bin         of a Loader: each step once, with the sums of PARTS over the samples of all ranks
    receipt-RANK.bin    of a plain loop: each start of the program and each step that it made, with the sums
                        of LOOP_PARTS over the samples of a rank
    samples-RANK.bin    of a plain loop: the hashes of these samples, 8 bytes each
"""

import numpy as np

FILE = "receipt.bin"
MOST = 2**30  # bytes of FILE: 33 million steps
LOOP_FILE = "receipt-{}.bin"  # of a rank
SAMPLES_FILE = "samples-{}.bin"  # of a rank
PARTS = ("ids", "labels", "augmentation")
LOOP_PARTS = ("samples", "number of samples", "contents")
# A record of step 0 is a start of a plain loop. Its sums are the world size, seed + 1 or 0, and the time in
# ns. Its epoch is the number of its first step, or 0 if that is unknown.
RECORD = np.dtype([("epoch", "<u4"), ("step", "<u4"), ("sums", "<u8", (3,))])


def parse_records(content: bytes) -> tuple[np.ndarray, bool]:
    """Return the whole records of a file, and whether it ends within one: a kill may leave a part of one."""
    count, rest = divmod(len(content), RECORD.itemsize)
    return np.frombuffer(content, RECORD, count), bool(rest)

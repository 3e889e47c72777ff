"""The hash of 64-bit words in the receipts and in the digest of a state."""

import numpy as np

# SplitMix64. Made once: to make a scalar of NumPy costs more than an operation on a short array.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_30 = np.uint64(30)
_27 = np.uint64(27)
_31 = np.uint64(31)


def mix(values: np.ndarray) -> np.ndarray:
    """Return the hash of each word. values: uint64 of any shape."""
    mixed: np.ndarray = values + _STEP  # new memory, which the lines below change
    mixed ^= mixed >> _30
    mixed *= _FIRST
    mixed ^= mixed >> _27
    mixed *= _SECOND
    mixed ^= mixed >> _31
    return mixed

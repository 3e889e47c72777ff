"""The hash of 64-bit words in the receipts and in the digest of a state."""

import numpy as np

# SplitMix64. Made once: to make a scalar of NumPy costs more than an operation on a short array.
_STEP, _FIRST, _SECOND = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)
_30, _27, _31 = np.array([30, 27, 31], np.uint64)


def mix(values: np.ndarray) -> np.ndarray:
    """Return the hash of each word. values: uint64 of any shape."""
    mixed: np.ndarray = values + _STEP  # new memory, which the lines below change
    mixed ^= mixed >> _30
    mixed *= _FIRST
    mixed ^= mixed >> _27
    mixed *= _SECOND
    mixed ^= mixed >> _31
    return mixed


def to_words(rows: np.ndarray) -> np.ndarray:
    """Return rows of bytes as words, uint64 [n, k]; zeros fill the last word of a row. rows: uint8 [n, m]."""
    lack = -rows.shape[1] % 8
    if lack:  # np.pad() takes 16 us
        filled = np.zeros((len(rows), rows.shape[1] + lack), np.uint8)
        filled[:, :-lack] = rows
        rows = filled
    return rows.view(np.uint64)

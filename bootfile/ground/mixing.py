"""The hash of 64-bit words in the receipts and in the digest of a state."""

import numpy as np


def mix(values: np.ndarray) -> np.ndarray:
    """Return the hash of each word. values: uint64 of any shape."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed

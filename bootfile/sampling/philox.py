"""Random numbers as a pure function of their address: Philox4x32-10, vectorised in NumPy.

Source: J. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, and its library Random123,
whose published test vectors the tests check. A counter-based generator has no state. So a sample's
augmentation is the same on any machine, in any order and after any restart.
"""

from collections.abc import Iterable
from enum import IntEnum

import numpy as np
from numpy.typing import ArrayLike

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85


class Operation(IntEnum):
    """The use of a random number, a part of its address: two uses never share a number. Never renumber."""

    ORDER = 0
    CROP_FLIP = 1
    RESIZED_CROP = 2
    SQUARE_CROP = 3
    ITEM = 4
    TRIVIAL_AUGMENT = 5
    COLOR_JITTER = 6
    ERASE = 7
    MIX = 8
    TRANSFORM = 9
    WEIGHTS = 10
    RAND_AUGMENT = 11


def philox4x32(counter: Iterable[ArrayLike], key: int) -> np.ndarray:
    """Encrypt counters with ten rounds. counter: four arrays or numbers that broadcast to one shape S, each
    below 2^32. key: 0 <= key < 2^64. Returns uint64 [4, *S] whose values are below 2^32 (64-bit, so that the
    caller can multiply without overflow)."""
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(word, dtype=np.uint64) for word in counter))
    k0 = key & 0xFFFFFFFF
    k1 = key >> 32
    for _ in range(10):
        # two products of 64 bits: their halves are mixed with the other words and the key of the round
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0 = (product1 >> _HALF) ^ c1 ^ np.uint64(k0)
        c2 = (product0 >> _HALF) ^ c3 ^ np.uint64(k1)
        c1 = product1 & _LOW
        c3 = product0 & _LOW
        k0 = (k0 + _WEYL[0]) & 0xFFFFFFFF
        k1 = (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3])


def draw(seed: int, epoch: ArrayLike, ids: ArrayLike, operation: Operation, block: int = 0) -> np.ndarray:
    """Return four random 32-bit words for every sample id: uint64 [4, n], uniform in 0 <= word < 2^32. epoch:
    below 2^32, one number or one for each id. ids: integers [n] in 0 <= id < 2^64. block: 0 <= block < 2^16;
    each block has four other words."""
    ids = np.asarray(ids).astype(np.uint64)
    return philox4x32((ids & _LOW, ids >> _HALF, epoch, int(operation) + (block << 16)), seed)


def uniform(words: np.ndarray, low: float, high: float) -> np.ndarray:
    """Map 32-bit random words to float64 in low <= value < high."""
    return low + words * ((high - low) / 2**32)


def below(words: np.ndarray, bounds: ArrayLike) -> np.ndarray:
    """Map 32-bit random words to uniform int64 in 0 <= value < bounds (bias below bounds / 2^32)."""
    values: np.ndarray = ((words * np.asarray(bounds, dtype=np.uint64)) >> _HALF).astype(np.int64)
    return values

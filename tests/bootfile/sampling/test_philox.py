import numpy as np
import pytest

from bootfile.sampling.philox import Operation, below, draw, philox4x32

# Published with Random123 (tests/kat_vectors, "philox4x32 10"): counter, key, result.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize("counter, key, expected", VECTORS)
def test_published_vectors(counter, key, expected):
    assert tuple(philox4x32(counter, key[0] | key[1] << 32)) == expected


def test_every_part_of_the_address_counts():
    addresses = [
        (seed, epoch, sample) for seed in (0, 1, 2**32, 2**63) for epoch in (0, 1) for sample in (0, 1, 2**40)
    ]
    words = {
        tuple(draw(seed, epoch, [sample], Operation.CROP_FLIP)[:, 0]) for seed, epoch, sample in addresses
    }
    words |= {tuple(draw(seed, epoch, [sample], Operation.ORDER)[:, 0]) for seed, epoch, sample in addresses}
    assert len(words) == 2 * len(addresses)


def test_below_is_uniform_and_in_range():
    values = below(draw(3, 0, np.arange(90_000), Operation.CROP_FLIP)[0], 9)
    counts = np.bincount(values, minlength=9)
    assert len(counts) == 9 and abs(counts - 10_000).max() < 5 * np.sqrt(10_000)

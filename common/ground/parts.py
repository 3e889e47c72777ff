"""Divide a number of things among ranks."""


def part_of(count: int, rank: int, world_size: int) -> range:
    """Return the part of a rank of 0..count-1: neighbours, of two ranks equally many or one more."""
    return range(count * rank // world_size, count * (rank + 1) // world_size)

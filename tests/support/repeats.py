"""How often the tests with random moments and faults repeat: all of them with REPEATS=1."""

import os

_SHARE = float(os.environ.get("REPEATS", "1"))


def repeats(all_of_them: int, least: int = 1) -> int:
    """Return a share of the repetitions of a test, and no fewer than `least`: one of each kind."""
    return max(least, round(all_of_them * _SHARE))

"""How often: the argument --save_every."""

import argparse
import re
from typing import NamedTuple

_MOST = 1e9  # steps, epochs or seconds


class Interval(NamedTuple):
    """How often to save: `count` of "step", "s" (seconds) or "epoch"."""

    count: float
    unit: str

    def steps(self, steps_per_epoch: int) -> int:
        """0 where seconds count."""
        return {"step": int(self.count), "epoch": int(self.count * steps_per_epoch), "s": 0}[self.unit]

    def __str__(self) -> str:
        return f"{self.count:g}{self.unit}"


def interval(text: str) -> Interval:
    """ "200" (steps), "90s" or "1epoch"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(s|epochs?|steps?)?", text)
    count = float(found[1]) if found else 0
    unit = (found[2] or "step").removesuffix("s") or "s" if found else ""
    if not 0 < count <= _MOST or (unit != "s" and count % 1):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of steps (200), seconds (90s) or epochs (1epoch), at most {_MOST:g}"
        )
    return Interval(count, unit)

"""Learning rates as functions of the step."""

import math
from collections.abc import Callable

KINDS = ("cosine", "linear", "step")
HELP = "to 0, or step: a tenth after 1/3, 2/3 and 8/9 of the epochs (default: cosine)"
_STEPS = (1 / 3, 2 / 3, 8 / 9)  # 30, 60 and 80 of 90 epochs


def factor(kind: str, warmup: float, epochs: int, steps_per_epoch: int, steps: int) -> Callable[[int], float]:
    """step (from 0) -> what the peak rate is multiplied by, for torch's LambdaLR.

    kind: one of KINDS. warmup: epochs in which the rate rises linearly. steps: of the whole training, which
    may end before `epochs`. Source of warm-up: P. Goyal et al., arXiv:1706.02677, section 2.2; of the cosine:
    I. Loshchilov and F. Hutter, arXiv:1608.03983.
    """
    rising = min(round(warmup * steps_per_epoch), steps)

    def of(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        done = (step - rising) / max(1, steps - rising)
        if kind == "step":
            return 0.1 ** sum(step >= share * epochs * steps_per_epoch for share in _STEPS)
        return 1 - done if kind == "linear" else (1 + math.cos(math.pi * done)) / 2

    return of

"""best.pth of a run that continues in a folder without it."""

import contextlib
import math
import os
from collections.abc import Callable, Collection

from bootfile.ground.again import is_file
from bootfile.ground.errors import Unavailable
from bootfile.processes import ranks
from common.checkpoint.scores import Scores

NAME = "best.pth"


def settle(
    scores: Scores, folder: str, at_url: Collection[str], writes: bool, say: Callable[[str], object]
) -> None:
    """Let the next evaluation write best.pth if the folder lacks it, because only checkpoints/ was copied, or
    --resume PATH began a new folder: no later score has to exceed that of a file which is not there.

    A Checkpointer calls it on every rank when it has loaded a checkpoint. Rank 0 decides and prints the line.
    at_url: names of results at the URL of the folder. writes: whether this start writes best.pth.
    """
    is_lost = False
    if ranks.is_first() and writes and math.isfinite(scores.best) and NAME not in at_url:
        with contextlib.suppress(Unavailable):  # the mount does not answer: the file may be there
            is_lost = not is_file(os.path.join(folder, NAME))
    if not ranks.broadcast_object(is_lost):
        return
    say(
        f"{folder} has no {NAME} (the best evaluation so far: {scores.best_at or scores.best}): the next one "
        "writes it, whatever its score"
    )
    scores.best = -math.inf

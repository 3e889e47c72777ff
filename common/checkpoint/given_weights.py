"""Begin a job with the weights of a file (--weights), or only evaluate them (--evaluate). A job without these
options does not load this module."""

import os
from typing import TYPE_CHECKING, Any

from bootfile.exact import recorded
from bootfile.exact.choose import newest
from bootfile.exact.files import Refused
from bootfile.ground.again import refusal
from bootfile.processes import ranks, signals
from common.checkpoint import weights

if TYPE_CHECKING:
    from common.checkpoint.checkpointer import Checkpointer


def resume_to_evaluate(job: "Checkpointer", wanted: str) -> int:
    """Load only weights, for --evaluate, and return the last step. wanted: the value of --resume. Raises
    BadInput."""
    path = job.args.weights
    if not path:
        path = newest(wanted)

        def compare_with_record() -> None:
            """Raise BadInput if the file is a checkpoint, and not the state that its run has recorded."""
            try:
                if os.path.exists(f"{path}.json"):
                    recorded.verify(path)
            except Refused as reason:
                raise refusal(f"--resume {path}: {reason}", reason) from None

        ranks.call_on_first(compare_with_record)
    load(job, path, complete=True)
    # Exact.begin() is not called: nothing is trained, and a signal only ends the evaluation.
    signals.watch(job.args.grace, ranks.store())
    job.log.start(job.loader, job.total_steps or 0, job.total_steps)
    return job.total_steps or 0


def load(job: "Checkpointer", path: str, complete: bool = False) -> None:
    """Load a file of weights into the model, on every rank. complete: see weights.load()."""
    given = vars(job.args)
    arch = given.get("arch")
    job.log.info(weights.load(path, job.model, complete, arch, given.get("partial_weights", False)))
    average: Any = job.state.objects.get("ema")  # it begins at, or consists of, these weights
    if average is not None:
        average.module.load_state_dict(job.model.state_dict())
    line = weights.compare_class_names(path, getattr(job.loader.plan.index, "class_names", ()))
    if line and not weights.is_published(arch, path):
        job.log.info(line)

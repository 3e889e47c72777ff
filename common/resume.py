"""Which checkpoint a run goes on from."""

import os
from collections.abc import Callable

from common import checkpoint
from common.exits import BadInput

_KINDS = {
    "step": int, "run": str, "identity": dict, "objects": dict, "schedule": dict, "random": dict,
    "bad_steps": int, "bad_in_a_row": int, "best": float,
}  # fmt: skip


def choose(wanted: str, folder: str, load: Callable[[dict], None]) -> tuple[str, dict | None]:
    """(path, state) of the newest checkpoint that is whole and belongs to this run; ("", None) where there is
    none at all.

    wanted: "auto" looks in `folder`; else the path of a checkpoint, or of a folder of them. load(state)
    continues from it, or raises checkpoint.Refused. Every file that is refused is printed with the reason.
    Raises BadInput if there are checkpoints and none can be used, or if `wanted` does not exist.
    """
    if wanted == "auto":
        paths = checkpoint.found(folder)
    elif os.path.isdir(wanted):
        paths = checkpoint.found(wanted) or checkpoint.found(os.path.join(wanted, "checkpoints"))
        if not paths:
            raise BadInput(f"--resume {wanted}: there is no checkpoint in this folder")
    elif os.path.exists(wanted):
        paths = [wanted]
    else:
        raise BadInput(f"--resume {wanted}: there is no such file or folder")
    refused = []
    for path in paths:
        try:
            state = checkpoint.read(path)
            load(state)
            return path, state
        except checkpoint.Refused as reason:
            refused.append(f"{path}: {reason}")
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
            refused.append(f"{path}: it does not hold the state of this job: {_first_line(error)}")
        print(f"checkpoint refused: {refused[-1]}", flush=True)
    if refused and os.path.isfile(wanted) and not os.path.exists(f"{wanted}.json"):
        raise BadInput(f"--resume {refused[0]}; to take its weights only: --weights {wanted}")
    if refused:
        raise BadInput(f"no checkpoint can be used: {'; '.join(refused)} (--resume never starts anew)")
    return "", None


def newest(path: str) -> str:
    """Return the path of the newest checkpoint in a folder; a path that is no folder's as it is."""
    return next(iter(checkpoint.found(path) or checkpoint.found(os.path.join(path, "checkpoints"))), path)


def check(state: dict, version: int, identity: dict, weights: dict, steps: int) -> None:
    """Raises Refused, with both values, unless the state is of this format version and belongs to the run
    that these arguments, these weights (a state_dict) and this number of steps describe."""
    if state.get("format") != version:
        raise checkpoint.Refused(f"its format is {state.get('format')}, this program reads {version}")
    for name, kind in _KINDS.items():
        if type(state.get(name)) is not kind:
            raise checkpoint.Refused(
                f"its {name} is {state.get(name)!r:.80}, not of the type {kind.__name__}"
            )
    if state["step"] < 0:
        raise checkpoint.Refused(f"its step is {state['step']}")
    saved = state["identity"]
    for name in sorted(saved.keys() | identity.keys()):
        if saved.get(name) != identity.get(name):
            raise checkpoint.Refused(f"its {name} is {saved.get(name)}, this run's is {identity.get(name)}")
    theirs = state["objects"]["model"]
    for name in sorted(theirs.keys() | weights.keys()):
        there, here = (list(each[name].shape) if name in each else "missing" for each in (theirs, weights))
        if there != here:
            raise checkpoint.Refused(f"its model is another: {name} is {there} there and {here} here")
    if state["step"] > steps:
        raise checkpoint.Refused(
            f"it has done {state['step']} steps, and this run ends at {steps} (--epochs, --max_steps)"
        )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__} {next(iter(str(error).splitlines()), '')}"

"""Which checkpoint a run goes on from."""

import os
from collections.abc import Callable

from common import checkpoint
from common.exits import BadInput


def choose(wanted: str, folder: str, check: Callable[[dict], None]) -> tuple[str, dict | None]:
    """(path, state) of the newest checkpoint that is whole and belongs to this run; ("", None) where there is
    none at all.

    wanted: "auto" looks in `folder`; else the path of a checkpoint, or of a folder of them. check(state)
    raises checkpoint.Refused. Every file that is refused is printed with the reason. Raises BadInput where
    there are checkpoints and none can be used, or not what was wanted.
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
            check(state)
            return path, state
        except checkpoint.Refused as reason:
            refused.append(f"{path}: {reason}")
        except (KeyError, TypeError, AttributeError):
            refused.append(f"{path}: what it holds is not the state of a job")
        print(f"checkpoint refused: {refused[-1]}", flush=True)
    if refused:
        raise BadInput(f"no checkpoint can be used: {'; '.join(refused)} (--resume never starts anew)")
    return "", None


def check(state: dict, version: int, identity: dict, weights: dict, steps: int) -> None:
    """Raises Refused, with both values, unless the state is of this format version and belongs to the run
    that these arguments, these weights (a state_dict) and this number of steps describe."""
    if state.get("format") != version:
        raise checkpoint.Refused(f"its format is {state.get('format')}, this program reads {version}")
    saved = state["identity"]
    for name in sorted(saved.keys() | identity.keys()):
        if saved.get(name) != identity.get(name):
            raise checkpoint.Refused(f"its --{name} is {saved.get(name)}, this run's is {identity.get(name)}")
    theirs = state["objects"]["model"]
    for name in sorted(theirs.keys() | weights.keys()):
        there, here = (list(each[name].shape) if name in each else "missing" for each in (theirs, weights))
        if there != here:
            raise checkpoint.Refused(f"its model is another: {name} is {there} there and {here} here")
    if state["step"] > steps:
        raise checkpoint.Refused(
            f"it has done {state['step']} steps, and this run ends at {steps} (--epochs, --max_steps)"
        )

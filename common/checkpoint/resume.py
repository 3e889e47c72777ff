"""Choose the checkpoint that a run continues from, and check that it may write to its output folder."""

import argparse
import os
from collections.abc import Callable, Iterable

import torch

from common.checkpoint import files as checkpoint
from common.console import arguments
from common.distributed import ranks
from common.ground.exits import BadInput
from common.run import output, starts

_KINDS = {
    "step": int, "run": str, "identity": dict, "objects": dict, "schedule": dict,
    "bad_steps": int, "bad_in_a_row": int, "best": float,
}  # fmt: skip


def claim(args: argparse.Namespace, is_own: Callable[[dict], bool] | None = None) -> None:
    """Make rank 0 the only writer of args.output; call it on every rank before anything is written.

    is_own: see refusal(). By default a start belongs to this run if all its settings are equal. A job without
    a Checkpointer leaves it out; then its results are uploaded from now on, if the output has a URL.

    The results in the folder of an output with a URL are not checked here: those at the URL are used first.
    Raises BadInput on every rank if another job holds the folder, or if the job would replace results in it.
    """
    error = None
    if ranks.is_first():
        try:
            args.output.hold()
            if not args.output.url and (text := refusal(args, is_own or _is_same_command(args))):
                raise BadInput(text)
        except BadInput as refused:
            error = refused
    if ranks.world_size() > 1:
        from common.distributed import barrier  # a job of one process does not need it

        barrier.wait_for_all("output folder", "to open the output folder", error)
    elif error:
        raise error
    if args.output.url and is_own is None and ranks.is_first():
        from common.checkpoint import mirror  # only a job with a URL needs it

        mirror.Mirror(args.output).start(0)


def refusal(
    args: argparse.Namespace, is_own: Callable[[dict], bool], at_url: Iterable[str] = ()
) -> str | None:
    """Return the reason if a job may not write to args.output: it would replace results. None if it may.

    args: the options output and, if the job can resume, resume.
    is_own: called with a start (a line of starts.jsonl) that has not saved a checkpoint. It returns whether
        the start belongs to this run; then the job may begin again.
    at_url: names of results at the URL.
    """
    folder, resumes_from = args.output.folder, wanted(args)
    results, starts_before = output.results(folder), starts.read(folder)
    has_checkpoint = bool(output.checkpoints(folder))
    if resumes_from == "auto":
        at_url = ()
    results += [name for name in at_url if name not in results]
    is_begun = not has_checkpoint and not at_url and starts_before and is_own(starts_before[-1])
    if not results or is_begun or (resumes_from == "auto" and has_checkpoint):
        return None
    names = ", ".join(results[:4]) + (f" and {len(results) - 4} more" if len(results) > 4 else "")
    has_option = has_checkpoint and resumes_from
    remedy = f"leave out --resume {resumes_from} to resume that run, " if has_option else ""
    return (
        f"{args.output} holds results of a run, and this start would replace them "
        f"({names}): {remedy}use another --output_dir, or remove the folder"
    )


def wanted(args: argparse.Namespace) -> str | None:
    """Return what the job continues from: --resume, but "auto" if it is the path of another run's checkpoint
    and a start with the same path has saved checkpoints in the output folder. None: the job cannot resume."""
    given, folder = getattr(args, "resume", None), args.output.folder
    starts_before = starts.read(folder) if output.checkpoints(folder) else []
    is_restart = any(start["settings"].get("resume", "") == given != "never" for start in starts_before)
    return "auto" if is_restart else given


def _is_same_command(args: argparse.Namespace) -> Callable[[dict], bool]:
    settings = arguments.settings(args)
    return lambda start: start["settings"] == settings and start["environment"].get("job") == starts.job()


def choose(wanted: str, folder: str, load: Callable[[dict], None]) -> tuple[str, dict | None]:
    """Return (path, state) of the newest whole checkpoint of this run; ("", None) without checkpoints.

    wanted: "auto" for the checkpoints in `folder`, or the path of a checkpoint or of a folder of checkpoints.
    load: called with the state of a file; it restores the state, or raises checkpoint.Refused. Every refused
    file is printed with the reason. Raises BadInput if there are checkpoints and none can be used, or if
    `wanted` does not exist.
    """
    if wanted == "auto":
        paths = checkpoint.list_newest_first(folder)
    elif os.path.isdir(wanted):
        paths = _list(wanted)
        if not paths:
            raise BadInput(f"--resume {wanted}: no checkpoint in this folder")
    elif os.path.exists(wanted):
        paths = [wanted]
    else:
        raise BadInput(f"--resume {wanted}: no such file or folder")
    refused = []
    for path in paths:
        try:
            state = checkpoint.read(path)
            load(state)
            return path, state
        except BadInput as error:  # this is the right checkpoint: do not try older ones
            raise BadInput(f"{path}: {error}") from None
        except checkpoint.Refused as reason:
            refused.append(f"{path}: {reason}")
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
            refused.append(f"{path}: it does not hold the state of this job: {_first_line(error)}")
        print(f"checkpoint refused: {refused[-1]}", flush=True)
    if refused and os.path.isfile(wanted) and not os.path.exists(f"{wanted}.json"):
        raise BadInput(f"--resume {refused[0]}; to take its weights only: --weights {wanted}")
    if refused:
        raise BadInput(
            f"no checkpoint can be used: {'; '.join(refused)} (to start a new run, use another --output_dir)"
        )
    return "", None


def newest(path: str) -> str:
    """Return the path of the newest checkpoint in a folder; another path is returned as it is."""
    return next(iter(_list(path)), path)


def _list(path: str) -> list[str]:
    """Return the checkpoints in a folder, or in the output folder of a run, the newest first."""
    return checkpoint.list_newest_first(path) or checkpoint.list_newest_first(
        os.path.join(path, "checkpoints")
    )


def check(state: dict, version: int, identity: dict, weights: dict, steps: int) -> None:
    """Check that the state of a checkpoint has this format version and belongs to this run.

    identity: the options that identify the run, name -> value. weights: the state_dict of the model. Raises
    Refused with both values if they differ, and BadInput if the checkpoint is of a later step than `steps`.
    """
    if state.get("format") != version:
        raise checkpoint.Refused(f"its format is {state.get('format')}, this program reads {version}")
    for name, kind in _KINDS.items():
        if type(state.get(name)) is not kind:
            raise checkpoint.Refused(
                f"its {name} is {state.get(name)!r:.80}, not of the type {kind.__name__}"
            )
    if state["step"] < 0:
        raise checkpoint.Refused(f"its step is {state['step']}, expected at least 0")
    saved = state["identity"]
    for name in sorted(saved.keys() | identity.keys()):
        if saved.get(name) != identity.get(name):
            raise checkpoint.Refused(f"its {name} is {saved.get(name)}, this run's is {identity.get(name)}")
    theirs = state["objects"]["model"]
    for name in sorted(theirs.keys() | weights.keys()):
        there, here = (_shape(name, each[name]) if name in each else "missing" for each in (theirs, weights))
        if there != here:
            raise checkpoint.Refused(f"its model is different: {name} is {there}, this run's is {here}")
    if state["step"] > steps:
        raise BadInput(
            f"it is of step {state['step']}, and this run ends at step {steps}: raise --epochs or "
            "--max_steps, or use another --output_dir"
        )


def _shape(name: str, value: object) -> object:
    """Return the shape of a tensor; for the extra state of a module, that it has one."""
    if name.endswith("_extra_state") or not isinstance(value, torch.Tensor):
        return "present"
    return list(value.shape)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__} {next(iter(str(error).splitlines()), '')}"

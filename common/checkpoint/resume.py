"""Which checkpoint a run goes on from, and whether it may write to its output folder."""

import argparse
import os
from collections.abc import Callable, Iterable

from common import arguments, output, starts
from common.checkpoint import files as checkpoint
from common.distributed import ranks
from common.exits import BadInput

_KINDS = {
    "step": int, "run": str, "identity": dict, "objects": dict, "schedule": dict, "random": dict,
    "bad_steps": int, "bad_in_a_row": int, "best": float,
}  # fmt: skip


def claim(args: argparse.Namespace, is_own: Callable[[dict], bool] | None = None) -> None:
    """Make rank 0 the only writer of args.output; call it on every rank before anything is written.

    is_own: see refusal(); by default a start is of this run if all its settings are equal. A folder that
    stands for a URL is not looked into: what is at the URL comes first. Raises BadInput on every rank if
    another job holds the folder, or if the job would replace results in it. Without is_own the job has no
    Checkpointer: then its results are uploaded from now on, if the output has a URL.
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
        from common.distributed import barrier  # a job of one process waits for nobody

        barrier.wait_for_all("output folder", "to open the output folder", error)
    elif error:
        raise error
    if args.output.url and is_own is None and ranks.is_first():
        from common.checkpoint import mirror  # only a job with a URL needs it

        mirror.Mirror(args.output).start(0)


def refusal(
    args: argparse.Namespace, is_own: Callable[[dict], bool], at_url: Iterable[str] = ()
) -> str | None:
    """Return why a job may not write to args.output: it would replace results. None if it may.

    args: output, and resume if the job can resume: a PATH becomes "auto" if a start with the same PATH has
    saved checkpoints in the folder. is_own(start): whether a start (a line of starts.jsonl) that has saved no
    checkpoint is of this run, which then starts again. at_url: names of results at the URL.
    """
    folder, wanted = args.output.folder, getattr(args, "resume", None)
    results, starts_before = output.results(folder), starts.read(folder)
    has_checkpoint = bool(output.checkpoints(folder))
    is_restart = any(start["settings"].get("resume", "") == wanted != "never" for start in starts_before)
    if has_checkpoint and is_restart:
        args.resume = wanted = "auto"
    if wanted == "auto":
        at_url = ()
    results += [name for name in at_url if name not in results]
    is_begun = not has_checkpoint and not at_url and starts_before and is_own(starts_before[-1])
    if not results or is_begun or (wanted == "auto" and has_checkpoint):
        return None
    names = ", ".join(results[:4]) + (f" and {len(results) - 4} more" if len(results) > 4 else "")
    remedy = f"leave out --resume {wanted} to continue that run, " if has_checkpoint and wanted else ""
    return (
        f"{args.output} holds results of a run, and this start would replace them "
        f"({names}): {remedy}take another --output_dir, or remove the folder"
    )


def _is_same_command(args: argparse.Namespace) -> Callable[[dict], bool]:
    settings = arguments.settings(args)
    return lambda start: start["settings"] == settings and start["environment"].get("job") == starts.job()


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
        except BadInput as error:  # the right one, and not older ones in its place
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
            f"no checkpoint can be used: {'; '.join(refused)} (take another --output_dir to begin anew)"
        )
    return "", None


def newest(path: str) -> str:
    """Return the path of the newest checkpoint in a folder; a path that is no folder's as it is."""
    return next(iter(checkpoint.found(path) or checkpoint.found(os.path.join(path, "checkpoints"))), path)


def check(state: dict, version: int, identity: dict, weights: dict, steps: int) -> None:
    """Raises Refused, with both values, unless the state is of this format version and belongs to the run
    that these arguments and these weights (a state_dict) describe; BadInput if it has done more than `steps`.
    """
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
        raise BadInput(
            f"it has done {state['step']} steps, and this run ends at {steps}: raise --epochs or "
            "--max_steps, or take another --output_dir"
        )


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__} {next(iter(str(error).splitlines()), '')}"

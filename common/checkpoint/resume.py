"""Choose the checkpoint that a run continues from, and check that it may write to its output folder."""

import argparse
import os
from collections.abc import Callable, Iterable
from typing import Any

from common.console import arguments
from common.distributed import barrier, ranks
from common.exact import files as checkpoint
from common.ground.exits import BadInput
from common.ground.files import check_rename
from common.ground.results import checkpoints
from common.run import output, starts


def claim(args: argparse.Namespace) -> None:
    """Make rank 0 the only writer of args.output, for a job that saves no checkpoints. Call it on every rank
    before anything is written. If the output has a URL, the results are uploaded from now on.

    Raises BadInput on every rank if another job writes to the output, or if the job would replace results.
    """
    error = None
    if ranks.is_first():
        settings = arguments.settings(args)

        def is_same_command(start: dict) -> bool:
            return start["settings"] == settings and start["environment"].get("job") == starts.job()

        try:
            mirror = take_output(args, is_same_command)
            if mirror:
                mirror.start(0)
        except BadInput as refused:
            error = refused
    barrier.wait_for_all("output folder", "to open the output folder", error)


def take_output(args: argparse.Namespace, is_own: Callable[[dict], bool], keep: int = 1) -> Any:
    """Become the only job that writes to args.output; call it on rank 0. If the output has a URL, return its
    Mirror, which has restored the newest checkpoint if --resume is auto.

    is_own: see refusal(). keep: the number of checkpoints to keep at the URL. Raises BadInput.
    """
    mirror = None
    args.output.hold()
    check_rename(args.output.folder)
    if args.output.url:
        from common.checkpoint.mirror import PATIENCE, Mirror  # only a job with a URL needs it

        patience = getattr(args, "upload_timeout", PATIENCE)
        mirror = Mirror(args.output, getattr(args, "resume", None), keep, patience)
    if reason := refusal(args, is_own, mirror.results() if mirror else ()):
        raise BadInput(reason)
    return mirror


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
    has_checkpoint = bool(checkpoints(folder))
    if resumes_from == "auto":
        at_url = ()
    results += [name for name in at_url if name not in results]
    is_begun = not has_checkpoint and not at_url and starts_before and is_own(starts_before[-1])
    if not results or is_begun or (resumes_from == "auto" and has_checkpoint):
        return None
    names = ", ".join(results[:4]) + (f" and {len(results) - 4} more" if len(results) > 4 else "")
    can_resume = has_checkpoint and resumes_from
    remedy = f"leave out --resume {resumes_from} to resume that run, " if can_resume else ""
    return (
        f"{args.output} holds results of a run, and this start would replace them "
        f"({names}): {remedy}use another --output_dir, or remove the folder"
    )


def wanted(args: argparse.Namespace) -> str | None:
    """Return what the job continues from: --resume, but "auto" if it is the path of another run's checkpoint
    and a start with the same path has saved checkpoints in the output folder. None: the job cannot resume."""
    given, folder = getattr(args, "resume", None), args.output.folder
    starts_before = starts.read(folder) if checkpoints(folder) else []
    is_restart = any(start["settings"].get("resume", "") == given != "never" for start in starts_before)
    return "auto" if is_restart else given


def choose(
    wanted: str, folder: str, load: Callable[[dict], None], whole: bool = True
) -> tuple[str, dict | None]:
    """Return (path, state) of the newest whole checkpoint of this run; ("", None) without checkpoints.

    wanted: "auto" for the checkpoints in `folder`, or the path of a checkpoint or of a folder of checkpoints.
    load: called with the state of a file; it restores the state, or raises checkpoint.Refused. Every refused
    file is printed with the reason.
    whole: as for checkpoint.load().
    Raises BadInput if there are checkpoints and none can be used, or if `wanted` does not exist.
    """
    if wanted == "auto":
        paths = checkpoint.list_newest_first(folder)
    elif os.path.isdir(wanted):
        paths = _list(wanted)
    else:
        paths = [wanted] if os.path.exists(wanted) else []
    if not paths and wanted != "auto":
        raise BadInput(f"--resume {wanted}: no such file, or folder with checkpoints")
    refused = []
    for path in paths:
        try:
            state = checkpoint.read(path, whole)
            load(state)
            return path, state
        except BadInput as error:  # this is the right checkpoint: do not try older ones
            raise BadInput(f"{path}: {error}") from None
        except checkpoint.Refused as reason:
            refused.append(f"{path}: {reason}")
        except Exception as error:  # load_state_dict() failed: the file is of another program
            text = checkpoint.first_line(error)
            refused.append(f"{path}: it does not hold the state of this job: {text}")
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

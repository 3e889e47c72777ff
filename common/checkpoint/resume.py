"""Choose the checkpoint that a run continues from, and check that it may write to its output folder."""

import argparse
import os
from collections.abc import Callable, Iterable
from typing import Any

from bootfile.ground.errors import BadInput, print_line
from bootfile.ground.mounts import describe_mount
from bootfile.ground.results import checkpoints
from bootfile.processes import ranks
from bootfile.records import read_starts
from common.console import arguments
from common.ground.files import check_rename
from common.platform import place
from common.run import environment
from common.run.output import Output, list_results


def claim(args: argparse.Namespace, output: Output) -> None:
    """Make rank 0 the only writer of the output, for a job that saves no checkpoints. Call it on every rank.
    If the output has a URL, the results are uploaded from now on. Raises BadInput on every rank if another
    job writes to the output, or if the job would replace results."""
    error = None
    if ranks.is_first():  # the others wait below until it has opened the output
        settings = arguments.settings(args)

        def is_same_command(start: dict) -> bool:
            return start["settings"] == settings and start["environment"].get("job") == environment.job()

        try:
            if mirror := take_output(args, output, is_same_command):
                mirror.start(0)
        except BadInput as refused:
            error = refused
    from common.distributed import barrier  # most jobs have a Checkpointer

    # every rank comes here: without the error of rank 0 the others would train and lose their results
    barrier.wait_for_all("output folder", "to open the output folder", error)


def take_output(
    args: argparse.Namespace,
    output: Output,
    is_own: Callable[[dict], bool],
    keep: int = 1,
    is_later: bool = False,
) -> Any:
    """Become the only job that writes to the output; call it on rank 0. If the output has a URL, return its
    Mirror, which has restored the newest checkpoint if --resume is auto.

    is_own, is_later: see refuse_results(). keep: checkpoints to keep at the URL. Raises BadInput.
    """
    mirror = None
    output.hold()
    # before the training: a file system that cannot replace a file shows it at the first save, hours later
    check_rename(output.folder)
    count = place.count_restarts(os.environ)
    if count and not output.url and not list_results(output.folder) and not read_starts(output.folder):
        mount = describe_mount(output.folder)
        on = f" (this folder is on {mount})" if mount else ""
        print_line(
            f"warning: restart {count} of this job, and {output} holds no results: if an earlier start had "
            f"some, its file system is not mounted here{on}"
        )
    if output.url:
        from common.checkpoint.mirror import Mirror  # only a job with a URL needs it

        # It restores the newest checkpoint of the URL, if the job may continue from it.
        mirror = Mirror(output, vars(args).get("resume"), keep)
    refuse_results(args, output, is_own, mirror.results() if mirror else [], is_later)
    return mirror


def refuse_results(
    args: argparse.Namespace,
    output: Output,
    is_own: Callable[[dict], bool],
    at_url: Iterable[str] = (),
    is_later: bool = False,
) -> None:
    """Raise BadInput if a job would replace results in its output.

    is_own: called with a start (a line of starts.jsonl) that has not saved a checkpoint. It returns whether
        the start belongs to this run; then the job may begin again.
    at_url: names of results at the URL.
    is_later: whether an elastic job is in its second generation or a later one.
    """
    folder = output.folder
    source = find_source(args, output, is_later)
    continues = source == "auto"
    has_checkpoint = bool(checkpoints(folder))
    at_url = () if continues else at_url  # what a restart continues from is not replaced
    results = list(dict.fromkeys([*list_results(folder), *at_url]))
    if not results or (continues and has_checkpoint):
        return
    # a start that was killed before its first save has left reports, but nothing that could be lost
    before = read_starts(folder)
    if before and not has_checkpoint and not at_url and is_own(before[-1]):
        return
    more = f" and {len(results) - 4} more" if len(results) > 4 else ""
    remedy = f"leave out --resume {source} to resume that run, " if has_checkpoint and source else ""
    raise BadInput(
        f"{output} holds results of a run, and this start would replace them "
        f"({', '.join(results[:4])}{more}): {remedy}use another --output_dir, or remove the folder"
    )


def find_source(args: argparse.Namespace, output: Output, is_later: bool = False) -> str | None:
    """Return what the job continues from: the value of --resume, or "auto" if the checkpoints in the output
    folder are newer than the one that it names. None: the job cannot resume. is_later: as above."""
    resume: str | None = vars(args).get("resume")
    if not checkpoints(output.folder):
        return resume
    # the generation before has saved these checkpoints, and no living process has a later state
    if is_later:
        return "auto"
    # an earlier start of the same command has begun at that path, and has saved these checkpoints since
    paths = {start["settings"].get("resume", "") for start in read_starts(output.folder)} - {"never"}
    return "auto" if resume in paths else resume

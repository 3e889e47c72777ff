"""The output folder of a run: find it, list its results, and hold it for one job (FolderLock).

It takes --output_dir, which is checked once, by open_output(): a folder that can be written, or an s3:// or
obs:// URL below a bucket. Only rank 0 holds the folder. Outside is a mount that is missing: its folder is one
of the disk below it (a platform's restart that finds no results is a warning, resume.py).

    output_dir/train-20261121T072100Z/    a run without --output_dir: the job and the time of its start
    output_dir/latest                     a link to the newest of these
    output_dir/index/                     indexes and generated images, for all runs

This module imports no torch.
"""

import argparse
import atexit
import contextlib
import itertools
import math
import os
import re
import sys
import tempfile
import time

from bootfile.ground.errors import BadInput, print_line
from bootfile.ground.files import explained
from bootfile.ground.folder_lock import FolderLock, missing_folders, remove_empty
from bootfile.ground.mounts import LEASE
from bootfile.ground.results import CHECKPOINTS, WEIGHTS, checkpoints, refuse_links
from common.ground import endings
from common.ground.files import HOME, is_url
from common.platform.signs import HELD, STARTED_BY
from common.platform.topology import Topology

PARENT = os.path.join(HOME, "output_dir")
LATEST = "latest"
SNAPSHOTS = ".mirror"  # copies of the files that are being sent to the URL (mirror.py)
_FOLDERS = (CHECKPOINTS, LEASE, SNAPSHOTS)  # in RUN, which a job makes, writes to and deletes from
_OWN = "BOOTFILE_RUN_FOLDER"  # a parent passes the folder that it made to the processes that it starts
_REPORTS = re.compile(r"metrics\.jsonl|receipt\.bin|events\.out\.tfevents\..*")


class Output:
    """The output of a run: a folder of this node, and its s3:// or obs:// URL if it has one.

    folder: absolute path, not made before hold(). url: common/checkpoint/mirror.py uploads to it.
    is_default: the folder was made for this run and gets the link `latest`.
    """

    def __init__(self, folder: str, url: str | None = None, is_default: bool = False):
        self.folder = folder
        self.url = url
        self.is_default = is_default
        on_node = f" on this node (it writes to {folder})" if url else ""
        refusal = f"{self} belongs to another job that is running{on_node}: give every job an --output_dir"
        self._lock = FolderLock(folder, f"{refusal} of its own")

    def __str__(self) -> str:
        return self.url or self.folder

    @property
    def index_folder(self) -> str:
        """Return the folder of indexes and generated images. Runs without an --output_dir share one."""
        return os.path.join(PARENT if self.is_default else self.folder, "index")

    def hold(self) -> None:
        """Make this process the only one that writes to the folder until it ends, on rank 0. It makes the
        folder, and waits up to 10 s for a job that is just ending. Raises BadInput if another job holds the
        folder, or if a folder in it is a link."""
        if HELD in os.environ:  # by the process that has started this one
            return
        refuse_links(self.folder, _FOLDERS)
        self._lock.hold()
        endings.at_end("folder", lambda _: self.release())  # after everything is written

    def begin(self) -> None:
        """Make the link `latest` point to this folder if it is a default one; ignored if the file system has
        no links. Called on rank 0 before the first step: `latest` keeps its folder if a job fails before."""
        is_held = self._lock.is_held or HELD in os.environ  # by this process, or by the one that started it
        if not is_held or not self.is_default:
            return
        link = os.path.join(os.path.dirname(self.folder), LATEST)
        if os.path.lexists(link) and not os.path.islink(link):
            return  # a file or a folder of the user
        new = f"{self.folder}.{LATEST}"
        with contextlib.suppress(OSError):
            # a new link takes the place of the old one: at each moment there is a link
            os.symlink(os.path.basename(self.folder), new)
            os.replace(new, link)
        with contextlib.suppress(OSError):  # only if it could not replace the old link
            os.unlink(new)

    def release(self) -> None:
        """Release the folder for other jobs. A start that was refused leaves the folder as it was."""
        self._lock.release()


def open_output(args: argparse.Namespace, topology: Topology) -> Output:
    """Return the output of a job. Each process of the job calls it once, when it makes its Run.

    args: output_dir (a folder, an s3:// or obs:// URL, or None for a new folder in PARENT) and, if
    the job has them, prof and evaluate. Raises BadInput; nothing is left on the disk then.
    """
    if args.output_dir:
        return Output(folder_of(args.output_dir), args.output_dir if is_url(args.output_dir) else None)
    # one process of the job makes the folder, and its name has the time: the others must not
    writes = topology.rank == 0 and not writes_nothing(args)
    folder = make_default() if writes or STARTED_BY in os.environ else local_output(PARENT)
    return Output(folder, is_default=os.environ.get(_OWN) == folder)


def writes_nothing(args: argparse.Namespace) -> bool:
    """Return whether the job only measures (--prof) or evaluates (--evaluate). Many jobs have neither."""
    return any(vars(args).get(name) for name in ("prof", "evaluate"))


def folder_of(given: str) -> str:
    """Return the folder of this node for an --output_dir, which may be an s3:// or obs:// URL. Raises
    BadInput if it is not writable. The folder is not made."""
    if not is_url(given):
        return local_output(given)
    from common.object_store.location import parse, scratch_folder  # only a job with a URL needs them

    # at the root of a bucket the files of all jobs would mix
    if not parse(given).prefix:
        raise BadInput(
            f"{given} is a whole bucket: give every job a folder of its own, {given.rstrip('/')}/NAME"
        )
    return local_output(scratch_folder("outputs", given))


def local_output(path: str, option: str = "output_dir") -> str:
    """Return the real, absolute path of a folder for results. Raises BadInput if it cannot be made or
    written. Nothing is left on the disk."""
    # other addresses would become a local folder of that name
    if "://" in path:
        raise BadInput(
            f"{option} {path} is a URL; expected a folder, s3:// or obs:// (these only for output_dir): let "
            "the platform copy the folder (ModelArts: an output named train_url)"
        )
    path = os.path.abspath(path)
    missing = missing_folders(path)
    parent = os.path.dirname(missing[0]) if missing else path
    with explained(f"{option} {path} cannot be written in {parent}"):
        with contextlib.suppress(FileNotFoundError):
            os.stat(path)  # its name may be too long
        # a file system may be mounted read-only, or full: only a write shows it
        with tempfile.TemporaryFile(dir=parent) as file:
            file.write(b"\0" * 4096)
    return os.path.realpath(path)  # `latest` may point to another folder later


def make_default() -> str:
    """Make the folder of a job without --output_dir and return its path; it is deleted at the end if it is
    empty. A process that another one started finds in the environment the folder that its parent has made.
    Raises BadInput."""
    parent = local_output(PARENT)
    if STARTED_BY in os.environ:
        return os.environ.get(_OWN, parent)
    job = os.path.splitext(os.path.basename(sys.argv[0]))[0].strip("-") or "job"
    name = f"{job}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    # what this start makes it also removes at the end, if nothing was written
    made = missing_folders(parent)
    with explained(f"output_dir {parent} cannot be written"):
        os.makedirs(parent, exist_ok=True)
        for number in itertools.count(1):
            path = os.path.join(parent, f"{name}-{number}" if number > 1 else name)
            with contextlib.suppress(FileExistsError):  # another job was started in the same second
                os.mkdir(path)
                break
    made.append(path)
    # twice: a process that exits before main() calls none of the functions of endings
    endings.at_end("folder", lambda _: remove_empty(made))
    atexit.register(remove_empty, made)
    os.environ[_OWN] = path
    print_line(f"output_dir {path}")
    return path


def list_results(folder: str) -> list[str]:
    """Return the names of the results in the folder of a run: checkpoints, then weights, then reports."""
    names: list[str] = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    # classes.json and starts.jsonl do not count: a start may write them before it has a result
    results = [f"{CHECKPOINTS}/{name}" for name in checkpoints(folder)]
    results += filter(WEIGHTS.fullmatch, names)
    reports = [name for name in filter(_REPORTS.fullmatch, names) if os.path.getsize(f"{folder}/{name}")]
    # If there is only a receipt, the job was killed during its first report and has no results.
    return results if reports == ["receipt.bin"] else results + reports


def epochs(folder: str) -> list[float]:
    """Return the epochs whose weights are in an output folder; infinity if it has only best.pth."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    matches = [match for match in map(WEIGHTS.fullmatch, names) if match]
    numbers: list[float] = [int(match[1]) for match in matches if match[1]]
    return [math.inf] if matches and not numbers else numbers

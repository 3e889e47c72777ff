"""The output folder of a run: where it is, what it holds, and which job writes to it.

    output_dir/train-20261121T072100Z/    of a job without --output_dir: its name and the time of its start
    output_dir/latest                     a link to the newest of these
    output_dir/index/                     indexes and generated images, for all runs
    RUN/.lock                             while a job writes to RUN; a job that is killed leaves the file

Pure Python, no torch.
"""

import argparse
import atexit
import contextlib
import fcntl
import io
import itertools
import math
import os
import re
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass

from common import exits, platforms
from common.distributed.topology import STARTED_BY
from common.exits import BadInput
from common.files import ROOT

PARENT = os.path.join(ROOT, "output_dir")
LATEST, LOCK, CHECKPOINTS = "latest", ".lock", "checkpoints"
WEIGHTS = re.compile(r"best\.pth|epoch_(\d+)\.pth")
_OWN = "BOOTFILE_RUN_FOLDER"  # a parent passes the folder that it made to the processes that it starts
_FILES = ("metrics.jsonl", "receipt.bin", "starts.jsonl", "best.pth", f"{CHECKPOINTS}/{LATEST}")
_CHECKPOINT = re.compile(r"step_(\d+)\.pt")
_REPORTS = re.compile(r"metrics\.jsonl|receipt\.bin|events\.out\.tfevents\..*")
_BUSY = 10.0  # seconds that a start waits for the last moments of the job before


@dataclass
class _Held:
    """file: the lock. made: folders that were missing. is_new: whether this job removes the lock's file."""

    file: io.TextIOBase
    made: list[str]
    is_new: bool


_held: dict[str, _Held] = {}


def writes_nothing(args: argparse.Namespace) -> bool:
    """Whether the job only measures (--prof) or evaluates (--evaluate)."""
    return bool(getattr(args, "prof", None) or getattr(args, "evaluate", False))


def local_output(path: str) -> str:
    """The real, absolute path of a folder in which results can be made. Raises BadInput. The folder itself is
    not made."""
    if "://" in path:
        raise BadInput(
            f"output_dir {path} is a URL, not s3:// or obs:// and not a folder: let the platform bring the "
            "outputs back (ModelArts: an output named train_url), and pass the folder"
        )
    path = os.path.realpath(path)  # `latest` may point elsewhere tomorrow
    parent = path
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    probe = None
    try:  # make the missing folders somewhere beside, write a file, and take it all away again
        probe = tempfile.mkdtemp(prefix=".probe-", dir=parent)
        target = os.path.join(probe, os.path.relpath(path, parent))
        os.makedirs(target, exist_ok=True)
        with open(os.path.join(target, "probe"), "wb") as file:
            file.write(b"\0" * 4096)
    except OSError as error:
        raise BadInput(f"output_dir {path} cannot be written: {error.strerror} ({parent})") from error
    finally:
        if probe:
            shutil.rmtree(probe, ignore_errors=True)
    for name in (CHECKPOINTS, *_FILES):
        own, is_folder = os.path.join(path, name), name == CHECKPOINTS
        if os.path.lexists(own) and not (os.path.isdir if is_folder else os.path.isfile)(own):
            raise BadInput(f"{own} is not a {'folder' if is_folder else 'file'}, and the job writes to it")
    return path


def make_default(args: argparse.Namespace) -> str:
    """Return the new folder of a job without --output_dir. It is removed at the end if nothing was written.

    A process that writes nothing gets PARENT. Raises BadInput.
    """
    if STARTED_BY in os.environ and _OWN in os.environ:
        return os.environ[_OWN]
    parent = local_output(PARENT)
    if writes_nothing(args) or _is_not_first(args):
        return parent
    job = os.path.splitext(os.path.basename(sys.argv[0]))[0].strip("-") or "job"
    name = f"{job}-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
    made = _missing(parent)
    try:
        os.makedirs(parent, exist_ok=True)
        for number in itertools.count(1):
            path = os.path.join(parent, name if number == 1 else f"{name}-{number}")
            with contextlib.suppress(FileExistsError):  # of a job that was started in the same second
                os.mkdir(path)
                break
    except OSError as error:
        raise BadInput(f"output_dir {parent} cannot be written: {error.strerror}") from error
    made.append(path)
    exits.before_leaving(lambda: _remove_empty(made))
    atexit.register(_remove_empty, made)
    os.environ[_OWN] = path
    _say(f"output_dir {path}")
    return path


def results(folder: str) -> list[str]:
    """The names of the results of a run in a folder: checkpoints first, then weights, then reports."""
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    found = [f"{CHECKPOINTS}/{name}" for name in checkpoints(folder)]
    found += [name for name in names if WEIGHTS.fullmatch(name)]
    reports = [name for name in names if _REPORTS.fullmatch(name) and not _is_empty(folder, name)]
    # A receipt alone is from a job that was killed during its first report: no result is lost with it.
    return found + ([] if reports == ["receipt.bin"] else reports)


def checkpoints(folder: str) -> list[str]:
    """The names of the checkpoints in an output folder, by step."""
    with contextlib.suppress(FileNotFoundError):
        names = os.listdir(os.path.join(folder, CHECKPOINTS))
        steps = sorted(int(match[1]) for match in map(_CHECKPOINT.fullmatch, names) if match)
        return [f"step_{step}.pt" for step in steps]
    return []


def epochs(folder: str) -> list[float]:
    """The epochs whose weights are in an output folder; infinity if only best.pth is there."""
    with contextlib.suppress(FileNotFoundError):
        found = [match for match in map(WEIGHTS.fullmatch, os.listdir(folder)) if match]
        return [int(match[1]) for match in found if match[1]] or [math.inf for _ in found]
    return []


def hold(folder: str, url: str | None = None) -> None:
    """Make this process the only one that writes to a folder until it ends, and the folder if it is missing.
    Waits some seconds for a job that is just ending. Raises BadInput if another job holds the folder.

    url: what the folder stands for. The lock is a record lock (lockf): a child does not inherit it, and it
    ends with the process. It also ends when the process closes the file, so only this function opens it.
    """
    if folder in _held:
        return
    path, made = os.path.join(folder, LOCK), _missing(folder)
    deadline = time.monotonic() + _BUSY
    while True:
        is_new = not os.path.lexists(path)
        try:
            os.makedirs(folder, exist_ok=True)
            file = open(path, "a")  # noqa: SIM115
        except OSError as error:
            raise BadInput(f"output_dir {folder} cannot be written: {error.strerror}") from error
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.exists(path) and os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                break
        except (BlockingIOError, PermissionError):
            pass
        except OSError as error:
            _say(f"warning: no locks at {folder} ({error.strerror}): do not start two jobs with this folder")
            break
        file.close()  # another job holds it, or has just removed it
        if time.monotonic() > deadline:
            raise BadInput(_taken(folder, url))
        time.sleep(0.2)
    _held[folder] = _Held(file, made, is_new)
    exits.on_success(lambda: release(folder))
    exits.before_leaving(lambda: release(folder))


def begin(folder: str) -> None:
    """The job that holds a folder begins to write to it: `latest` points to it now."""
    if folder in _held:
        _held[folder].is_new = True
        _link(folder)


def release(folder: str) -> None:
    """Let another job hold a folder. A start that was refused leaves the folder as it was."""
    if held := _held.pop(folder, None):
        if held.is_new:
            with contextlib.suppress(OSError):
                os.unlink(held.file.name)
        held.file.close()
        _remove_empty(held.made)


def _taken(folder: str, url: str | None) -> str:
    if url:
        return (
            f"{url} belongs to another job that is running on this node (it writes to {folder}): give every "
            "job a train_url of its own"
        )
    return f"{folder} belongs to another job that is running: give every job an --output_dir of its own"


def _link(folder: str) -> None:
    """Make `latest` point to a folder of make_default(), if the system permits links."""
    link = os.path.join(os.path.dirname(folder), LATEST)
    if os.environ.get(_OWN) != folder or (os.path.lexists(link) and not os.path.islink(link)):
        return
    new = f"{folder}.{LATEST}"
    with contextlib.suppress(OSError):
        os.symlink(os.path.basename(folder), new)
        try:
            os.replace(new, link)
        except OSError:
            os.unlink(new)


def _is_empty(folder: str, name: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return not os.path.getsize(os.path.join(folder, name))
    return True


def _missing(folder: str) -> list[str]:
    """The folders that makedirs() would make, the outermost first."""
    missing = []
    while not os.path.lexists(folder):
        missing.insert(0, folder)
        folder = os.path.dirname(folder)
    return missing


def _remove_empty(folders: list[str]) -> None:
    for folder in reversed(folders):
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(line, flush=True)


def _is_not_first(args: argparse.Namespace) -> bool:
    """Whether another process is rank 0, as far as that is known before the processes meet. Only rank 0
    writes, so no other process needs to know the folder."""
    with contextlib.suppress(BadInput):  # is refused later, with its reason
        if "LOCAL_RANK" in os.environ:
            return platforms.whole(os.environ, "RANK", 0) > 0
        if getattr(args, "rank", None) is not None:
            return args.rank > 0
        claim = platforms.detect(os.environ)
        return claim is not None and bool(claim.node_rank or claim.local_rank)
    return False

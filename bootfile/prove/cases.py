"""The cases of a proof: what is changed in a run, and with which other run it is compared."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bootfile.ground.numbers import count_in
from bootfile.machine import threads

REFERENCE = "reference"  # the run with which most others are compared
KILLED = "killed and restarted"
STOPPED = "stopped by SIGTERM and restarted"
SAME_THREADS = f"{KILLED}, with the same number of threads"  # runs only if KILLED differs
# what a run changes around a job: its results must not depend on any of it
HASH = "another PYTHONHASHSEED"
FOLDER = "another working folder"
LISTING = "another order of os.listdir"
SURROUNDINGS = (HASH, FOLDER, LISTING)
THREADS = "another number of threads"  # at a restart, as on a machine with another number of cores
_REVERSED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "reversed_listings")
PROCESSES = "--processes_per_node"
REPLACED = "killed processes are replaced, the others stay alive"


class Case(NamedTuple):
    """A run that is compared with another one."""

    name: str
    checks_state: bool = True  # states, figures and weights must be equal, too
    must_differ: bool = False  # the run has to differ from the other one
    option: str = ""  # of the job, for a job of Bootfile
    value: str = ""  # of the option
    other: str = ""  # the value of the option if the reference has `value`
    kills: int = 0  # number of SIGKILLs
    stops: int = 0  # number of SIGTERMs, at random moments of the run
    against: str = REFERENCE  # name of the run with which it is compared
    damages: str = ""  # tensors of its checkpoint that are changed: "largest", "all" or "" (none)
    changes: tuple[str, ...] = ()  # what is changed around the job: of SURROUNDINGS; THREADS at a restart
    # ranks that get a SIGKILL at once, each time at another step; the job replaces them (--elastic)
    losses: tuple[tuple[int, ...], ...] = ()


class NotRun(Exception):
    """A case cannot be run. The message has the reason."""


AGAIN = Case("the same again, in other surroundings", changes=SURROUNDINGS)
SAME = Case("the same again")  # runs only if AGAIN differs, and then those with one change
ONE_CHANGE = [Case(f"the same again, with {change}", changes=(change,)) for change in SURROUNDINGS]
# runs only if a restart is equal with the same number of threads: does the number matter without a kill?
OTHER_THREADS = Case(f"the same again, with {THREADS}", changes=(THREADS,))
DAMAGED = Case("restarted from a damaged checkpoint", must_differ=True, damages="largest")
ALL_DAMAGED = Case("restarted from a checkpoint with all tensors damaged", must_differ=True, damages="all")
OTHER_PROCESSES = Case(
    "another number of processes", checks_state=False, option=PROCESSES, value="2", other="1"
)
KILLED_ON_2 = Case("2 processes, killed and restarted", option=PROCESSES, value="2", other="2", kills=1)
CHANGES = (  # other cases that change one option
    Case("another number of workers", option="--workers", value="1", other="2"),
    Case("another engine", checks_state=False, option="--data_backend", value="threads", other="pytorch"),
    Case("another seed", must_differ=True, option="--seed", value="1", other="2"),
)


def environment(changes: Sequence[str] = (), seed: int = 1) -> dict[str, str]:
    """Return the environment of a run. seed: for PYTHONHASHSEED, unless the user has set it; HASH adds 1."""
    variables = {"PYTHONHASHSEED": str(seed + (HASH in changes)), **os.environ}
    if THREADS in changes:
        count = count_in(os.environ, "OMP_NUM_THREADS") or threads.share(1)
        variables["OMP_NUM_THREADS"] = "1" if count > 1 else "2"
    if LISTING in changes:  # Python imports sitecustomize.py of this folder at its start
        folders = filter(None, [_REVERSED, variables.get("PYTHONPATH")])
        variables["PYTHONPATH"] = os.pathsep.join(folders)
    return variables


def find_unchanged() -> list[str]:
    """Return a line for each change that the runs cannot have here."""
    seed = os.environ.get("PYTHONHASHSEED", "random")
    return [] if seed == "random" else [f"{HASH}: the environment has {seed}"]


@contextlib.contextmanager
def working_folder(changes: tuple[str, ...], parent: str) -> Iterator[str | None]:
    """Make another working folder, and delete it after the run. Yield its path; None without this change.

    It has links to all entries of the folder of this process. parent: a new folder for it, with links to the
    neighbours of that folder.
    """
    if FOLDER not in changes:
        yield None
        return
    here = os.getcwd()
    place = os.path.join(parent, f"{os.path.basename(here)}-elsewhere")
    os.makedirs(place)
    try:
        # links, because data may be large; the neighbours are for paths such as ../data
        for source, target in ((here, place), (os.path.dirname(here), parent)):
            with contextlib.suppress(PermissionError):  # the parent's: paths with `..` are then not found
                for name in os.listdir(source):
                    link = os.path.join(target, name)
                    if not os.path.lexists(link):
                        os.symlink(os.path.join(source, name), link)
        yield place
    finally:
        shutil.rmtree(parent)

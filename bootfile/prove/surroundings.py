"""What a repeated run changes around a job: its results must not depend on any of it."""

import contextlib
import os
import shutil
from collections.abc import Iterator

from bootfile.ground.numbers import count_in
from bootfile.machine import threads

_REVERSED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "reversed_listings")
HASH = "another PYTHONHASHSEED"
FOLDER = "another working folder"
LISTING = "another order of os.listdir"
ALL = (HASH, FOLDER, LISTING)
THREADS = "another number of threads"  # at a restart, as on a machine with another number of cores


def environment(changes: tuple[str, ...] = (), seed: int = 1) -> dict[str, str]:
    """Return the environment of a run. seed: PYTHONHASHSEED, and one more if it changes, unless the user has
    set it."""
    if HASH in changes:
        seed += 1
    variables = {"PYTHONHASHSEED": str(seed)} | dict(os.environ)
    if THREADS in changes:
        variables["OMP_NUM_THREADS"] = str(choose_other_threads())
    if LISTING in changes:  # Python imports sitecustomize.py of this folder at its start
        folders = [_REVERSED]
        if variables.get("PYTHONPATH"):
            folders.append(variables["PYTHONPATH"])
        variables["PYTHONPATH"] = os.pathsep.join(folders)
    return variables


def choose_other_threads() -> int:
    """Return a number of threads that a start in the environment of this process does not have."""
    usual = count_in(os.environ, "OMP_NUM_THREADS") or threads.share(1)
    return 1 if usual > 1 else 2


def find_unchanged() -> list[str]:
    """Return lines on what a repeated run does not change here."""
    seed = os.environ.get("PYTHONHASHSEED")
    return [] if seed in (None, "random") else [f"{HASH}: the environment has {seed}"]


@contextlib.contextmanager
def working_folder(changes: tuple[str, ...], parent: str) -> Iterator[str | None]:
    """Make the working folder of a run, and delete it afterwards; None: that of this process. It has links to
    all that the folder of this process has; links to the neighbours of that one are next to it. parent: a
    new folder for both."""
    if FOLDER not in changes:
        yield None
        return
    here = os.getcwd()
    place = os.path.join(parent, f"{os.path.basename(here)}-elsewhere")
    os.makedirs(place)
    try:
        # links, because data may be large; to the neighbours, too, for paths such as ../data
        for source, target in ((here, place), (os.path.dirname(here), parent)):
            with contextlib.suppress(PermissionError):  # the parent's: paths with `..` are then not found
                for name in os.listdir(source):
                    link = os.path.join(target, name)
                    if not os.path.lexists(link):
                        os.symlink(os.path.join(source, name), link)
        yield place
    finally:
        shutil.rmtree(parent)

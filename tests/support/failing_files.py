"""Files whose reads fail, as on a network mount whose server does not answer.

    python -m tests.support.failing_files FOLDER jobs/imagenet.py ...

FOLDER/faults.json has the arguments of failing(). Each call makes a file FOLDER/<number>: all workers and
threads of the job count together.
"""

import builtins
import contextlib
import errno
import io
import json
import os
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

_OPENERS = {
    "open": ((builtins, "open"), (io, "open"), (os, "open")),
    "look": ((os, "scandir"), (os, "stat"), (os, "listdir")),
}


@contextlib.contextmanager
def failing(
    folder: Path,
    pattern: str,
    error: str = "ESTALE",
    times: int = 1,
    after: int = 0,
    calls: str = "open look",
) -> Iterator[None]:
    """Let `times` calls on a path that matches the pattern fail, in this process and in those that it forks.

    folder: where calls are counted. error: name of an errno. after: calls that work before. calls: open, and
    look for those that list folders or ask for the size of a file.
    """
    folder.mkdir(exist_ok=True)
    openers = [opener for kind in calls.split() for opener in _OPENERS[kind]]
    before = [getattr(module, name) for module, name in openers]
    number = getattr(errno, error)
    opened = os.open

    def fail_at(call):
        def checked(path=".", *arguments, **options):
            if isinstance(path, str | os.PathLike) and re.search(pattern, os.fspath(path)):
                for place in range(after + times):
                    with contextlib.suppress(FileExistsError):
                        os.close(opened(f"{folder}/{place}", os.O_CREAT | os.O_EXCL))
                        if place >= after:
                            raise OSError(number, os.strerror(number), path)
                        break
            return call(path, *arguments, **options)

        return checked

    for (module, name), call in zip(openers, before, strict=True):
        setattr(module, name, fail_at(call))
    try:
        yield
    finally:
        for (module, name), call in zip(openers, before, strict=True):
            setattr(module, name, call)


def count(folder: Path) -> int:
    """Return how many calls were counted."""
    return len([path for path in folder.iterdir() if path.name.isdigit()])


if __name__ == "__main__":
    place = Path(sys.argv[1])
    faults = json.loads((place / "faults.json").read_text())
    sys.argv = sys.argv[2:]
    with failing(place, **faults):
        runpy.run_path(sys.argv[0], run_name="__main__")

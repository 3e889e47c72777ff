"""Choose the checkpoint that a run continues from."""

import functools
import os
from collections.abc import Callable
from typing import cast

from bootfile.exact import files, former, recorded
from bootfile.exact.state import SavedState
from bootfile.ground.errors import BadInput, in_one_line, print_line
from bootfile.ground.files import read_again


def choose(
    wanted: str, folder: str, load: Callable[[SavedState], None], whole: bool = True
) -> tuple[str, SavedState | None]:
    """Return (path, state) of the newest whole checkpoint of this run; ("", None) without checkpoints.
    wanted: "auto" for the checkpoints in `folder`, or the path of a checkpoint or of a folder of checkpoints.
    load: called with the state of a file; it restores the state, or raises files.Refused, which is printed.
    whole: as for files.load().
    Raises BadInput if there are checkpoints and none can be used, or if `wanted` does not exist.
    """
    # the newest first: the first one that can be loaded is used
    if wanted == "auto":
        paths = files.list_newest_first(folder)
    elif os.path.isdir(wanted):
        paths = _list(wanted)
    elif os.path.exists(wanted):
        paths = [wanted]
    else:
        paths = []
    if not paths and wanted != "auto":
        raise BadInput(f"--resume {wanted}: no such file, or folder with checkpoints")
    refused = []
    failures = []
    for path in paths:
        try:
            # each byte is read once: the checksum is computed while torch reads the file
            read = functools.partial(files.read, path, whole)
            state = cast(SavedState, read_again(read, path))  # load() checks it
            recorded.check(path, state)
            former.upgrade(state)
            load(state)
            return path, state
        except BadInput as error:  # this is the right checkpoint: do not try older ones
            raise BadInput(f"{path}: {error}") from None
        except files.Refused as reason:
            refused.append(f"{path}: {reason}")
            failures.append(reason)
        except Exception as error:  # load_state_dict() failed: the file is of another program
            refused.append(f"{path}: it does not hold the state of this job: {in_one_line(error)}")
        print_line(f"checkpoint refused: {refused[-1]}")
    # only weights, as from a model zoo, have no .json: the message names the option for them
    if refused and os.path.isfile(wanted) and not os.path.exists(f"{wanted}.json"):
        raise BadInput(f"--resume {refused[0]}; to take its weights only: --weights {wanted}")
    if refused:
        # a new run would push these files out, so a person has to decide
        line = f"no checkpoint can be used: {'; '.join(refused)}"
        from bootfile.ground.again import is_temporary, refusal

        # a failure that may pass, as of a network file system, gets the exit code that asks for a new start
        for failure in filter(is_temporary, failures):
            raise refusal(line, failure)
        raise BadInput(f"{line} (to start a new run, use another output folder)")
    return "", None


def newest(path: str) -> str:
    """Return the path of the newest checkpoint in a folder; another path is returned as it is."""
    paths = _list(path)
    return paths[0] if paths else path


def _list(path: str) -> list[str]:
    """Return the checkpoints in a folder, or in the output folder of a run, the newest first."""
    return files.list_newest_first(path) or files.list_newest_first(os.path.join(path, "checkpoints"))

"""Choose the checkpoint that a run continues from, and restore it on every rank. A new run has none."""

import functools
import math
import os
from collections.abc import Callable
from typing import cast

from bootfile.exact import checked_files, files, former, other_start, recorded, restore
from bootfile.exact.plugins import Parts
from bootfile.exact.state import SavedState
from bootfile.ground.errors import BadInput, in_one_line, print_line
from bootfile.ground.files import read_again
from bootfile.processes import ranks


def choose_state(parts: Parts, wanted: str) -> SavedState:
    """Return the state to continue from, on rank 0, loaded unless it is sharded. wanted: as for choose()."""

    # called for the newest checkpoint, and for older ones as long as one is refused
    def load(state: SavedState) -> None:
        restore.check_format(state)
        is_other = other_start.compare_machines(parts.machines, state)
        parts.state.is_other_machine = is_other
        parts.loader.receipt.expects_same = not is_other
        restore.load(parts.state, state, parts.most_steps)

    is_whole = not parts.state.is_sharded  # otherwise each rank reads its part
    # raises BadInput if there are checkpoints and none can be used: a new run would overwrite them
    path, state = choose(wanted, parts.saver.checkpoints, load, is_whole)
    # a run that continues its own checkpoint keeps its name; one that begins at a given path has a new one
    if wanted == "auto":
        parts.state.run = state["run"]
    end = f" of {parts.loader.total_steps}" if parts.loader.total_steps else ""
    epoch = max(1, math.ceil(state["step"] / len(parts.loader)))
    parts.say(f"resumed from {path}: epoch {epoch}, step {state['step']}{end}")
    change = parts.state.schedule.change
    if change:
        parts.say(f"the schedule of the checkpoint is another one: {change}")
    if changes := other_start.describe_changes(state["code"], parts.state.code):
        parts.say(f"warning: {changes} since the start before: the results may differ from here on")
    for note in parts.state.take_notes():
        parts.say(note)
    return state


def restore_on_all(parts: Parts, state: SavedState | None) -> SavedState:
    """Restore the state that rank 0 has chosen, on every rank, and return it. state: None on other ranks."""
    state = restore.broadcast(parts.state, state)
    if "shards" in state:
        # each rank has read its parts: their digest needs all ranks
        reason = recorded.check_sharded(state["shards"], state, ranks.is_first())
        reason = ranks.broadcast_object(reason)
        if reason:
            raise BadInput(f"{state['shards']}: {reason}")
    # choose_state() has restored a state that is not sharded on rank 0
    if parts.state.is_sharded or not ranks.is_first():
        restore.restore(parts.state, state)
    if state["epoch_ended"]:
        parts.loader.leaves_out_ended = True  # type: ignore[attr-defined]  # our Loader has it
    values = state["attributes"]
    if values and parts.state.attributes is not None:
        parts.state.attributes.restore(values)
        shown = ", ".join(f"{name} = {value!r:.40}" for name, value in values.items())
        parts.say(f"restored what the loop changes in its data set: {shown}")
    return state


def choose(
    wanted: str, folder: str, load: Callable[[SavedState], None], whole: bool = True
) -> tuple[str, SavedState]:
    """Return (path, state) of the newest whole checkpoint of this run.
    wanted: "auto" for the checkpoints in `folder`, or the path of a checkpoint or of a folder of checkpoints.
    load: called with the state of a file; it restores the state, or raises files.Refused, which is printed.
    whole: as for checked_files.load().
    Raises BadInput if none can be used, or if there is none.
    """
    # the newest first: the first one that can be loaded is used
    if wanted == "auto":
        paths = files.list_newest_first(folder)
    elif os.path.isdir(wanted):
        paths = _list(wanted)
    else:
        paths = [wanted] if os.path.exists(wanted) else []
    if not paths:
        raise BadInput(f"--resume {wanted}: no such file, or folder with checkpoints")
    refused = []
    failures = []
    for path in paths:
        try:
            # each byte is read once: the checksum is computed while torch reads the file
            read = functools.partial(checked_files.read, path, whole)
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
    if os.path.isfile(wanted) and not os.path.exists(f"{wanted}.json"):
        raise BadInput(f"--resume {refused[0]}; to take its weights only: --weights {wanted}")
    # a new run would push these files out, so a person has to decide
    line = f"no checkpoint can be used: {'; '.join(refused)}"
    from bootfile.ground.again import is_temporary, refusal

    # a failure that may pass, as of a network file system, gets the exit code that asks for a new start
    for failure in filter(is_temporary, failures):
        raise refusal(line, failure)
    raise BadInput(f"{line} (to start a new run, use another output folder)")


def newest(path: str) -> str:
    """Return the path of the newest checkpoint in a folder; another path is returned as it is."""
    paths = _list(path)
    return paths[0] if paths else path


def _list(path: str) -> list[str]:
    """Return the checkpoints in a folder, or in the output folder of a run, the newest first."""
    return files.list_newest_first(path) or files.list_newest_first(os.path.join(path, "checkpoints"))

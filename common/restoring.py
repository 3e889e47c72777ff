"""What a job has left at a URL, and the newest whole checkpoint of it back on this node."""

import contextlib
import json
import os
import re
import time
from typing import NamedTuple

from common import checkpoint
from common.exits import BadInput
from common.object_store import ObjectStore, StoreError
from common.object_store_errors import shown

MARKER, FORMAT, CHECKPOINTS = ".bootfile-outputs.json", 1, "checkpoints"
HISTORY = ("metrics.jsonl", "receipt.bin", "starts.jsonl")  # go on where the checkpoint does
_SAY_EVERY = 30.0  # seconds
_STEP = re.compile(rf"{CHECKPOINTS}/step_(\d+)\.pt(\.json)?")
# reasons of a StoreError that speak of this object, and not of the way to it
_OF_THE_OBJECT = ("damaged", "replaced", "404", "NoSuchKey", "NotFound", "412", "PreconditionFailed")


class File(NamedTuple):
    """size: bytes."""

    size: int
    sha256: str


class Marker(NamedTuple):
    """files: path -> File, of those that are whole."""

    files: dict[str, File]


def step_of(path: str) -> int | None:
    """Of a checkpoint or its checksum below a URL; None for other files."""
    match = _STEP.fullmatch(path)
    return int(match[1]) if match else None


def names_of(step: int) -> tuple[str, str]:
    """The paths below a URL of a checkpoint and its checksum."""
    path = f"{CHECKPOINTS}/{checkpoint.name_of(step)}"
    return path, f"{path}.json"


def read_marker(store: ObjectStore) -> Marker | None:
    """The list of what is whole at a URL; None where nothing was. Raises BadInput."""
    try:
        content = store.read(MARKER)
    except StoreError as error:
        if error.reason in ("404", "NoSuchKey", "NotFound"):
            return None
        raise
    try:
        marker = json.loads(content)
        if marker["format"] != FORMAT:
            raise BadInput(f"{store.location.url(MARKER)}: its format is {marker['format']}, not {FORMAT}")
        return Marker(
            {each["path"]: File(int(each["size"]), str(each["sha256"])) for each in marker["files"]}
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(
            f"{store.location.url(MARKER)} is damaged: nothing says any more which results are whole; fetch "
            "what you need, and take another train_url"
        ) from error


def restore(store: ObjectStore, folder: str, marker: Marker | None, there: set[str]) -> set[str]:
    """Bring the newest whole checkpoint to the folder, and the history up to it, unless what lies there is as
    new. Returns the paths of those that were refused. Raises BadInput where there are some and none is whole.

    there: paths of what lies in the URL's checkpoints/.
    """
    listed = [step for step in map(step_of, marker.files if marker else ()) if step is not None]
    steps = sorted({step for step in listed if set(names_of(step)) <= marker.files.keys()}, reverse=True)
    if not steps:
        unfinished = sum(step_of(path) is not None and path.endswith(".pt") for path in there)
        if unfinished:
            print(
                f"{unfinished} checkpoints at {store.location.url()} were not uploaded to their end: ignored",
                flush=True,
            )
        return set()
    own = _newest(os.path.join(folder, CHECKPOINTS))
    if own and own["step"] >= steps[0] and own["run"] == _run(store, steps[0]):
        return set()
    os.makedirs(os.path.join(folder, CHECKPOINTS), exist_ok=True)
    refused, reasons = set(), []
    for step in steps:
        try:
            _restore_checkpoint(store, folder, step, marker)
            break
        except (checkpoint.Refused, StoreError) as error:
            if isinstance(error, StoreError) and error.reason not in _OF_THE_OBJECT:
                raise
            refused |= set(names_of(step))
            reasons.append(f"{store.location.url(names_of(step)[0])}: {error}")
            print(f"checkpoint refused: {reasons[-1]}", flush=True)
    else:
        if own:
            return refused
        raise BadInput(f"no checkpoint can be used: {'; '.join(reasons)} (--resume never starts anew)")
    for name in HISTORY:
        _restore_history(store, folder, name)
    print(
        f"restored {checkpoint.name_of(step)} and the history up to it from {store.location.url()}",
        flush=True,
    )
    return refused


def _newest(folder: str) -> dict | None:
    """The facts of the newest checkpoint on this node that is whole."""
    for path in checkpoint.found(folder):
        with contextlib.suppress(checkpoint.Refused):
            return checkpoint.verify(path)
    return None


def _run(store: ObjectStore, step: int) -> str | None:
    """Which run the checkpoint at the URL belongs to."""
    with contextlib.suppress(StoreError, ValueError, KeyError, TypeError):
        return json.loads(store.read(names_of(step)[1]))["run"]
    return None


def _restore_checkpoint(store: ObjectStore, folder: str, step: int, marker: Marker) -> None:
    name, checksum = names_of(step)
    begin, said = time.monotonic(), [time.monotonic()]

    def heartbeat(size: int) -> None:
        if time.monotonic() - said[0] > _SAY_EVERY:
            said[0] = time.monotonic()
            print(f"restoring {store.location.url(name)} ({said[0] - begin:.0f} s)", flush=True)

    try:
        for each in (checksum, name):
            store.fetch(each, os.path.join(folder, each), *marker.files[each], heartbeat)
        checkpoint.verify(os.path.join(folder, name))
    except BaseException:
        for each in (name, checksum):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(folder, each))
        raise
    latest = os.path.join(folder, CHECKPOINTS, checkpoint.LATEST)
    checkpoint.write_text(latest, f"{os.path.basename(name)}\n")


def _restore_history(store: ObjectStore, folder: str, name: str) -> None:
    """As it is there now: it may be newer than the list, and the job cuts it back to the checkpoint."""
    try:
        if entry := store.head(name):
            store.fetch(name, os.path.join(folder, name), entry.size, entry.sha256)
    except StoreError as error:
        if error.reason not in _OF_THE_OBJECT:
            raise
        print(f"warning: {shown(name)} of before is lost: {error}", flush=True)

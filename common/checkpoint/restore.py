"""Download the newest whole checkpoint of a URL, and the history of its run, to this node."""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable

from common.checkpoint import files as checkpoint
from common.checkpoint import output_list
from common.checkpoint.output_list import File
from common.ground.exits import BadInput, printable
from common.ground.files import write_atomic
from common.ground.heartbeat import Heartbeat
from common.object_store.store import MISSING, ObjectStore, StoreError
from common.run.output import WEIGHTS

CHECKPOINTS = "checkpoints"
HISTORY = ("metrics.jsonl", "receipt.bin", "state.jsonl", "starts.jsonl")  # the job truncates the first three
_NEW = ".restore"  # below checkpoints/: the folder for downloads, before they are moved to their place
_STEP = re.compile(rf"{CHECKPOINTS}/step_(0|[1-9][0-9]{{0,18}})\.pt(\.json)?")
# reasons of a StoreError that concern one object, and not the connection to the store
_OF_THE_OBJECT = ("damaged", "replaced", *MISSING, "412", "PreconditionFailed")
_TRIED = 100  # newest checkpoints of a list that are tried


def step_of(path: str) -> int | None:
    """Return the step of a checkpoint or its checksum below a URL; None for other files."""
    match = _STEP.fullmatch(path)
    return int(match[1]) if match else None


def steps_of(paths: Iterable[str]) -> set[int]:
    """Return the steps of the checkpoints, and of their checksums, among paths below a URL."""
    return {step for step in map(step_of, paths) if step is not None}


def names_of(step: int) -> tuple[str, str]:
    """Return the paths below a URL of a checkpoint and its checksum."""
    path = f"{CHECKPOINTS}/{checkpoint.name_of(step)}"
    return path, f"{path}.json"


def read_list(store: ObjectStore) -> tuple[dict[str, File], str | None]:
    """Return the complete files at a URL by path, and the ETag of the list or None. Raises BadInput."""
    content, etag = store.read_version(output_list.NAME)
    if etag is None:
        return {}, None
    url = store.location.url(output_list.NAME)
    try:
        form, files = output_list.parse(content)
    except ValueError as error:
        raise BadInput(
            f"{url} is damaged, so the complete results are not known: download what you need, and use "
            "another train_url"
        ) from error
    if form != output_list.FORMAT:
        raise BadInput(f"{url}: its format is {form}, expected {output_list.FORMAT}")
    return files, etag


def restore(store: ObjectStore, folder: str, files: dict[str, File], there: set[str]) -> set[str]:
    """Download the newest whole checkpoint and the history to the folder.

    Nothing is downloaded if the folder has a checkpoint of the same run that is at least as recent. A
    checkpoint in the folder stays until a complete one replaces it; then the weights in the folder, which are
    older than those at the URL, are deleted. Returns the paths of the checkpoints that were refused. Raises
    BadInput if the list names checkpoints, and none is whole at the URL, listed or not, or in the folder.

    store: the object store of the URL.
    folder: the output folder on this node.
    files: the files that the list names.
    there: the paths of all objects in the URL's checkpoints/.
    """
    steps = sorted(steps_of(path for path in files if path.endswith(".pt")), reverse=True)
    if not steps:
        unfinished = sum(step_of(path) is not None and path.endswith(".pt") for path in there)
        if unfinished:
            print(
                f"ignored {unfinished} checkpoints at {store.location.url()}: their upload did not end",
                flush=True,
            )
        return set()
    place = os.path.join(folder, CHECKPOINTS)
    own = _newest(place)
    os.makedirs(place, exist_ok=True)
    refused, reasons = set(), []
    unlisted = [] if own else sorted(steps_of(there) - set(steps), reverse=True)
    for step in steps[:_TRIED] + unlisted[:_TRIED]:
        if own and _is_as_new(own, store, step, files):
            return refused
        try:
            path = _bring(store, folder, step, files if step in steps else stored(store, names_of(step)))
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
        raise BadInput(
            f"no checkpoint can be used: {'; '.join(reasons)} (to start a new run, use another train_url)"
        )
    # The checkpoint is installed last: the next start restores nothing once it is there.
    for name in HISTORY:
        _restore_history(store, folder, name)
    for name in filter(WEIGHTS.fullmatch, os.listdir(folder)):
        os.unlink(os.path.join(folder, name))
    _install(path, place, checkpoint.name_of(step))
    print(
        f"restored {checkpoint.name_of(step)} and the history up to it from {store.location.url()}",
        flush=True,
    )
    return refused


def _newest(place: str) -> dict | None:
    """Return the facts of the newest whole checkpoint on this node."""
    for path in checkpoint.list_newest_first(place):
        if facts := _facts(path):
            return facts
    return None


def _facts(path: str) -> dict | None:
    """Return the facts of a checkpoint on this node; None if it is not whole."""
    try:
        facts = checkpoint.verify(path)
    except (checkpoint.Refused, KeyError, TypeError):
        return None
    return facts if type(facts.get("step")) is int else None


def _is_as_new(own: dict, store: ObjectStore, step: int, files: dict[str, File]) -> bool:
    """Return whether a checkpoint of this node is at least as recent as one at the URL: it has the same
    bytes, or belongs to the same run and has the same or a later step."""
    if own["sha256"] == files[names_of(step)[0]].sha256:
        return True
    return own["step"] >= step and own.get("run") == _run(store, step)


def _run(store: ObjectStore, step: int) -> str | None:
    """Return the run that the checkpoint at the URL belongs to; "" if it cannot be read."""
    with contextlib.suppress(StoreError, ValueError, KeyError, TypeError, RecursionError):
        return json.loads(store.read(names_of(step)[1]))["run"]
    return ""


def _bring(store: ObjectStore, folder: str, step: int, files: dict[str, File]) -> str:
    """Download a checkpoint, unless it is on this node. Return the path of the whole copy. Raises Refused."""
    name, checksum = names_of(step)
    if not {name, checksum} <= files.keys():
        raise checkpoint.Refused(f"it is not complete: expected {name} and {checksum}")
    final = os.path.join(folder, name)
    new = os.path.join(os.path.dirname(final), _NEW, os.path.basename(final))
    os.makedirs(os.path.dirname(new), exist_ok=True)
    for path in (final, new):  # new: downloaded by a start that was killed
        if (facts := _facts(path)) and facts["sha256"] == files[name].sha256:
            return path
    heartbeat, text = Heartbeat(), f"restoring {store.location.url(name)}"
    for each, path in ((checksum, f"{new}.json"), (name, new)):
        file = files[each]
        store.fetch(each, path, file.size, lambda size: heartbeat.beat(text), file.sha256)
    try:
        facts = checkpoint.verify(new)
    except (KeyError, TypeError):
        raise checkpoint.Refused(f"its checksum {os.path.basename(checksum)} is damaged") from None
    if facts.get("step") != step:
        raise checkpoint.Refused(f"it is of step {facts.get('step')}")
    return new


def _install(path: str, place: str, name: str) -> None:
    """Move a whole checkpoint to its place, and write its name to LATEST. If the job is killed before the
    move, the downloaded file and its checksum stay in _NEW."""
    final = os.path.join(place, name)
    if path != final:
        with open(f"{path}.json", encoding="utf-8") as file:
            write_atomic(f"{final}.json", file.read())
        os.replace(path, final)
    write_atomic(os.path.join(place, checkpoint.LATEST), f"{name}\n")
    shutil.rmtree(os.path.join(place, _NEW), ignore_errors=True)


def stored(store: ObjectStore, names: Iterable[str]) -> dict[str, File]:
    """Return the files at the URL whose metadata has a sha256, by path."""
    entries = [entry for name in names if (entry := store.head(name))]
    return {entry.key: File(entry.size, entry.sha256) for entry in entries if entry.sha256}


def _restore_history(store: ObjectStore, folder: str, name: str) -> None:
    """Download the current version of a history file. It may be newer than the checkpoint: the job truncates
    metrics.jsonl and receipt.bin to the step of the checkpoint."""
    try:
        if entry := store.head(name):
            store.fetch(name, os.path.join(folder, name), entry.size)
    except StoreError as error:
        if error.reason not in _OF_THE_OBJECT:
            raise
        print(f"warning: the earlier {printable(name)} is lost: {error}", flush=True)

"""Download the newest whole checkpoint of a URL, and the history of its run, to this node."""

import contextlib
import hashlib
import os
import re
from collections.abc import Collection, Iterable

from bootfile.exact import checked_files
from bootfile.exact import files as checkpoint
from bootfile.ground.errors import BadInput, printable
from bootfile.ground.heartbeat import Heartbeat
from bootfile.ground.results import CHECKPOINTS, WEIGHTS, dtensor_folder
from common.checkpoint import output_list
from common.checkpoint.output_list import File
from common.object_store.store import MISSING, ObjectStore, StoreError

# a job that continues truncates all of them but starts.jsonl and ends.jsonl
HISTORY = ("metrics.jsonl", "receipt.bin", "state.jsonl", "shards.jsonl", "starts.jsonl", "ends.jsonl")
_STEP = re.compile(rf"{CHECKPOINTS}/step_(0|[1-9][0-9]{{0,18}})\.(pt|pt\.json|shards/[^/]+)")
# reasons of a StoreError that concern one object, and not the connection to the store
_OF_THE_OBJECT = ("damaged", "replaced", *MISSING, "412", "PreconditionFailed")


def step_of(path: str) -> int | None:
    """Return the step of a checkpoint, its checksum or a file of its folder; None for another path."""
    match = _STEP.fullmatch(path)
    return int(match[1]) if match else None


def steps_of(paths: Iterable[str]) -> set[int]:
    """Return the steps of the checkpoints, and of their checksums, among paths below a URL."""
    return {step for step in map(step_of, paths) if step is not None}


def of_steps(paths: Iterable[str], steps: Collection[int]) -> set[str]:
    """Return the paths of the checkpoints of some steps, with their checksums and folders."""
    return {path for path in paths if step_of(path) in steps}


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
        return output_list.parse(content), etag
    except ValueError as error:
        raise BadInput(
            f"{url} is damaged, so the complete results are not known: download what you need, and use "
            "another train_url"
        ) from error


def restore(store: ObjectStore, folder: str, files: dict[str, File]) -> set[str]:
    """Download the newest whole checkpoint and the history to the folder, on rank 0 of a start with --resume
    auto. Return the paths of the checkpoints that were refused. files: those that the list at the URL names.

    Nothing is downloaded if the folder has a checkpoint of the same run that is at least as recent. The
    checkpoints of another run stay until a complete one is downloaded; then they and the weights in the
    folder, which are older than those at the URL, are deleted. Raises BadInput if the list names checkpoints,
    and none is whole at the URL or in the folder.
    """
    steps = sorted(steps_of(path for path in files if path.endswith(".pt")), reverse=True)
    ours = _newest(os.path.join(folder, CHECKPOINTS))  # facts of the newest checkpoint of this node
    refused: set[str] = set()
    reasons = []
    for step in steps:
        try:
            facts = _read_facts(store, step, files)
            is_same_run = bool(ours) and ours.get("run") == facts.get("run")
            if is_same_run and ours.get("step", 0) >= step:
                return refused
            _download(store, folder, step, facts, files)
            if not is_same_run:
                new = os.path.join(folder, names_of(step)[0])
                for other in set(checkpoint.list_newest_first(os.path.dirname(new))) - {new}:
                    checkpoint.discard(other)
            return refused
        except (checkpoint.Refused, StoreError) as error:
            # a store that cannot be reached is not a reason to continue from an older checkpoint
            if isinstance(error, StoreError) and error.reason not in _OF_THE_OBJECT:
                raise
            refused |= of_steps(files, {step})
            reasons.append(f"{store.location.url(names_of(step)[0])}: {error}")
            print(f"checkpoint refused: {reasons[-1]}", flush=True)
    if reasons and not ours:
        raise BadInput(
            f"no checkpoint can be used: {'; '.join(reasons)} (to start a new run, use another train_url)"
        )
    return refused


def _newest(folder: str) -> dict:
    """Return the facts of the newest whole checkpoint in a folder of this node; {} without one."""
    for path in checkpoint.list_newest_first(folder):
        with contextlib.suppress(checkpoint.Refused):
            return checked_files.verify(path)
    return {}


def _read_facts(store: ObjectStore, step: int, files: dict[str, File]) -> dict:
    """Return the facts of a checkpoint at the URL. Raises Refused if they are not those of a listed file."""
    name, checksum = names_of(step)
    content = store.read(checksum)
    facts = checked_files.parse_facts(content, os.path.basename(checksum))
    listed = files.get(name)
    is_same_file = listed and facts.get("step") == step and listed.size == facts["size"]
    is_listed = files.get(checksum) == File(len(content), hashlib.sha256(content).hexdigest())
    if not is_same_file or not is_listed:
        raise checkpoint.Refused(f"its checksum {os.path.basename(checksum)} belongs to another file")
    return facts


def _download(store: ObjectStore, folder: str, step: int, facts: dict, files: dict[str, File]) -> None:
    """Download a checkpoint and the history. The checksum is written last: if this start is killed before,
    the next one downloads them again."""
    name, _ = names_of(step)
    heartbeat = Heartbeat()

    def beat(_: int) -> None:  # while bytes arrive
        heartbeat.beat(f"restoring {store.location.url(name)}")

    shards = {os.path.join(dtensor_folder(name), shard): of for shard, of in facts.get("shards", {}).items()}
    for path, (size, sha256) in [(name, (facts["size"], files[name].sha256)), *shards.items()]:
        os.makedirs(os.path.dirname(os.path.join(folder, path)), exist_ok=True)
        store.fetch(path, os.path.join(folder, path), size, beat, sha256)
    # Before the checksum, so that a checkpoint that counts always has its history. It may be newer than the
    # checkpoint: the job truncates metrics.jsonl and receipt.bin to the step of the checkpoint.
    for history in HISTORY:
        try:
            if entry := store.head(history):
                store.fetch(history, os.path.join(folder, history), entry.size)
        except StoreError as error:
            if error.reason not in _OF_THE_OBJECT:
                raise
            print(f"warning: the earlier {printable(history)} is lost: {error}", flush=True)
    for weights in filter(WEIGHTS.fullmatch, os.listdir(folder)):
        os.unlink(os.path.join(folder, weights))
    checkpoint.write_facts(os.path.join(folder, name), facts)
    print(
        f"restored {os.path.basename(name)} and the history up to it from {store.location.url()}", flush=True
    )

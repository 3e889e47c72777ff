"""Fetch the outputs of a job, or any folder, from an object store.

    python -m launch fetch s3://bucket/outputs | obs://... | RECORD --to FOLDER [--latest_checkpoint]

RECORD: of a job that `submit` has sent; its output train_url is meant.
Every file appears whole or not at all, and is compared with the sha256 that its upload left. Files that are
there already are not fetched again, and a fetch that was ended goes on when it is started again. Nothing in
FOLDER is removed. Credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, OBS_ACCESS_KEY_ID and
OBS_SECRET_ACCESS_KEY, or boto3's usual files. Place: AWS_ENDPOINT_URL_S3, or OBS_REGION.

Exit codes: 0 all is here, 1 something that the job listed is not in the store, 2 bad input or a store that
refuses, 130 interrupted.
"""

import hashlib
import json
import os
import re
import shutil
import sys
import time
from functools import partial
from typing import NamedTuple

from common.arguments import Parser
from common.exits import BadInput
from common.object_store import Object, ObjectStore, parse
from common.object_store_errors import of_the_disk, shown
from common.object_store_paths import check_keys, is_partial, local_path, make_folder_of, sweep
from launch import job_records, manifests, transfers

OUTPUTS = ".bootfile-outputs.json"  # what a job has written last: its files with their sha256
_CHECKPOINT = re.compile(r"(?:.*/)?checkpoints/step_(\d+)\.pt")
_METRICS = "metrics.jsonl"


class _Listed(NamedTuple):
    """What a marker says of a file, and when (seconds since 1970)."""

    size: int
    sha256: str
    when: float


def main(arguments: list[str]) -> int:
    """Fetch, say what came, and return the exit code. Raises BadInput."""
    parser = Parser(__doc__)
    parser.prog = "python -m launch fetch"
    parser.add_argument("url", metavar="URL", help="s3://bucket/prefix, obs://bucket/prefix, or RECORD")
    parser.add_argument("--to", metavar="FOLDER", required=True, help="where the files go")
    parser.add_argument(
        "--latest_checkpoint",
        action="store_true",
        help=f"only the newest whole checkpoint, and {_METRICS}",
    )
    args = parser.parse_args(arguments)
    url = args.url if "://" in args.url else _output_of(args.url)
    parse(url)
    try:
        return fetch(url, args.to, args.latest_checkpoint)
    except KeyboardInterrupt:
        print("interrupted: start it again to go on", file=sys.stderr)
        return transfers.INTERRUPTED


def _output_of(record: str) -> str:
    outputs = job_records.find(record).get("outputs") or {}
    if "train_url" not in outputs:
        raise BadInput(f"{record}: no output train_url is known of that job (outputs: {', '.join(outputs)})")
    return outputs["train_url"]


def fetch(url: str, to: str, latest_checkpoint: bool) -> int:
    begin = time.monotonic()
    with ObjectStore(url, transfers.THREADS) as store:
        there = {entry.key: entry for entry in store.list()}
        if not there:
            raise BadInput(f"there is nothing below {url}")
        listed = _markers(store, there)
        wanted = _newest(store, there, listed) if latest_checkpoint else _without_ours(there)
        check_keys(wanted, url)
        for key in wanted:
            make_folder_of(local_path(to, key), key)
        entries = sorted(wanted.values(), key=lambda entry: -entry.size)
        expected = {entry.key: _expected(entry, listed) for entry in entries}
        known = transfers.run(
            store,
            "comparing",
            0,
            [partial(_is_here, store, to, entry, expected[entry.key]) for entry in entries],
        )
        missing = [entry for entry, here in zip(entries, known, strict=True) if not here]
        size = sum(entry.size for entry in missing)
        _check_room(to, missing)
        tasks = [partial(_fetch, store, to, entry, expected[entry.key]) for entry in missing]
        transfers.run(store, "fetching", size, tasks)
    for folder in {os.path.dirname(local_path(to, key)) for key in wanted}:
        sweep(folder)
    print(f"fetched {transfers.amount(len(missing), size)} in {time.monotonic() - begin:.1f} s to {to}")
    print(f"unchanged {transfers.amount(len(entries) - len(missing), sum(e.size for e in entries) - size)}")
    if latest_checkpoint:
        print(f"checkpoint {next(key for key in wanted if _CHECKPOINT.fullmatch(key))}")
    gone = [] if latest_checkpoint else sorted(listed.keys() - there.keys())
    if gone:
        print(f"listed, but not in the store: {len(gone)} files, {shown(gone[0])} the first")
    return int(bool(gone))


def _markers(store: ObjectStore, there: dict[str, Object]) -> dict[str, _Listed]:
    """Path -> what the markers of jobs and of uploads say; somebody else's files of these names: nothing."""
    listed = {}
    for name in (manifests.NAME, OUTPUTS):
        if name not in there:
            continue
        content, when = store.read(name), there[name].modified
        try:
            files = json.loads(content)["files"]
            found = {file["path"]: _Listed(file["size"], file["sha256"], when) for file in files}
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        listed |= {
            path: each for path, each in found.items() if re.fullmatch("[0-9a-f]{64}", str(each.sha256))
        }
    return listed


def _without_ours(there: dict[str, Object]) -> dict[str, Object]:
    """Markers and leases mean something in the store only."""
    return {key: entry for key, entry in there.items() if not key.rpartition("/")[2].startswith(".bootfile-")}


def _expected(entry: Object, listed: dict[str, _Listed]) -> str | None:
    """The sha256 that an object must have by a marker that is newer than it. A job that goes on replaces
    files after its marker was written; those are compared with the sha256 that they have themselves."""
    marker = listed.get(entry.key)
    if marker is None or entry.modified >= marker.when:
        return None
    if marker.size != entry.size:
        raise BadInput(
            f"key {shown(entry.key)} has {entry.size} bytes, its marker says {marker.size}: it is damaged"
        )
    return marker.sha256


def _newest(store: ObjectStore, there: dict[str, Object], listed: dict[str, _Listed]) -> dict[str, Object]:
    """The checkpoint of the highest step that is whole, its checksum, and the metrics."""
    steps = {int(match[1]): key for key in there if (match := _CHECKPOINT.fullmatch(key))}
    outputs = OUTPUTS in there  # a checkpoint that the job's marker does not list is not finished
    for _, key in sorted(steps.items(), reverse=True):
        if f"{key}.json" in there and (key in listed or not outputs):
            folder = key.rpartition("checkpoints/")[0]
            names = [key, f"{key}.json", f"{folder}{_METRICS}"]
            return {name: there[name] for name in names if name in there}
    raise BadInput(f"there is no whole checkpoint below {store.location.url()}: checkpoints/step_<n>.pt")


def _is_here(store: ObjectStore, to: str, entry: Object, sha256: str | None, progress) -> bool:
    """Whether the file has this sha256, else the metadata's, else the MD5 that most ETags are."""
    path = local_path(to, entry.key)
    try:
        if os.path.getsize(path) != entry.size or not os.path.isfile(path):
            return False
        if sha256 is None:
            there = store.head(entry.key)
            sha256 = there and there.sha256
        found, md5 = hashlib.sha256(), hashlib.md5(usedforsecurity=False)
        with open(path, "rb") as file:
            while chunk := file.read(2**20):
                found.update(chunk)
                md5.update(chunk)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise of_the_disk(error, path) from error
    return found.hexdigest() == sha256 if sha256 else md5.hexdigest() == entry.etag


def _check_room(to: str, missing: list[Object]) -> None:
    needed, free = sum(entry.size for entry in missing), shutil.disk_usage(to).free
    begun = sum(
        os.path.getsize(os.path.join(base, name))
        for base, _, names in os.walk(to)
        for name in names
        if is_partial(name)
    )
    if needed - begun > free:
        raise BadInput(f"{needed / 1e6:.1f} MB are to be fetched, and {free / 1e6:.1f} MB are free in {to}")


def _fetch(store: ObjectStore, to: str, entry: Object, sha256: str | None, progress) -> None:
    store.fetch(entry.key, local_path(to, entry.key), entry.size, sha256, progress)

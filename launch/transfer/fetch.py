"""Fetch the outputs of a job, or any folder, from an object store.

    python -m launch fetch s3://bucket/outputs | obs://... | RECORD --to FOLDER [--latest_checkpoint] [--yes]

RECORD: of a job that `submit` has sent; its output train_url is meant.
Every file appears whole or not at all, and is compared with the sha256 that its upload left. Files that are
there already are not fetched again, and a fetch that was ended goes on when it is started again. Nothing in
FOLDER is removed. Files in FOLDER that have another content are shown, and replaced only after a yes; without
a terminal to ask on, only with --yes.

Credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, OBS_ACCESS_KEY_ID and OBS_SECRET_ACCESS_KEY, or
boto3's usual files. Place: AWS_ENDPOINT_URL_S3, or OBS_REGION.

Exit codes: 0 all is here, 1 something that the job listed is not in the store, or the answer was no, 2 bad
input or a store that refuses, 130 interrupted.
"""

import hashlib
import os
import re
import shutil
import sys
import time
from functools import partial
from typing import NamedTuple

from common.arguments import Parser
from common.checkpoint import output_list
from common.exits import BadInput
from common.object_store.errors import of_the_disk, shown
from common.object_store.paths import check_keys, is_partial, local_path, make_folder_of, sweep
from common.object_store.store import Object, ObjectStore, parse
from launch import manifests
from launch.platforms import consent
from launch.platforms import records as job_records
from launch.transfer import transfers

_CHECKPOINT = re.compile(r"(?P<folder>(?:.*/)?)checkpoints/step_(?P<step>\d+)\.pt")
_METRICS = "metrics.jsonl"
_SHOWN = 10  # files that would be replaced


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
    parser.add_argument("--yes", action="store_true", help="replace files of another content without asking")
    args = parser.parse_args(arguments)
    url = args.url if "://" in args.url else _output_of(args.url)
    parse(url)
    try:
        return fetch(url, args.to, args.latest_checkpoint, args.yes)
    except KeyboardInterrupt:
        print("interrupted: start it again to go on", file=sys.stderr)
        return transfers.INTERRUPTED


def _output_of(text: str) -> str:
    record = job_records.known(text)
    if not record:
        raise BadInput(
            f"{text} is not s3://bucket/prefix or obs://bucket/prefix, and not the id or the record of a job "
            f"that was sent from here ({job_records.FOLDER})"
        )
    outputs = record.get("outputs")
    outputs = outputs if isinstance(outputs, dict) else {}
    if not isinstance(outputs.get("train_url"), str):
        raise BadInput(f"{text}: no output train_url is known of that job (outputs: {', '.join(outputs)})")
    return outputs["train_url"]


def fetch(url: str, to: str, latest_checkpoint: bool, yes: bool) -> int:
    begin = time.monotonic()
    with ObjectStore(url, transfers.THREADS) as store:
        there = {entry.key: entry for entry in store.list()}
        if not there:
            raise BadInput(f"there is nothing below {url}")
        listed = _listed(store, there)
        wanted = _newest(store, there) if latest_checkpoint else _without_ours(there)
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
        others = sorted(entry.key for entry in missing if os.path.isfile(local_path(to, entry.key)))
        if others and not _may_replace(others, to, yes):
            print("nothing was fetched")
            return 1
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


def _may_replace(others: list[str], to: str, yes: bool) -> bool:
    """Show the files that would be replaced, and ask. Raises BadInput without a terminal to ask on."""
    for key in others[:_SHOWN]:
        print(f"replace {shown(os.path.join(to, key))}")
    if len(others) > _SHOWN:
        print(f"replace {len(others) - _SHOWN} more")
    question = f"replace {len(others)} files in {to} that have another content"
    if yes:
        return True
    if not sys.stdin.isatty():
        raise BadInput(f"there is no terminal to ask on: --yes to {question}, {shown(others[0])} the first")
    return consent.agreed(f"{question}?")


def _listed(store: ObjectStore, there: dict[str, Object], folder: str = "") -> dict[str, _Listed]:
    """Path -> what the lists of jobs and of uploads in a folder say; nothing for other programs' files of
    these names."""
    found = {}
    for name in (manifests.NAME, output_list.NAME):
        entry = there.get(folder + name)
        if not entry:
            continue
        content = store.read(entry.key)
        try:
            _, files = output_list.parse(content)
        except ValueError:
            continue
        found |= {folder + path: _Listed(*file, entry.modified) for path, file in files.items()}
    return found


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


def _newest(store: ObjectStore, there: dict[str, Object]) -> dict[str, Object]:
    """The checkpoint of the highest step that is whole, its checksum, and the metrics. Raises BadInput if
    there is none, or if there are several runs."""
    found = [match for key in there if (match := _CHECKPOINT.fullmatch(key))]
    folders = {match["folder"] for match in found}
    if "" not in folders and len(folders) > 1:
        urls = ", ".join(store.location.url(folder.rstrip("/")) for folder in sorted(folders)[:_SHOWN])
        raise BadInput(f"{store.location.url()} holds {len(folders)} runs: fetch from one of {urls}")
    folder = min(folders, default="")
    steps = {int(match["step"]): match[0] for match in found if match["folder"] == folder}
    listed, job = _listed(store, there, folder), f"{folder}{output_list.NAME}" in there
    for _, key in sorted(steps.items(), reverse=True):  # one that the job's list does not name is not whole
        if f"{key}.json" in there and (key in listed or not job):
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

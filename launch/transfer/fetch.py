"""Fetch the outputs of a job, or any folder, from an object store.

    python -m launch fetch s3://bucket/outputs | obs://... | RECORD --to FOLDER [--yes]

RECORD: the record of a job that `submit` created; its output train_url is fetched.
Writes are atomic, and every file is compared with the sha256 that was stored with it. Files that are
already in FOLDER are not fetched again. Run an interrupted fetch again to continue it. Nothing in FOLDER is
removed. Files in FOLDER with other content are listed, and replaced if you agree; without a terminal, only
with --yes.

Credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, OBS_ACCESS_KEY_ID and OBS_SECRET_ACCESS_KEY, or
boto3's usual files. Address: AWS_ENDPOINT_URL_S3 or OBS_REGION.

Exit codes: 0 all files are fetched, 1 a file that the job listed is not in the store, or the answer was no,
2 bad input or the store refused, 130 interrupted.
"""

import contextlib
import os
import re
import shutil
import time
from functools import partial

from common.checkpoint import output_list
from common.console.arguments import Parser
from common.ground.exits import BadInput
from common.ground.files import md5_file, sha256_file, sweep
from common.object_store.errors import of_the_disk, shown
from common.object_store.paths import check_keys, local_path, make_folder_of
from common.object_store.store import Object, ObjectStore, parse
from launch import confirm, manifests, records
from launch.transfer import parallel
from launch.transfer.parallel import Progress

_BOOTFILE = re.compile(r"(^|/)\.bootfile-[^/]*$")


def main(arguments: list[str]) -> int:
    """Fetch a folder and return the exit code. Raises BadInput."""
    parser = Parser(__doc__)
    parser.prog = "python -m launch fetch"
    parser.add_argument("url", metavar="URL", help="s3://bucket/prefix, obs://bucket/prefix, or RECORD")
    parser.add_argument("--to", metavar="FOLDER", required=True, help="folder for the files")
    parser.add_argument("--yes", action="store_true", help="replace files with other content without asking")
    args = parser.parse_args(arguments)
    url = args.url if "://" in args.url else _output_of(args.url)
    parse(url)
    return fetch(url, args.to, args.yes)


def _output_of(text: str) -> str:
    record = records.find(text)
    if not record:
        raise BadInput(
            f"{text} is not s3://bucket/prefix or obs://bucket/prefix, and not the id or the record of a job "
            f"that was submitted from here ({records.FOLDER})"
        )
    if "train_url" not in record["outputs"]:
        raise BadInput(f"{text}: that job has no output train_url (outputs: {', '.join(record['outputs'])})")
    return record["outputs"]["train_url"]


def fetch(url: str, to: str, yes: bool) -> int:
    """Fetch the files below `url` to the folder `to`, print a summary, and return the exit code. Raises
    BadInput."""
    begin = time.monotonic()
    with ObjectStore(url, parallel.THREADS) as store:
        there = {entry.key: entry for entry in store.list()}
        if not there:
            raise BadInput(f"no objects below {url}")
        listed = _read_listed(store, there)
        # markers and leases are useful in the store only
        wanted = {key: entry for key, entry in there.items() if not _BOOTFILE.search(key)}
        if not wanted and not listed:
            raise BadInput(f"no results below {url}: the job has not saved any yet")
        check_keys(wanted, url)
        for key in wanted:
            make_folder_of(local_path(to, key), key)
        entries = sorted(wanted.values(), key=lambda entry: -entry.size)
        tasks = [partial(_is_here, store, to, entry) for entry in entries]
        known = parallel.run(store, "comparing", 0, tasks)
        missing = [entry for entry, is_here in zip(entries, known, strict=True) if not is_here]
        others = sorted(entry.key for entry in missing if os.path.isfile(local_path(to, entry.key)))
        for key in others:
            print(f"replace {shown(os.path.join(to, key))}")
        question = f"replace {len(others)} files in {to} with other content"
        if others and not confirm.ask(question, yes):
            print("nothing was fetched")
            return 1
        for folder in {os.path.dirname(local_path(to, key)) for key in wanted}:
            sweep(folder)
        size = sum(entry.size for entry in missing)
        if missing and size > (free := shutil.disk_usage(to).free):
            raise BadInput(f"{size / 1e6:.1f} MB are needed, and {free / 1e6:.1f} MB are free in {to}")
        tasks = [partial(store.fetch, entry.key, local_path(to, entry.key), entry.size) for entry in missing]
        parallel.run(store, "fetching", size, tasks)
    seconds = time.monotonic() - begin
    print(f"fetched {parallel.describe([entry.size for entry in missing])} in {seconds:.1f} s to {to}")
    unchanged = [entry.size for entry, is_here in zip(entries, known, strict=True) if is_here]
    print(f"unchanged {parallel.describe(unchanged)}")
    gone = sorted(listed - there.keys())
    if gone:
        print(f"listed, but not in the store: {len(gone)} files, first: {shown(gone[0])}")
    return int(bool(gone))


def _read_listed(store: ObjectStore, there: dict[str, Object]) -> set[str]:
    """Return the paths that the lists of jobs and uploads name. Files of other programs that have the name of
    a list are ignored."""
    listed = set()
    for name in {manifests.NAME, output_list.NAME} & there.keys():
        with contextlib.suppress(ValueError):
            listed |= output_list.parse(store.read(name))[1].keys()
    return listed


def _is_here(store: ObjectStore, to: str, entry: Object, _: Progress) -> bool:
    """Return whether the local file equals the object: by its sha256, or the MD5 in its ETag."""
    path = local_path(to, entry.key)
    try:
        if not os.path.isfile(path) or os.path.getsize(path) != entry.size:
            return False
        stored = store.head(entry.key)
        with open(path, "rb") as file:
            if stored and stored.sha256:
                return sha256_file(file) == stored.sha256
            return stored is not None and md5_file(file) == stored.md5
    except OSError as error:
        raise of_the_disk(error, path) from error

"""Put a folder into an object store: a snapshot of code that `pack` made, or data.

    python -m launch upload FOLDER --to s3://bucket/prefix | obs://bucket/prefix
    python -m launch upload --clean --to s3://... | obs://... [--keep N] [--yes]

A snapshot (a folder with a manifest.json) is stored at URL/<name>-<digest>/. Any other folder is stored at
the URL itself, with a manifest.json that is uploaded last. Files that the store has with the same sha256 are
not sent again. Run an interrupted upload again to continue it. Objects that are not in the folder stay.

--clean, without a FOLDER, removes old snapshots and unfinished uploads below the URL, after showing them. The
newest N snapshots of each name stay, and so do outputs, data and all other files. Unfinished uploads of big
files are invisible, never expire and cost money; younger ones than a day stay, because they may be running.
Without a terminal, --yes is required.

Credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, OBS_ACCESS_KEY_ID and OBS_SECRET_ACCESS_KEY, or
boto3's usual files. Address: AWS_ENDPOINT_URL_S3 or OBS_REGION.

Exit codes: 0 all files are stored, or the removal is done; 1 the answer was no; 2 bad input or the store
refused; 130 interrupted.
"""

import itertools
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

from bootfile.ground.errors import BadInput, printable
from common.console.arguments import Parser, positive_int
from common.object_store import sync
from common.object_store.errors import of_the_disk
from common.object_store.location import check_keys
from common.object_store.store import Object, ObjectStore
from launch import manifests
from launch.explain import align, ask, format_time, human_size
from launch.transfer import describe, show_progress

_KEEP = 3  # snapshots of each name that --clean keeps
_DAY = 86400.0  # seconds


def main(arguments: list[str]) -> int:
    """Upload a folder, print a summary, and return the exit code. Raises BadInput."""
    parser = Parser(__doc__, "python -m launch upload")
    add = parser.add_argument
    add("folder", metavar="FOLDER", nargs="?", help="folder to upload")
    add("--to", metavar="URL", required=True, help="s3://bucket/prefix or obs://bucket/prefix")
    help = "remove old snapshots and unfinished uploads, in place of an upload"
    add("--clean", action="store_true", help=help)
    help = f"with --clean: newest snapshots to keep of each name (default: {_KEEP})"
    add("--keep", type=positive_int, help=help)
    add("--yes", action="store_true", help="with --clean: remove without asking")
    args = parser.parse_args(arguments)
    if args.clean:
        if args.folder:
            raise BadInput(f"--clean uploads nothing: leave out {args.folder}, or leave out --clean")
        return _clean(args.to, args.keep or _KEEP, args.yes)
    if args.keep or args.yes:
        raise BadInput("--keep and --yes need --clean")
    if not args.folder:
        raise BadInput("no FOLDER: name the folder to upload, or pass --clean")
    return _upload(args.folder, args.to)


def _upload(folder: str, url: str) -> int:
    begin = time.monotonic()
    if not os.path.isdir(folder):
        raise BadInput(f"{folder} is not a folder")
    manifest = _read_snapshot(folder)
    if manifest:
        url = f"{url.rstrip('/')}/{manifests.make_folder_name(manifest)}"
    with ObjectStore(url) as store:
        manifest = manifest or manifests.describe_folder(folder)
        wanted = manifests.list_objects(manifest)
        if not wanted:
            raise BadInput(f"{folder} contains no files")
        stored_sizes = {entry.key: entry.size for entry in store.list()}
        stored = None  # the manifest of an earlier upload
        if manifests.NAME in stored_sizes:
            stored = manifests.parse(store.read(manifests.NAME))
            if not stored:
                place = store.location.url(manifests.NAME)
                raise BadInput(f"{place} was not written by `upload`: it is not replaced")
        without_digest: list[str] = []

        def is_stored(entry: Object) -> bool:
            """Return whether a file need not be sent: sync.compare() calls it in its threads."""
            # The listing has sizes: a request for each file is only needed where they agree.
            if stored_sizes.get(entry.key) != entry.size:
                return False
            stored_object = store.head(entry.key)
            if stored_object and not stored_object.sha256:
                without_digest.append(entry.key)
            return stored_object is not None and stored_object.sha256 == entry.sha256

        missing, unchanged = sync.compare(store, wanted, is_stored)
        if missing or stored != manifest:
            # First: during the upload the stored folder matches neither the old manifest nor the new one.
            if stored:
                store.delete([manifests.NAME])
            with show_progress("sending", missing) as bar:
                sync.send(store, folder, missing, bar)
            # Last: a job that waits for the folder begins when the manifest is there.
            store.write(manifests.NAME, manifests.to_bytes(manifest))
    seconds = time.monotonic() - begin
    print(f"sent {describe(missing)} in {seconds:.1f} s")
    if without_digest:
        count = len(without_digest)
        print(f"the store keeps no sha256 of {count} files of the same size: they were sent again")
    print(f"unchanged {describe(unchanged)}")
    # They may be results, or data of another upload to the same URL: only --clean removes anything.
    others = stored_sizes.keys() - {entry.key for entry in wanted} - {manifests.NAME}
    if others:
        print(f"kept {len(others)} objects that are not in {folder}, first: {printable(min(others))}")
    print(store.location.url())
    return 0


def _read_snapshot(folder: str) -> dict | None:
    """Return the manifest of a snapshot; None for any other folder. Raises BadInput."""
    path = os.path.join(folder, manifests.NAME)
    try:
        with open(path, "rb") as file:
            manifest = manifests.parse(file.read())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise of_the_disk(error, path) from error
    if not manifest:
        raise BadInput(f"{path} is not a manifest that `pack` made: rename that file")
    if not manifest["job"]:  # the manifest of data that were fetched
        return None
    # Someone else may have written it: its paths become keys below the URL.
    check_keys((file["path"] for file in manifest["files"]), path)
    return manifest


class _Snapshot(NamedTuple):
    """A snapshot at the URL. folder: its key. size: bytes. modified: since 1970, in s. files: its paths."""

    folder: str
    name: str
    size: int
    modified: float
    files: list[str]


def _clean(url: str, keep: int, yes: bool) -> int:
    """Show old snapshots and unfinished uploads, ask, remove them, and return the exit code. keep: newest
    snapshots of each name that stay. yes: do not ask. Raises BadInput."""
    with ObjectStore(url) as store:
        # by name, the newest first
        snapshots = sorted(_find_snapshots(store), key=lambda snapshot: (snapshot.name, -snapshot.modified))
        old: list[_Snapshot] = []
        for _, snapshots_of_a_name in itertools.groupby(snapshots, key=lambda snapshot: snapshot.name):
            old += [*snapshots_of_a_name][keep:]
        rows = []
        for snapshot in snapshots:
            action = "remove" if snapshot in old else "keep"
            size = human_size(snapshot.size)
            rows.append((action, "snapshot", snapshot.folder, size, format_time(snapshot.modified)))
        uploads = list(store.uploads())
        latest = time.time() - _DAY  # another process may still send a younger one
        unfinished = [(key, id) for key, id, began in uploads if began <= latest]
        for key, _, began in uploads:
            action = "remove" if began <= latest else "keep"
            rows.append((action, "unfinished", printable(key), "", format_time(began)))
        # The user sees all of them before the question, also what stays.
        for line in align(rows):
            print(line)
        if not old and not unfinished:
            print("nothing to remove")
            return 0
        total = human_size(sum(snapshot.size for snapshot in old))
        what = f"{len(old)} snapshots ({total}) and {len(unfinished)} unfinished uploads"
        if not ask(f"remove {what}", yes):
            print("nothing was removed")
            return 1
        for key, id in unfinished:
            store.abort(key, id)
        # A job that starts meanwhile finds either a whole snapshot or none: its files go before its manifest.
        for snapshot in old:
            store.delete(f"{snapshot.folder}/{path}" for path in snapshot.files)
            store.delete([f"{snapshot.folder}/{manifests.NAME}"])  # last: it lists the remaining files
            print(f"removed {snapshot.folder}", flush=True)
        print(f"removed {what}")
        return 0


def _find_snapshots(store: ObjectStore) -> Iterator[_Snapshot]:
    """Yield the folders below the URL whose manifest belongs to their name."""
    for folder in store.folders():
        stored = store.head(f"{folder}/{manifests.NAME}")
        if not stored:
            continue
        manifest = manifests.parse(store.read(stored.key))
        # data that were uploaded have a manifest too: only snapshots of code are removed
        if not manifest or not manifest["job"] or manifests.make_folder_name(manifest) != folder:
            continue
        if not stored.modified:
            raise BadInput(f"{store.location.url(stored.key)}: the store does not tell its age")
        # of the files that the manifest lists: others in the folder are not ours to remove
        sizes = {file["path"]: file["size"] for file in manifest["files"]}
        yield _Snapshot(folder, manifest["name"], sum(sizes.values()), stored.modified, list(sizes))

"""Put a folder into an object store: a snapshot of code that `pack` made, or data.

    python -m launch upload FOLDER --to s3://bucket/prefix | obs://bucket/prefix

A snapshot (a folder with a manifest.json) goes to URL/<name>-<digest>/, anything else to the URL itself, with
a manifest.json that is made here. manifest.json comes last: what has one is all there. Files that are there
with the same sha256 are not sent again. An upload that was ended goes on when it is started again; what is
not in the folder stays in the store. Credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY,
OBS_ACCESS_KEY_ID and OBS_SECRET_ACCESS_KEY, or boto3's usual files. Place: AWS_ENDPOINT_URL_S3 or OBS_REGION.

Exit codes: 0 all is there, 2 bad input or a store that refuses, 130 interrupted.
"""

import os
import sys
import time
from functools import partial

from common.arguments import Parser
from common.exits import BadInput, printable
from common.object_store.errors import of_the_disk
from common.object_store.paths import check_keys
from common.object_store.store import Object, ObjectStore, parse
from launch import manifests
from launch.transfer import transfers


def main(arguments: list[str]) -> int:
    """Upload, say what was sent and where it is, and return the exit code. Raises BadInput."""
    parser = Parser(__doc__)
    parser.prog = "python -m launch upload"
    parser.add_argument("folder", metavar="FOLDER", help="what to upload")
    parser.add_argument(
        "--to", metavar="URL", required=True, help="s3://bucket/prefix or obs://bucket/prefix"
    )
    args = parser.parse_args(arguments)
    parse(args.to)
    if not os.path.isdir(args.folder):
        raise BadInput(f"{args.folder} is no folder")
    try:
        return upload(args.folder, args.to)
    except KeyboardInterrupt:
        print("interrupted: start it again to go on", file=sys.stderr)
        return transfers.INTERRUPTED


def upload(folder: str, to: str) -> int:
    begin = time.monotonic()
    manifest = _snapshot(folder)
    url = f"{to.rstrip('/')}/{manifests.folder_name(manifest)}" if manifest else to
    manifest = manifest or manifests.of_data(folder, transfers.THREADS)
    files = manifest["files"]
    if not files:
        raise BadInput(f"there are no files in {folder}")
    with ObjectStore(url, transfers.THREADS) as store:
        there = {entry.key: entry for entry in store.list()}
        missing, complete = _missing(store, files, there, manifest)
        if not complete:
            # From here until the end the folder in the store is neither the old one nor the new one.
            if manifests.NAME in there:
                store.delete([manifests.NAME])
            tasks = [partial(_send, store, folder, file) for file in _largest_first(missing)]
            transfers.run(store, "sending", sum(file["size"] for file in missing), tasks)
            store.write(manifests.NAME, manifests.text(manifest))
    sent = sum(file["size"] for file in missing)
    kept = sum(file["size"] for file in files) - sent
    seconds = time.monotonic() - begin
    print(f"sent {transfers.amount(len(missing), sent)} in {seconds:.1f} s")
    print(f"unchanged {transfers.amount(len(files) - len(missing), kept)}")
    others = there.keys() - {file["path"] for file in files} - {manifests.NAME}
    if others:
        first = printable(min(others))
        print(f"left as they are: {len(others)} objects that are not in {folder}, {first} the first")
    print(store.location.url())
    return 0


def _snapshot(folder: str) -> dict | None:
    """The manifest of a snapshot; None for any other folder."""
    path = os.path.join(folder, manifests.NAME)
    try:
        with open(path, "rb") as file:
            manifest = manifests.parsed(file.read())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise of_the_disk(error, path) from error
    if not manifest:
        raise BadInput(
            f"{path} is not a manifest that pack made: the name is taken, give that file another one"
        )
    if not manifest["job"]:  # of data that were fetched
        return None
    check_keys((file["path"] for file in manifest["files"]), path)
    return manifest


def _missing(
    store: ObjectStore, files: list[dict], there: dict[str, Object], manifest: dict
) -> tuple[list[dict], bool]:
    """(the files to send, whether nothing is to do at all).

    One listing has the sizes; the sha256 is that of the earlier manifest, for objects that are older than it.
    Only about the others the store is asked, one by one: after an upload that was ended, or where something
    else wrote there.
    """
    earlier, written, when = {}, None, 0.0
    if manifests.NAME in there:
        written = manifests.parsed(store.read(manifests.NAME))
        if not written:
            raise BadInput(
                f"{store.location.url(manifests.NAME)} is not a manifest of ours: nothing is written over it"
            )
        earlier = {file["path"]: file["sha256"] for file in written["files"]}
        when = there[manifests.NAME].modified

    def is_there(file: dict, progress) -> bool:
        entry = there.get(file["path"])
        if entry is None or entry.size != file["size"]:
            return False
        if entry.modified < when:
            return earlier.get(file["path"]) == file["sha256"]
        found = store.head(file["path"])
        return found is not None and found.sha256 == file["sha256"]

    known = transfers.run(store, "comparing", 0, [partial(is_there, file) for file in files])
    missing = [file for file, here in zip(files, known, strict=True) if not here]
    return missing, not missing and written == manifest


def _largest_first(files: list[dict]) -> list[dict]:
    return sorted(files, key=lambda file: -file["size"])


def _send(store: ObjectStore, folder: str, file: dict, progress) -> None:
    store.send(os.path.join(folder, file["path"]), file["path"], progress, file["sha256"])

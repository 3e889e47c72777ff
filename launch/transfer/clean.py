"""Remove old snapshots of code and unfinished uploads from an object store, after showing them.

    python -m launch clean s3://bucket/prefix | obs://... [--keep N] [--yes]

A snapshot is a folder <name>-<digest> directly below the URL, with its manifest.json. The newest N of each
name stay. Only files that a manifest lists are removed, and the manifest last. Outputs, data and all other
files stay. Unfinished uploads of big files are invisible, never expire and cost money; younger ones than a
day stay, because they may be running. Without a terminal, --yes is required.

Exit codes: 0 done, 1 the answer was no, 2 bad input or the store refused, 130 interrupted.
"""

import itertools
import time
from collections.abc import Iterator
from typing import NamedTuple

from bootfile.ground.errors import BadInput, printable
from common.console.arguments import Parser, positive_int
from common.object_store.store import ObjectStore
from launch import confirm, manifests
from launch.explain import align, format_time, human_size

_DAY = 86400.0  # seconds


class _Snapshot(NamedTuple):
    """A snapshot of code at the URL.

    folder: its key below the URL, <name>-<digest>
    name: of the job
    size: bytes of all files
    modified: seconds since 1970
    files: paths in the folder
    """

    folder: str
    name: str
    size: int
    modified: float
    files: list[str]

    @property
    def order(self) -> tuple[str, float]:
        """Return the key of a sort by name, the newest first."""
        return self.name, -self.modified


class _Upload(NamedTuple):
    """An upload of one big file that was not finished.

    key: of the file. id: of the upload. began: seconds since 1970
    """

    key: str
    id: str
    began: float


def main(arguments: list[str]) -> int:
    """Show old snapshots and unfinished uploads, ask, remove them, and return the exit code.

    `python -m launch clean` calls it. Raises BadInput.
    """
    parser = Parser(__doc__, "python -m launch clean")
    parser.add_argument("url", metavar="URL", help="the URL that was given to `upload`")
    parser.add_argument(
        "--keep", type=positive_int, default=3, help="newest snapshots to keep of each name (default: 3)"
    )
    parser.add_argument("--yes", action="store_true", help="remove without asking")
    args = parser.parse_args(arguments)
    with ObjectStore(args.url) as store:
        return _clean(store, args.keep, args.yes)


def _clean(store: ObjectStore, keep: int, yes: bool) -> int:
    """Do what main() says with an open store. keep: newest snapshots of each name. yes: do not ask."""
    snapshots = sorted(_find_snapshots(store), key=lambda snapshot: snapshot.order)
    uploads = [_Upload(*upload) for upload in store.uploads()]
    old = []
    for _, group in itertools.groupby(snapshots, key=lambda snapshot: snapshot.name):
        old += [*group][keep:]
    left = [upload for upload in uploads if upload.began <= time.time() - _DAY]
    rows = []
    for snapshot in snapshots:
        verb = "remove" if snapshot in old else "keep"
        size = human_size(snapshot.size)
        rows.append((verb, "snapshot", snapshot.folder, size, format_time(snapshot.modified)))
    for upload in uploads:
        verb = "remove" if upload in left else "keep"
        rows.append((verb, "unfinished", printable(upload.key), "", format_time(upload.began)))
    for line in align(rows):
        print(line)
    if not old and not left:
        print("nothing to remove")
        return 0
    total = human_size(sum(snapshot.size for snapshot in old))
    what = f"{len(old)} snapshots ({total}) and {len(left)} unfinished uploads"
    if not confirm.ask(f"remove {what}", yes):
        print("nothing was removed")
        return 1
    for upload in left:
        store.abort(upload.key, upload.id)
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
        if not manifest or not manifest["job"] or manifests.make_folder_name(manifest) != folder:
            continue
        if not stored.modified:
            raise BadInput(f"{store.location.url(stored.key)}: the store does not tell its age")
        sizes = {file["path"]: file["size"] for file in manifest["files"]}
        yield _Snapshot(folder, manifest["name"], sum(sizes.values()), stored.modified, list(sizes))

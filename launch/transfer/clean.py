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
    folder: str
    name: str
    size: int
    modified: float  # seconds since 1970
    files: list[str]


def main(arguments: list[str]) -> int:
    """Show old snapshots and unfinished uploads, ask, remove them, and return the exit code. Raises
    BadInput."""
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
    snapshots = sorted(_find_snapshots(store), key=lambda each: (each.name, -each.modified))
    uploads = list(store.uploads())
    by_name = itertools.groupby(snapshots, key=lambda each: each.name)
    old = [each for _, group in by_name for each in [*group][keep:]]
    left = [each for each in uploads if each[2] <= time.time() - _DAY]
    rows = [
        (each in old, "snapshot", each.folder, human_size(each.size), each.modified) for each in snapshots
    ]
    rows += [(each in left, "unfinished", printable(each[0]), "", each[2]) for each in uploads]
    for line in align((("keep", "remove")[row[0]], *row[1:4], format_time(row[4])) for row in rows):
        print(line)
    if not old and not left:
        print("nothing to remove")
        return 0
    total = human_size(sum(each.size for each in old))
    what = f"{len(old)} snapshots ({total}) and {len(left)} unfinished uploads"
    if not confirm.ask(f"remove {what}", yes):
        print("nothing was removed")
        return 1
    for key, upload, _ in left:
        store.abort(key, upload)
    for each in old:
        store.delete(f"{each.folder}/{path}" for path in each.files)
        store.delete([f"{each.folder}/{manifests.NAME}"])  # last: it lists the remaining files
        print(f"removed {each.folder}", flush=True)
    print(f"removed {what}")
    return 0


def _find_snapshots(store: ObjectStore) -> Iterator[_Snapshot]:
    """Yield the folders below the URL whose manifest belongs to their name."""
    for folder in store.folders():
        there = store.head(f"{folder}/{manifests.NAME}")
        manifest = manifests.parse(store.read(there.key)) if there else None
        if there and manifest and manifest["job"] and manifests.make_folder_name(manifest) == folder:
            if not there.modified:
                raise BadInput(f"{store.location.url(there.key)}: the store does not tell its age")
            sizes = {file["path"]: file["size"] for file in manifest["files"]}
            yield _Snapshot(folder, manifest["name"], sum(sizes.values()), there.modified, list(sizes))

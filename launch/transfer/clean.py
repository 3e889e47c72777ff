"""Remove old snapshots of code and unfinished uploads from an object store, after showing them.

    python -m launch clean s3://bucket/prefix | obs://... [--keep N] [--older_than DAYS] [--yes]

A snapshot is a folder directly below the URL that `upload` has finished: <name>-<digest> with its
manifest.json. Of each name the newest N stay. Only files that a manifest lists are removed, the manifest
last; outputs, data and everything else stay. Unfinished uploads of big files below the URL are invisible,
never expire and cost money. Without a terminal to ask on, nothing is removed without --yes.

Exit codes: 0 done, 1 the answer was no, 2 bad input or a store that refuses, 130 interrupted.
"""

import sys
import time
from typing import NamedTuple

from common.arguments import Parser, non_negative_float, positive_int
from common.exits import BadInput
from common.object_store.errors import shown
from common.object_store.store import ObjectStore, parse
from launch import manifests
from launch.transfer import transfers

_DAY = 86400.0  # seconds


class _Snapshot(NamedTuple):
    folder: str
    name: str
    size: int
    modified: float  # seconds since 1970
    files: list[str]


def main(arguments: list[str]) -> int:
    """Show, ask, remove, and return the exit code. Raises BadInput."""
    parser = Parser(__doc__)
    parser.prog = "python -m launch clean"
    parser.add_argument("url", metavar="URL", help="where `upload` was told to upload")
    parser.add_argument(
        "--keep", type=positive_int, default=3, help="newest snapshots of each name that stay (default: 3)"
    )
    parser.add_argument(
        "--older_than",
        metavar="DAYS",
        type=non_negative_float,
        help="only what is older (default: 0; 1 for unfinished uploads, which may be going on)",
    )
    parser.add_argument("--yes", action="store_true", help="remove without asking")
    args = parser.parse_args(arguments)
    parse(args.url)
    try:
        with ObjectStore(args.url, transfers.THREADS) as store:
            return clean(store, args.keep, args.older_than, args.yes)
    except KeyboardInterrupt:
        print("interrupted: what was not removed is still there", file=sys.stderr)
        return transfers.INTERRUPTED


def clean(store: ObjectStore, keep: int, older_than: float | None, yes: bool) -> int:
    now = time.time()
    snapshots = sorted(_snapshots(store), key=lambda each: (each.name, -each.modified))
    uploads = store.uploads()
    old, seen = [], {}
    for each in snapshots:
        seen[each.name] = seen.get(each.name, 0) + 1
        if seen[each.name] > keep and now - each.modified >= (older_than or 0) * _DAY:
            old.append(each)
    least = _DAY * (1 if older_than is None else older_than)
    left = [each for each in uploads if now - each[2] >= least]
    _show(snapshots, old, uploads, left)
    if not old and not left:
        print("nothing to remove")
        return 0
    size = sum(each.size for each in old)
    question = f"remove {len(old)} snapshots ({size / 1e6:.1f} MB) and {len(left)} unfinished uploads"
    if not yes and not sys.stdin.isatty():
        raise BadInput(f"there is no terminal to ask on: --yes to {question}")
    if not yes and input(f"{question}? [y/N] ").strip().lower() not in ("y", "yes"):
        print("nothing was removed")
        return 1
    for key, upload, _ in left:
        store.abort(key, upload)
    for each in old:
        store.delete(f"{each.folder}/{path}" for path in each.files)
        store.delete([f"{each.folder}/{manifests.NAME}"])  # last: without it nobody would know what is left
        print(f"removed {each.folder}", flush=True)
    print(f"removed {len(old)} snapshots ({size / 1e6:.1f} MB) and {len(left)} unfinished uploads")
    return 0


def _snapshots(store: ObjectStore) -> list[_Snapshot]:
    """Those folders below the URL whose manifest belongs to their name."""
    found = []
    for folder in store.folders():
        there = store.head(f"{folder}/{manifests.NAME}")
        manifest = there and manifests.parsed(store.read(there.key))
        if manifest and manifest["job"] and manifests.folder_name(manifest) == folder:
            sizes = {file["path"]: file["size"] for file in manifest["files"]}
            found.append(
                _Snapshot(folder, manifest["name"], sum(sizes.values()), there.modified, list(sizes))
            )
    return found


def _show(snapshots, old, uploads, left) -> None:
    rows = []
    for each in snapshots:
        rows.append(("snapshot", each.folder, f"{each.size / 1e6:.1f} MB", each.modified, each in old))
    rows += [("unfinished", each[0], "", each[2], each in left) for each in uploads]
    width = max([len(shown(row[1])) for row in rows], default=0)
    for kind, name, size, modified, goes in rows:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(modified))
        print(f"{'remove' if goes else 'keep':<8}{kind:<12}{shown(name):<{width + 2}}{size:>12}  {when}")

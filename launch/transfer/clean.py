"""Remove old snapshots of code and unfinished uploads from an object store, after showing them.

    python -m launch clean s3://bucket/prefix | obs://... [--keep N] [--older_than DAYS] [--yes]

A snapshot is a folder <name>-<digest> directly below the URL, with its manifest.json. The newest N of each
name stay. Only files that a manifest lists are removed, and the manifest last. Outputs, data and all other
files stay. Unfinished uploads of big files are invisible, never expire and cost money. Without a terminal,
--yes is required.

Exit codes: 0 done, 1 the answer was no, 2 bad input or the store refused, 130 interrupted.
"""

import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from common.console.arguments import Parser, non_negative_float, positive_int
from common.object_store.errors import shown
from common.object_store.store import ObjectStore, parse
from launch import confirm, manifests
from launch.explain import human_size
from launch.transfer import parallel

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
    parser.add_argument("url", metavar="URL", help="the URL that was given to `upload`")
    parser.add_argument(
        "--keep", type=positive_int, default=3, help="newest snapshots to keep of each name (default: 3)"
    )
    parser.add_argument(
        "--older_than",
        metavar="DAYS",
        type=non_negative_float,
        help="minimum age (default: 0; 1 for unfinished uploads, which may be running)",
    )
    parser.add_argument("--yes", action="store_true", help="remove without asking")
    args = parser.parse_args(arguments)
    parse(args.url)
    try:
        with ObjectStore(args.url, parallel.THREADS) as store:
            return clean(store, args.keep, args.older_than, args.yes)
    except KeyboardInterrupt:
        print("interrupted: start it again to remove the rest", file=sys.stderr)
        return parallel.INTERRUPTED


def clean(store: ObjectStore, keep: int, older_than: float | None, yes: bool) -> int:
    """Remove old snapshots and unfinished uploads after asking, and return the exit code.

    older_than: days; None for the defaults. Raises BadInput.
    """
    now = time.time()
    snapshots = sorted(_find_snapshots(store), key=lambda each: (each.name, -each.modified))
    uploads = list(store.uploads())
    old, seen = [], Counter[str]()
    for each in snapshots:
        seen[each.name] += 1
        if seen[each.name] > keep and now - each.modified >= (older_than or 0) * _DAY:
            old.append(each)
    least = _DAY * (1 if older_than is None else older_than)
    left = [each for each in uploads if now - each[2] >= least]
    rows = [
        ("snapshot", each.folder, human_size(each.size), each.modified, each in old) for each in snapshots
    ]
    rows += [("unfinished", each[0], "", each[2], each in left) for each in uploads]
    width = max([len(shown(row[1])) for row in rows], default=0)
    for kind, name, size, modified, is_removed in rows:
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(modified))
        print(
            f"{'remove' if is_removed else 'keep':<8}{kind:<12}{shown(name):<{width + 2}}{size:>12}  {when}"
        )
    if not old and not left:
        print("nothing to remove")
        return 0
    total = human_size(sum(each.size for each in old))
    what = f"{len(old)} snapshots ({total}) and {len(left)} unfinished uploads"
    if not confirm.ask_on_terminal(f"remove {what}", yes):
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
            sizes = {file["path"]: file["size"] for file in manifest["files"]}
            yield _Snapshot(folder, manifest["name"], sum(sizes.values()), there.modified, list(sizes))

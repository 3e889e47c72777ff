"""Remove old snapshots of code and unfinished uploads from an object store, after showing them.

A snapshot is a folder <name>-<digest> directly below the URL, with its manifest.json. Only files that a
manifest lists are removed, and the manifest last.
"""

import itertools
import time
from collections.abc import Iterator
from typing import NamedTuple

from bootfile.ground.errors import BadInput, printable
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


def clean(url: str, keep: int, yes: bool) -> int:
    """Show old snapshots and unfinished uploads, ask, remove them, and return the exit code. Raises
    BadInput.

    keep: newest snapshots of each name that stay. yes: remove without asking.
    """
    with ObjectStore(url) as store:
        return _clean(store, keep, yes)


def _clean(store: ObjectStore, keep: int, yes: bool) -> int:
    snapshots = sorted(_find_snapshots(store), key=_by_name_and_age)
    uploads = list(store.uploads())
    old: list[_Snapshot] = []
    for _, snapshots_of_a_name in itertools.groupby(snapshots, key=_name_of):
        old += [*snapshots_of_a_name][keep:]
    left = [upload for upload in uploads if upload[2] <= time.time() - _DAY]  # younger ones may be running
    rows = []
    for snapshot in snapshots:
        action = "remove" if snapshot in old else "keep"
        size, age = human_size(snapshot.size), format_time(snapshot.modified)
        rows.append((action, "snapshot", snapshot.folder, size, age))
    for upload in uploads:
        action = "remove" if upload in left else "keep"
        rows.append((action, "unfinished", printable(upload[0]), "", format_time(upload[2])))
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
    for key, upload_id, _ in left:
        store.abort(key, upload_id)
    for snapshot in old:
        store.delete(f"{snapshot.folder}/{path}" for path in snapshot.files)
        store.delete([f"{snapshot.folder}/{manifests.NAME}"])  # last: it lists the remaining files
        print(f"removed {snapshot.folder}", flush=True)
    print(f"removed {what}")
    return 0


def _name_of(snapshot: _Snapshot) -> str:
    return snapshot.name


def _by_name_and_age(snapshot: _Snapshot) -> tuple[str, float]:
    return snapshot.name, -snapshot.modified  # the newest first


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

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
from launch import manifests
from launch.explain import align, ask, format_time, human_size

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


def clean(url: str, keep: int, yes: bool) -> int:
    """Show old snapshots and unfinished uploads, ask, remove them, and return the exit code. `python -m
    launch upload --clean` calls it. keep: newest snapshots of each name that stay. yes: remove without
    asking. Raises BadInput."""
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
        unfinished = []  # (key, id) of the uploads to remove
        for key, id, began in store.uploads():
            action = "keep"  # another process may still send it
            if began <= time.time() - _DAY:
                action = "remove"
                unfinished.append((key, id))
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

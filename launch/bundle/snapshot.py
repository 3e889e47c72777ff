"""Write a snapshot of code: a folder with a manifest, whose name contains the digest of its content."""

import contextlib
import os

from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained
from common.ground.files import locked, make_folder_atomic
from launch import manifests


def write(to: str, manifest: dict, contents: dict[str, str | bytes]) -> tuple[str, bool]:
    """Write the snapshot to the folder `to` atomically, for `pack`. Return (its path, False if it existed).

    contents: path in the snapshot, with / -> file to copy, or the content itself

    Raises BadInput if a snapshot of that name was changed, if a file changes while it is copied, or if the
    disk is full.
    """
    final = os.path.join(to, manifests.make_folder_name(manifest))
    with explained(f"{to} cannot be written"):
        os.makedirs(to, exist_ok=True)
        with locked(to):
            # the name has the digest of the content: a folder of this name is compared, and never replaced
            if os.path.lexists(final):
                wrong = _find_wrong(final, manifest)
                if wrong:
                    raise BadInput(f"{final} exists, and {wrong} in it is not what was packed: delete it")
                return final, False
            with make_folder_atomic(final) as folder:
                manifests.write_files(folder, contents | {manifests.NAME: manifests.to_bytes(manifest)})
                wrong = _find_wrong(folder, manifest)
                if wrong:
                    raise BadInput(f"{wrong} was changed while it was packed")
    return final, True


def _find_wrong(folder: str, manifest: dict) -> str | None:
    """Return a file of a snapshot that is not what the manifest lists; None if all are. Other files, such as
    __pycache__, are ignored."""
    stored = None
    with contextlib.suppress(OSError), open(os.path.join(folder, manifests.NAME), "rb") as content:
        stored = manifests.parse(content.read())
    if not stored or stored | {"git": None} != manifest | {"git": None}:
        return manifests.NAME
    for file in manifest["files"]:
        source = os.path.join(folder, file["path"])
        if not os.path.isfile(source) or manifests.describe_file(file["path"], source) != file:
            return file["path"]
    return None

"""manifest.json of a folder in an object store: its files with their sha256. What has one is all there.

    {"format": 1, "name", "digest", "files": [{"path", "size", "sha256"}...], "git", "job"}

digest: SHA-256 over `path NUL sha256 LF` of the files by path. A snapshot of code, made by `pack`, is stored
in a folder <name>-<first 12 characters of the digest>; data are stored where the user says.
"""

import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor

from common.exits import BadInput
from common.object_store.errors import of_the_disk, shown
from common.object_store.paths import check_keys, is_partial

NAME = "manifest.json"
_FORMAT = 1
_HASH = re.compile("[0-9a-f]{64}")


def parsed(content: bytes) -> dict | None:
    """A manifest, every field of it checked; None for what is none."""
    try:
        manifest = json.loads(content)
        files = manifest["files"]
        fine = (
            manifest["format"] == _FORMAT
            and isinstance(manifest["name"], str)
            and _HASH.fullmatch(manifest["digest"])
            and all(isinstance(file["path"], str) and _HASH.fullmatch(file["sha256"]) for file in files)
            and all(type(file["size"]) is int and file["size"] >= 0 for file in files)
            and digest(files) == manifest["digest"]
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return manifest if fine else None


def digest(files: list[dict]) -> str:
    """That of a manifest's files."""
    found = hashlib.sha256()
    for file in sorted(files, key=lambda file: file["path"].encode()):
        found.update(f"{file['path']}\0{file['sha256']}\n".encode())
    return found.hexdigest()


def folder_name(manifest: dict) -> str:
    """Of a snapshot."""
    return f"{manifest['name']}-{manifest['digest'][:12]}"


def text(manifest: dict) -> bytes:
    return (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode()


def of_data(folder: str, threads: int) -> dict:
    """The manifest of all files in a folder, read once. Raises BadInput for what cannot be stored."""
    paths = sorted(_paths_in(folder))
    check_keys(paths, folder)
    with ThreadPoolExecutor(threads) as pool:
        files = list(pool.map(lambda path: _file(folder, path), paths))
    return {
        "format": _FORMAT, "name": os.path.basename(os.path.abspath(folder)), "digest": digest(files),
        "files": files, "git": None, "job": None,
    }  # fmt: skip


def _paths_in(folder: str):
    def unreadable(error: OSError):
        raise of_the_disk(error, error.filename) from error

    for base, folders, names in os.walk(folder, onerror=unreadable):
        for name in folders:
            if os.path.islink(os.path.join(base, name)):
                raise BadInput(
                    f"{shown(os.path.join(base, name))} is a link to a folder: put the files there"
                )
        for name in names:
            path = os.path.join(base, name)
            if not os.path.isfile(path):
                raise BadInput(f"{shown(path)} is no file that can be stored")
            if not is_partial(name) and path != os.path.join(folder, NAME):
                yield os.path.relpath(path, folder)


def _file(folder: str, path: str) -> dict:
    found, size = hashlib.sha256(), 0
    try:
        with open(os.path.join(folder, path), "rb") as file:
            while chunk := file.read(2**20):
                found.update(chunk)
                size += len(chunk)
    except OSError as error:
        raise of_the_disk(error, os.path.join(folder, path)) from error
    return {"path": path, "size": size, "sha256": found.hexdigest()}

"""Read and write manifest.json, the list of a folder's files with their sha256.

    {"format": 1, "name", "digest", "files": [{"path", "size", "sha256"}...], "git", "job"}

It is uploaded last, so a stored folder that has one is complete. digest: SHA-256 over `path NUL sha256 LF`
of the files by path. A snapshot of code, made by `pack`, is stored in a folder <name>-<first 12 characters of
the digest>. Data are stored at the URL that the user gives.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from bootfile.ground.errors import BadInput, printable
from bootfile.ground.files import PARTIAL, sha256_file
from common.checkpoint import output_list
from common.object_store import sync
from common.object_store.errors import of_the_disk
from common.object_store.location import check_keys
from common.object_store.store import Object

NAME = "manifest.json"


def describe(
    name: str, sources: dict[str, str | bytes], job: str | None = None, git: str | None = None
) -> dict:
    """Return the manifest of files, whose digest covers paths and contents. Raises BadInput.

    sources: path in the manifest, with / -> path on this node, or the content
    job: the boot file of a snapshot"""
    paths = sorted(sources)
    # in threads: hashlib releases Python's lock for large blocks
    with ThreadPoolExecutor() as pool:
        files = list(pool.map(describe_file, paths, [sources[path] for path in paths]))
    listed = {"format": output_list.FORMAT, "name": name, "digest": _digest(files), "files": files}
    return listed | {"git": git, "job": job}


def describe_file(path: str, source: str | bytes) -> dict:
    """Return the entry of a file: see describe(). Raises BadInput if it cannot be read."""
    try:
        with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb") as file:
            digest = sha256_file(file)
            return {"path": path, "size": file.tell(), "sha256": digest}
    except OSError as error:
        raise of_the_disk(error, str(source)) from error


def parse(content: bytes) -> dict | None:
    """Return a checked manifest; None if it is not one."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        output_list.parse(content)
        manifest = json.loads(content)
        # another program may have a manifest.json: only one with the digest of its list is ours
        is_named = isinstance(manifest["name"], str) and "job" in manifest
        return manifest if is_named and manifest["digest"] == _digest(manifest["files"]) else None
    return None


def _digest(files: list[dict]) -> str:
    """Return the digest of a manifest, over the entries of its files in any order."""
    lines = sorted(f"{file['path']}\0{file['sha256']}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def make_folder_name(manifest: dict) -> str:
    """Return the name of a snapshot's folder."""
    return f"{manifest['name']}-{manifest['digest'][:12]}"


def write_files(folder: str, contents: Mapping[str, str | bytes]) -> None:
    """Write files into a folder. contents: path in it, with / -> file to copy, or the content itself."""
    for path, source in contents.items():
        target = os.path.join(folder, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if isinstance(source, bytes):
            with open(target, "wb") as file:
                file.write(source)
        else:
            shutil.copy2(source, target)


def to_bytes(manifest: dict) -> bytes:
    """Return the content of manifest.json."""
    return (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode()


def list_objects(manifest: dict) -> list[Object]:
    """Return the objects that the files of a manifest become at a URL."""
    return [Object(file["path"], file["size"], sha256=file["sha256"]) for file in manifest["files"]]


def describe_folder(folder: str) -> dict:
    """Return the manifest of all files in a folder. Raises BadInput if a file cannot be read or stored."""
    sources: dict[str, str | bytes] = {}
    try:
        for entry in sync.list_files(folder):
            if not entry.is_file():  # for example a link to a folder
                raise BadInput(f"{printable(entry.path)} is neither a regular file nor a folder")
            path = os.path.relpath(entry.path, folder)
            if path != NAME and not entry.name.startswith(PARTIAL):
                sources[path] = entry.path
    except OSError as error:
        raise of_the_disk(error, error.filename) from error
    check_keys(sources, folder)
    return describe(os.path.basename(os.path.abspath(folder)), sources)

"""A snapshot as one Python file, for consoles that take one script."""

import base64
import hashlib
import io
import os
import textwrap
import zipfile
from itertools import chain

from common.exits import BadInput
from launch import manifests
from launch.pack.snapshot import Content, read, temporary_folder

_START = os.path.join(os.path.dirname(os.path.abspath(__file__)), "single_file_start.py")
_LONGEST = 100 * 10**6  # bytes: Python holds the file, its text and its archive in memory at once


def write(to: str, manifest: dict, contents: list[Content]) -> tuple[str, bool]:
    """Make NAME-DIGEST.py in the folder `to`. Returns (its path, whether it was made: False where the same
    was there). Equal content gives equal bytes. Raises BadInput."""
    path = os.path.join(to, f"{manifests.folder_name(manifest)}.py")
    text = _text(manifest, contents).encode()
    if len(text) > _LONGEST:
        raise BadInput(f"{len(text)} bytes are too many for one file ({_LONGEST}): take a folder")
    with temporary_folder(to) as folder:
        if os.path.isfile(path):
            with open(path, "rb") as file:
                if file.read() == text:
                    return path, False
        new = os.path.join(folder, "new.py")
        with open(new, "xb") as file:
            file.write(text)
        os.replace(new, path)
    return path, True


def _text(manifest: dict, contents: list[Content]) -> str:
    archive = _archive(manifest, contents)
    with open(_START, encoding="utf-8") as file:
        start = file.read()
    lines = "\n".join(textwrap.wrap(base64.b64encode(archive).decode(), 100))
    for mark, value in (
        ('"@JOB@"', repr(manifest["job"])),
        ("@SHA256@", hashlib.sha256(archive).hexdigest()),
        ("@ARCHIVE@", lines),
    ):
        start = start.replace(mark, value)
    return _header(manifest, contents) + start


def _header(manifest: dict, contents: list[Content]) -> str:
    """Comments: what this is, how it is run, what it holds."""
    listed = [f"{file['path']}  {file['size']} bytes" for file in manifest["files"]]
    needs = [
        content.source.decode().splitlines() for content in contents if isinstance(content.source, bytes)
    ]
    lines = [
        f"{manifest['job']} and all that it needs, in one file; made by `pack --single_file`.",
        "",
        f"    python {manifests.folder_name(manifest)}.py --help",
        "",
        "Run it as you would run the job, also with torchrun or as the boot file of a platform. What it",
        "holds is unpacked into a private temporary folder and taken away at the end, so name a folder for",
        "results.",
        "",
        f"digest: {manifest['digest']}",
        "it needs what the job needs" + (", beside torch and torchvision:" if needs else ""),
        *(f"    {line}" for line in chain.from_iterable(needs)),
        "it holds:",
        *(f"    {line}" for line in listed),
    ]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines) + "\n"


def _archive(manifest: dict, contents: list[Content]) -> bytes:
    """A ZIP archive that depends on nothing but paths and bytes."""
    sources, archive = dict(contents), io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as members:
        for file in manifest["files"]:
            content = read(file["path"], sources[file["path"]])
            if hashlib.sha256(content).hexdigest() != file["sha256"]:
                raise BadInput(f"{file['path']} was changed while it was packed")
            member = zipfile.ZipInfo(file["path"], (1980, 1, 1, 0, 0, 0))
            member.compress_type = zipfile.ZIP_DEFLATED
            members.writestr(member, content)
    return archive.getvalue()

"""Write a snapshot as one Python file, for consoles that accept one script."""

import base64
import hashlib
import io
import itertools
import os
import textwrap
import zipfile

from common.ground.exits import BadInput
from common.ground.files import write_atomic
from launch import manifests

_UNPACK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "unpack.py")
_LONGEST = 100 * 10**6  # bytes: Python holds the file, its text and its archive in memory at once


def write(to: str, manifest: dict, contents: dict[str, str | bytes]) -> tuple[str, bool]:
    """Write NAME-DIGEST.py to the folder `to`. Return (its path, True). Equal content gives equal bytes.
    Raises BadInput."""
    path = os.path.join(to, f"{manifests.make_folder_name(manifest)}.py")
    try:
        text = _header(manifest, contents) + _body(manifest, contents)
        if len(text) > _LONGEST:
            raise BadInput(f"{len(text)} bytes, at most {_LONGEST} fit into one file: pack a folder")
        os.makedirs(to, exist_ok=True)
        write_atomic(path, text)
    except OSError as error:
        raise BadInput(f"{to} cannot be written: {error.strerror}") from error
    return path, True


def holds_bootfile(path: str) -> bool:
    """Return whether a script is a single file with a job of Bootfile, which takes that job's options."""
    with open(path, "rb") as file:
        header = itertools.takewhile(lambda line: line.startswith(b"#"), file)
        return any(line.startswith(b"#     common/distributed/entry.py  ") for line in header)


def _body(manifest: dict, contents: dict[str, str | bytes]) -> str:
    """Return launch/bundle/unpack.py with the archive in it."""
    archive = _archive(manifest, contents)
    with open(_UNPACK, encoding="utf-8") as file:
        body = file.read()
    for mark, value in (
        ('"@JOB@"', repr(manifest["job"])),
        ("@SHA256@", hashlib.sha256(archive).hexdigest()),
        ("@ARCHIVE@", "\n".join(textwrap.wrap(base64.b64encode(archive).decode(), 100))),
    ):
        body = body.replace(mark, value)
    return body


def _header(manifest: dict, contents: dict[str, str | bytes]) -> str:
    """Return comments: the purpose of the file, its usage and its content."""
    needs = [source.decode() for source in contents.values() if isinstance(source, bytes)]
    lines = [
        f"{manifest['job']} and the code that it needs, in one file; made by `pack --single_file`.",
        "",
        f"    python {manifests.make_folder_name(manifest)}.py --help",
        "",
        "Run it like the job, also with torchrun or as the boot file of a platform. It unpacks itself into a",
        "private temporary folder, which is removed at the end, so name a folder for results.",
        "",
        f"digest: {manifest['digest']}",
        "requirements: those of the job" + (", in addition to torch and torchvision:" if needs else ""),
        *(f"    {line}" for line in "".join(needs).splitlines()),
        "content:",
        *(f"    {file['path']}  {file['size']} bytes" for file in manifest["files"]),
    ]
    return "".join(f"# {line}".rstrip() + "\n" for line in lines) + "\n"


def _archive(manifest: dict, contents: dict[str, str | bytes]) -> bytes:
    """Return a ZIP archive that depends on paths and bytes only. Raises BadInput."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as members:
        for file in manifest["files"]:
            content = contents[file["path"]]
            if isinstance(content, str):
                with open(content, "rb") as source:
                    content = source.read()
            if hashlib.sha256(content).hexdigest() != file["sha256"]:
                raise BadInput(f"{file['path']} was changed while it was packed")
            member = zipfile.ZipInfo(file["path"], (1980, 1, 1, 0, 0, 0))
            member.compress_type = zipfile.ZIP_DEFLATED
            members.writestr(member, content)
    return archive.getvalue()

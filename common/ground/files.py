"""Files and folders of a job: where they are, and what a file system has to be able to do."""

import hashlib
import os
from typing import BinaryIO

from bootfile.ground.errors import BadInput
from bootfile.ground.files import PARTIAL, digest_file, write_atomic

ROOT = os.path.abspath(f"{__file__}/../../..")  # the folder with jobs/ and common/, or one file of `pack`
HOME = ROOT if os.path.isdir(ROOT) else os.getcwd()  # where folders are looked for that the user did not name


def is_url(path: object) -> bool:
    """Return whether this is a URL of an object store (s3:// or obs://), and not a path."""
    return isinstance(path, str) and path.startswith(("s3://", "obs://"))


def check_rename(folder: str) -> None:
    """Raise BadInput if a file in a folder cannot be replaced by a rename, as on some mounts of buckets."""
    path = os.path.join(folder, f"{PARTIAL}check")
    try:
        for _ in range(2):
            write_atomic(path, "")
        os.unlink(path)
    except OSError as error:
        raise BadInput(
            f"{folder}: a file cannot be replaced by a rename there ({error.strerror}), so no checkpoint can "
            "be saved: use a folder of another file system, or the s3:// URL of the bucket"
        ) from error


def has_digest(file: BinaryIO, digest: str) -> bool:
    """Return whether a sha256 (64 hex digits) or an MD5 is that of an open file from its position. Raises
    OSError."""
    kind = hashlib.sha256() if len(digest) == 64 else hashlib.md5(usedforsecurity=False)
    return digest_file(file, kind) == digest

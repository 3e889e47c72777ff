"""A small file system, which a test fills up."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a tmpfs of this size ("50m") at the folder. Skip the test if that is not permitted."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "bootfile-test", str(folder)]
    result = subprocess.run(mount, capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"a small file system cannot be mounted: {result.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)

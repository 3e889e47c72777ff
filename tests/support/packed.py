"""Make small code folders, and pack them with `python -m launch pack`."""

import os
from pathlib import Path

import pytest

from bootfile.ground.errors import BadInput
from launch.bundle.cli import pack


def tree(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def listed(folder: Path) -> list[str]:
    """Return the files below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def paths(packed: str) -> list[str]:
    """Return the files of a snapshot, without its manifest."""
    return [path for path in listed(Path(packed)) if path != "manifest.json"]


def refused(job, to, **options) -> str:
    """Check that the pack is refused and nothing is written. Return the message."""
    with pytest.raises(BadInput) as error:
        pack(job, str(to), **options)
    assert not os.path.exists(to)
    return str(error.value)

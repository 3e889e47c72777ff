"""Make small code folders, and pack them with `python -m launch pack`."""

import os
from pathlib import Path

import pytest

from common.ground.exits import BadInput
from launch.bundle.cli import pack

SELF_CONTAINED = """
import json, multiprocessing, os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # before any other
import base

def square(number):
    return number * number + base.ZERO

if __name__ == "__main__":
    folder = os.path.dirname(os.path.abspath(__file__))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        squares = pool.map(square, [1, 2, 3])
    with open(os.path.join(folder, "words", "list.txt")) as file:
        words = file.read()
    facts = [squares, words, sys.argv[1:], os.getcwd(), folder, os.stat(folder).st_mode]
    print(json.dumps(facts), flush=True)
    if "--write" in sys.argv:
        open(os.path.join(folder, "results.txt"), "w").close()
    if "--sleep" in sys.argv:
        __import__("time").sleep(60)
    if "--leave" in sys.argv:
        os._exit(7)
"""


def tree(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def script_folder(parent: Path) -> Path:
    """Make a folder with a script and with a module and a file that it needs. Return it."""
    files = {"job.py": SELF_CONTAINED, "base.py": "ZERO = 0\n", "words/list.txt": "words"}
    return tree(parent / "mine", files)


def listed(folder: Path) -> list[str]:
    """Return the files below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def paths(packed) -> list[str]:
    return [file["path"] for file in packed.manifest["files"]]


def refused(job, to, **options) -> str:
    """Check that the pack is refused and nothing is written. Return the message."""
    with pytest.raises(BadInput) as error:
        pack(job, to, **options)
    assert not os.path.exists(to)
    return str(error.value)

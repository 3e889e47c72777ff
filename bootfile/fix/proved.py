"""Show that a repair changes restarts only: `prove` runs a script before and after it.

The patched files are written into a copy of the working folder that has links to everything else, so the
user's files stay as they are. The runs without a restart are compared tensor by tensor.
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

from bootfile.console.words import mask_words
from bootfile.exact.kinds import RANDOM
from bootfile.ground.errors import BadInput
from bootfile.ground.exit_codes import DIFFERS, UNVERIFIED
from bootfile.prove.cases import FOLDER, REFERENCE, working_folder
from bootfile.receipt import weights
from bootfile.receipt.compare import find_files

_VERDICT = re.compile(r"^((exact|differs|unverified): .*)$", re.MULTILINE)
# the bootfile of this process, in any working folder: PYTHONPATH would reach the script, too
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_PROVE = f"import sys; sys.path.insert(0, {_PACKAGE!r}); from bootfile.cli import main; sys.exit(main())"
_LAST = 5  # lines of `prove` that an error shows


def prove(args: Any, options: list[str], texts: dict[str, bytes], lines: str, notes: list[str]) -> int:
    """Prove the script as it is, and with these texts in place of its files. Print what differed before, the
    lines of the patch, and what differs afterwards. Return the exit code.

    args: of `bootfile fix`. options: of the script. texts: path of a file -> its patched content. lines: the
    size of the patch, in words. notes: what the repairs change in an uninterrupted run, such as the order of
    the samples: it may differ then. Raises BadInput.
    """
    if outside := [path for path in texts if os.path.relpath(path).startswith(os.pardir)]:
        raise BadInput(
            f"{outside[0]} is not below the working folder: start bootfile fix in a folder above it"
        )
    with tempfile.TemporaryDirectory(prefix="bootfile-fix-") as root:
        before, after = (os.path.join(root, name) for name in ("before", "after"))
        text, _ = _prove(args, options, before, None)
        print(f"before: {text}", f"patch: {lines}", sep="\n", flush=True)
        with _patched_folder(texts, os.path.join(root, "patched")) as place:
            text, code = _prove(args, options, after, place)
        print(f"after: {text}", flush=True)
        changes = find_changes(before, after, args.compare)
    if not changes:
        print("without a restart: the same weights, bit for bit")
        return code
    print(f"without a restart: differs: {changes[0]}, and {len(changes) - 1} more")
    for note in notes:
        print(f"note: {note}")
    return code if notes else DIFFERS


def find_changes(before: str, after: str, compare: str) -> list[str]:
    """Return the tensors of an uninterrupted run that the patched script does not have, bit for bit.

    A checkpoint may have more than before, and other names for the same: a tensor is found by its digest. A
    state of random numbers is left out. before, after: folders of runs. Raises BadInput if no tensor can be
    compared.
    """
    pattern = os.path.relpath(compare, os.path.dirname(re.split(r"[*?\[]", compare)[0]))
    before, after = (os.path.join(folder, REFERENCE) for folder in (before, after))
    count = 0
    changes = []
    for name in find_files(before, pattern):
        parts = _read_tensors(os.path.join(before, name))
        path = os.path.join(after, name)
        known = set(_read_tensors(path).values()) if os.path.exists(path) else set()
        count += len(parts)
        changes += [f"{part} in {name}" for part, digest in parts.items() if digest not in known]
    if not count:
        raise BadInput(f"--compare {compare}: no tensor in these files, so nothing can be compared")
    return changes


def _read_tensors(path: str) -> dict[str, str]:
    """Return the digests of the tensors in a file of weights, without states of random numbers."""
    parts = weights.read_parts(path).items()
    return {name: part.digest for name, part in parts if part.number is None and part.kind != RANDOM}


@contextlib.contextmanager
def _patched_folder(texts: dict[str, bytes], parent: str) -> Iterator[str]:
    """Make a working folder with the patched files, and links to all else; delete it afterwards."""
    with working_folder((FOLDER,), parent) as place:
        assert place is not None  # FOLDER makes one
        for path, text in texts.items():
            name = os.path.relpath(path)
            _open_folders(place, os.path.dirname(name))
            target = os.path.join(place, name)
            os.unlink(target)  # the link to the user's file
            with open(target, "wb") as file:
                file.write(text)
        yield place


def _open_folders(place: str, folder: str) -> None:
    """Replace the links to the folders above a file by folders of links, so that the file can be replaced."""
    parts = folder.split(os.sep) if folder else []
    for depth in range(1, len(parts) + 1):
        target = os.path.join(place, *parts[:depth])
        if not os.path.islink(target):
            continue
        source = os.path.realpath(target)
        os.unlink(target)
        os.mkdir(target)
        for name in os.listdir(source):
            os.symlink(os.path.join(source, name), os.path.join(target, name))


def _prove(args: Any, options: list[str], folder: str, place: str | None) -> tuple[str, int]:
    """Run `bootfile prove` in a working folder, with its progress on the standard output. Return its verdict
    and its exit code. folder: keeps the runs. Raises BadInput."""
    name = os.path.basename(folder)
    words = ["prove", args.script, "--kills", str(args.kills), "--keep", folder]
    words += ["--compare", args.compare, f"--resume_with={args.resume_with}", "--", *options]
    process = subprocess.Popen(
        [sys.executable, "-c", _PROVE, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=place,
    )
    output = []
    with process:
        for line in process.stdout or ():
            output.append(line)
            if line.startswith("["):  # the runs; the verdict follows at the end
                print(f"{name} {line}", end="", flush=True)
    found = _VERDICT.search("".join(output))
    if not found or process.returncode not in (0, DIFFERS, UNVERIFIED):
        last, _ = mask_words([" | ".join(line.strip() for line in output[-_LAST:])])
        raise BadInput(f"{name} the patch, {args.script} could not be proved: {' '.join(last)}")
    return found[1], process.returncode

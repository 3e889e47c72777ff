"""Decide which files of a code folder are skipped: built-in rules, and the user's own in .jobignore."""

import fnmatch
import os
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from common.ground.exits import BadInput
from common.ground.files import read_file

FILE = ".jobignore"  # in the code folder, in gitignore's syntax: `!pattern` includes again
_BUILT_IN = (
    ".*", "__pycache__/", "*.py[co]", "*.egg-info/", "tests/", "node_modules/", "venv/", "*.log",
    "*.pth", "*.pt", "*.ckpt", "*.safetensors", "events.out.tfevents.*",
)  # fmt: skip
_DATA = (  # data and results by name; a folder with modules in it is code
    "data/", "input_dir/", "output_dir/", "outputs/", "checkpoints/", "runs/", "logs/", "wandb/", "mlruns/",
    "lightning_logs/",
)  # fmt: skip


class _Rule(NamedTuple):
    """A line of rules. It applies to a file or a folder itself, not to the content of a folder.

    skips: it skips what it matches; otherwise (`!`) it includes that again
    parts: for each component of a path, a function that matches a name; None: any number of folders
    folders: it matches only folders
    names: it names files, unlike `!*/`
    """

    name: str
    skips: bool
    parts: list[Callable[[str], object] | None]
    folders: bool
    names: bool

    def matches(self, path: str, is_folder: bool) -> bool:
        """Return whether the line matches the path. Many wildcards take no longer than a few."""
        names = path.split("/")
        places = {0}  # numbers of names that the parts so far match
        for matches in self.parts:
            if matches is None:
                places = set(range(min(places), len(names) + 1)) if places else places
            else:
                places = {place + 1 for place in places if place < len(names) and matches(names[place])}
        return len(names) in places and (is_folder or not self.folders)


def _parse(line: str, name: str) -> _Rule:
    pattern = re.sub(r"(?<!\\)\s+$", "", line).removeprefix("!")
    body = pattern.strip("/")
    words = body.split("/")
    if "/" not in pattern.rstrip("/"):
        words = ["**", *words]
    if words[-1] == "**":  # the content of a folder, not the folder
        words.append("*")
    parts = [None if word == "**" else _compile(word) for word in words]
    return _Rule(name, not line.startswith("!"), parts, pattern.endswith("/"), bool(body.strip("*?/")))


def _compile(word: str) -> Callable[[str], object]:
    """Return a function that matches a name. fnmatch tries each `*` once: many of them take no longer."""
    plain = re.sub(r"\\(.)", lambda found: f"[{found[1]}]" if found[1] in "*?[" else found[1], word)
    return re.compile(fnmatch.translate(plain.replace("[^", "[!"))).match


class Rules:
    """The rules of the code folder `root`. more: additional patterns. Raises BadInput if .jobignore cannot be
    read."""

    def __init__(self, root: str, more: Sequence[str] = ()):
        self._root, path = root, os.path.join(root, FILE)
        self._built_in = [_parse(pattern, pattern) for pattern in (*_BUILT_IN, *_DATA, *more)]
        try:
            lines = read_file(path, 2**20).decode().split("\n")
        except FileNotFoundError:
            lines = []
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"{path} cannot be read: {error}") from error
        self._own = [
            _parse(line, f"{FILE}:{number}  {line}")
            for number, line in enumerate(lines, 1)
            if line.strip() and not line.startswith("#")
        ]

    def find(self, path: str, is_folder: bool) -> str | None:
        """Return the rule that skips `path` (relative, with /): the last one that matches; None if the path
        is kept.

        As in git, rules do not include files of a skipped folder again. Lines such as `!*/` include paths
        that other lines of the user skip, but not .git.
        """
        own = next((rule for rule in reversed(self._own) if rule.matches(path, is_folder)), None)
        if own and (own.skips or own.names):
            return own.name if own.skips else None
        for rule in self._built_in:
            if rule.matches(path, is_folder) and not (rule.name in _DATA and self._has_modules(path)):
                return rule.name
        return None

    def _has_modules(self, path: str) -> bool:
        try:
            return any(name.endswith(".py") for name in os.listdir(os.path.join(self._root, path)))
        except OSError:  # a broken link, a folder without permission: it is skipped
            return False

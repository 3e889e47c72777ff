"""Decide which files of a code folder are skipped: built-in rules, and the user's own in .jobignore."""

import fnmatch
import os
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from common.ground.exits import BadInput
from common.ground.files import opener

FILE = ".jobignore"  # in the code folder, in gitignore's syntax: `!pattern` includes again
_BUILT_IN = (".*", "__pycache__/", "*.py[co]", "*.egg-info/", "tests/", "node_modules/", "venv/", "*.log")
_RESULTS = ("*.pth", "*.pt", "*.ckpt", "*.safetensors", "events.out.tfevents.*")
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
    own: it is the user's own
    """

    name: str
    skips: bool
    parts: list[Callable[[str], object] | None]
    folders: bool
    names: bool
    own: bool

    @classmethod
    def parse(cls, line: str, name: str, own: bool) -> "_Rule":
        pattern = re.sub(r"(?<!\\)\s+$", "", line)
        skips, pattern = not pattern.startswith("!"), pattern.removeprefix("!")
        body = pattern.strip("/")
        words = body.split("/")
        if "/" not in pattern.rstrip("/"):
            words = ["**", *words]
        if words[-1] == "**":  # the content of a folder, not the folder
            words.append("*")
        parts = [None if word == "**" else _compile(word) for word in words]
        return cls(name, skips, parts, pattern.endswith("/"), bool(body.strip("*?/")), own)

    def matches(self, path: str, is_folder: bool) -> bool:
        """Return whether the line matches the path. The time is proportional to its length."""
        if self.folders and not is_folder:
            return False
        reached = self._and_behind({0})  # the numbers of parts that match the names so far
        for name in path.split("/"):
            following = set()
            for place, matches in enumerate(self.parts):
                if place in reached and (matches is None or matches(name)):
                    following.add(place + (matches is not None))
            reached = self._and_behind(following)
        return len(self.parts) in reached

    def _and_behind(self, places: set[int]) -> set[int]:
        """Return the places and those behind a `**`, which also matches nothing."""
        for place, matches in enumerate(self.parts):
            if place in places and matches is None:
                places.add(place + 1)
        return places


def _compile(word: str) -> Callable[[str], object]:
    """Return a function that matches a name. fnmatch tries each `*` once: many of them take no longer."""
    plain = re.sub(r"\\(.)", lambda found: f"[{found[1]}]" if found[1] in "*?[" else found[1], word)
    return re.compile(fnmatch.translate(plain.replace("[^", "[!"))).match


class Rules:
    """The rules of the code folder `root`. more: additional patterns. Raises BadInput if .jobignore cannot be
    read."""

    def __init__(self, root: str, more: Sequence[str] = ()):
        self._root = root
        self._rules = [
            _Rule.parse(pattern, pattern, own=False) for pattern in (*_BUILT_IN, *_RESULTS, *_DATA, *more)
        ]
        path = os.path.join(root, FILE)
        try:
            with open(path, encoding="utf-8", opener=opener) as file:
                lines = file.read(2**20).split("\n")
        except FileNotFoundError:
            lines = []
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"{path} cannot be read: {error}") from error
        for number, line in enumerate(lines, 1):
            if line.strip() and not line.startswith("#"):
                self._rules.append(_Rule.parse(line, f"{FILE}:{number}  {line}", own=True))

    def find(self, path: str, is_folder: bool) -> str | None:
        """Return the rule that skips `path` (relative, with /): the last one that matches; None if the path
        is kept.

        As in git, rules do not include files of a skipped folder again. Lines such as `!*/` include paths
        that other lines of the user skip, but not .git.
        """
        included = False
        for rule in reversed(self._rules):
            if (included and rule.own) or not rule.matches(path, is_folder):
                continue
            if rule.name in _DATA and self._has_modules(path):
                continue
            if rule.skips or rule.names:
                return rule.name if rule.skips else None
            included = True
        return None

    def _has_modules(self, path: str) -> bool:
        try:
            return any(name.endswith(".py") for name in os.listdir(os.path.join(self._root, path)))
        except OSError:  # a broken link, a folder without permission: it is skipped
            return False

"""Decide which files of a code folder are skipped: built-in rules, and the user's own in .jobignore."""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from common.exits import BadInput, import_optional

pathspec = import_optional("pathspec", ".jobignore needs pathspec")

FILE = ".jobignore"  # in the code folder, in gitignore's syntax: `!pattern` includes again
_BUILT_IN = (".*", "__pycache__/", "*.py[co]", "*.egg-info/", "tests/", "node_modules/", "venv/", "*.log")
_RESULTS = ("*.pth", "*.pt", "*.ckpt", "*.safetensors", "events.out.tfevents.*")
_DATA = (  # data and results by name; a folder with modules in it is code
    "data/", "input_dir/", "output_dir/", "outputs/", "checkpoints/", "runs/", "logs/", "wandb/", "mlruns/",
    "lightning_logs/",
)  # fmt: skip


class _Rule(NamedTuple):
    """A line of rules. It applies to a file or a folder itself, not to the content of a folder.

    floating: it matches names, not paths
    spans: a part of it matches any number of folders
    names: it names files, unlike `!*/`
    own: it is the user's own
    """

    name: str
    spec: Any  # pathspec.GitIgnoreSpec
    floating: bool
    spans: bool
    names: bool
    own: bool

    @classmethod
    def parse(cls, line: str, name: str, own: bool) -> "_Rule":
        body = line.strip().lstrip("!").rstrip("/").removeprefix("**/")
        spec, names = pathspec.GitIgnoreSpec.from_lines([line]), bool(body.strip("*?/"))
        return cls(name, spec, "/" not in body, "**" in body, names, own)

    def skips(self, path: str, is_folder: bool) -> bool | None:
        """Return True to skip the path, False to include it again, None if the line does not match it."""
        subject = path.rpartition("/")[2] if self.floating else path
        above = subject.rpartition("/")[0]
        if above and not self.spans and self.spec.check_file(f"{above}/").include is not None:
            return None
        return self.spec.check_file(f"{subject}/" if is_folder else subject).include


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
            with open(path, encoding="utf-8") as file:
                lines = [line.rstrip("\n") for line in file]
        except FileNotFoundError:
            lines = []
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"{path} cannot be read: {error}") from error
        for number, line in enumerate(lines, 1):
            try:
                if line.strip():
                    self._rules.append(_Rule.parse(line, f"{FILE}:{number}  {line}", own=True))
            except ValueError as error:
                raise BadInput(f"{path}:{number}: {line!r} is not a valid pattern") from error

    def find(self, path: str, is_folder: bool) -> str | None:
        """Return the rule that skips `path` (relative, with /): the last one that matches; None if the path
        is kept.

        As in git, rules do not include files of a skipped folder again. Lines such as `!*/` include paths
        that other lines of the user skip, but not .git.
        """
        included = False
        for rule in reversed(self._rules):
            skips = None if included and rule.own else rule.skips(path, is_folder)
            if skips is None or (rule.name in _DATA and self._has_modules(path)):
                continue
            if skips or rule.names:
                return rule.name if skips else None
            included = True
        return None

    def _has_modules(self, path: str) -> bool:
        try:
            return any(name.endswith(".py") for name in os.listdir(os.path.join(self._root, path)))
        except OSError:  # a broken link, a folder without permission: it is skipped
            return False

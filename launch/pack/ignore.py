"""Which files of a code folder stay behind: built-in rules, and the user's own in .jobignore."""

import os
from typing import NamedTuple

from common.exits import BadInput, import_optional

pathspec = import_optional("pathspec", ".jobignore needs pathspec")

FILE = ".jobignore"  # in the code folder, in gitignore's syntax: `!pattern` takes in again
_BUILT_IN = (".*", "__pycache__/", "*.py[co]", "*.egg-info/", "tests/", "node_modules/", "venv/", "*.log")
_RESULTS = ("*.pth", "*.pt", "*.ckpt", "*.safetensors", "events.out.tfevents.*")
_DATA = (  # data and results by their names; a folder that has modules in it is code all the same
    "data/", "input_dir/", "output_dir/", "outputs/", "checkpoints/", "runs/", "logs/", "wandb/", "mlruns/",
    "lightning_logs/",
)  # fmt: skip


class _Rule(NamedTuple):
    """A line, for files and folders themselves: what is in them is asked for on its own. floating: it is
    about names, not paths. spans: it has a part that stands for any number of folders. names: it says which
    files it means, as `!*/` does not."""

    name: str
    spec: pathspec.GitIgnoreSpec
    floating: bool
    spans: bool
    names: bool
    own: bool

    @classmethod
    def of(cls, line: str, name: str, own: bool):
        body = line.strip().lstrip("!").rstrip("/").removeprefix("**/")
        spec, names = pathspec.GitIgnoreSpec.from_lines([line]), bool(body.strip("*?/"))
        return cls(name, spec, "/" not in body, "**" in body, names, own)

    def says(self, path: str, is_folder: bool) -> bool | None:
        """True: it stays behind; False: it is taken in again; None: nothing."""
        subject = path.rpartition("/")[2] if self.floating else path
        above = subject.rpartition("/")[0]
        if above and not self.spans and self.spec.check_file(f"{above}/").include is not None:
            return None
        return self.spec.check_file(f"{subject}/" if is_folder else subject).include


class Rules:
    """The rules of the code folder `root`. Raises BadInput for a .jobignore that cannot be read."""

    def __init__(self, root: str):
        self._root = root
        self._rules = [_Rule.of(pattern, pattern, own=False) for pattern in (*_BUILT_IN, *_RESULTS, *_DATA)]
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
                    self._rules.append(_Rule.of(line, f"{FILE}:{number}  {line}", own=True))
            except ValueError as error:
                raise BadInput(f"{path}:{number}: {line!r} is no pattern") from error

    def of(self, path: str, is_folder: bool) -> str | None:
        """The rule that leaves `path` (relative, with /) behind, None where it is kept: the last one that
        says something of it. As in git, nobody asks for what is in a folder that stays behind. `!*/` and the
        like take in what other lines of the user's left behind, but not .git."""
        taken_in = False
        for rule in reversed(self._rules):
            says = None if taken_in and rule.own else rule.says(path, is_folder)
            if says is None or (rule.name in _DATA and self._has_modules(path)):
                continue
            if says or rule.names:
                return rule.name if says else None
            taken_in = True
        return None

    def _has_modules(self, path: str) -> bool:
        try:
            return any(name.endswith(".py") for name in os.listdir(os.path.join(self._root, path)))
        except OSError:  # a link that leads nowhere, a folder that nobody may read: it stays behind
            return False

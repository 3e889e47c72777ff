"""Which files of a code folder stay behind: built-in rules, and the user's own in .jobignore."""

import os

import pathspec

from common.exits import BadInput

FILE = ".jobignore"  # in the code folder, in gitignore's syntax: `!pattern` takes in again
_BUILT_IN = (".*", "__pycache__/", "*.py[co]", "*.egg-info/", "tests/", "node_modules/", "venv/", "*.log")
_RESULTS = ("*.pth", "*.pt", "*.ckpt", "*.safetensors", "events.out.tfevents.*")
_DATA = (  # data and results by their names; a folder that has modules in it is code all the same
    "data/", "input_dir/", "output_dir/", "outputs/", "checkpoints/", "runs/", "logs/", "wandb/", "mlruns/",
    "lightning_logs/",
)  # fmt: skip


class Rules:
    """The rules of the code folder `root`. Raises BadInput for a .jobignore that cannot be read."""

    def __init__(self, root: str):
        self._root = root
        rules = [(pattern, pattern) for pattern in (*_BUILT_IN, *_RESULTS, *_DATA)]  # (name, pattern)
        try:
            with open(os.path.join(root, FILE), encoding="utf-8") as file:
                lines = [line.rstrip("\n") for line in file]
        except FileNotFoundError:
            lines = []
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"{os.path.join(root, FILE)} cannot be read: {error}") from error
        for number, line in enumerate(lines, 1):
            if line:
                self._check(number, line)
                rules.append((f"{FILE}:{number}  {line}", line))
        self._names = [name for name, _ in rules]
        self._spec = pathspec.GitIgnoreSpec.from_lines([pattern for _, pattern in rules])

    def of(self, path: str, is_folder: bool) -> str | None:
        """The rule that leaves `path` (relative, with /) behind, None where it is kept. As in git, what is
        below a folder that stays behind stays behind, too, whatever the rules say of it."""
        found = self._spec.check_file(f"{path}/" if is_folder else path)
        if not found.include:
            return None
        rule = self._names[found.index]
        if rule in _DATA and self._has_modules(path):
            return None
        return rule

    def _has_modules(self, path: str) -> bool:
        try:
            return any(name.endswith(".py") for name in os.listdir(os.path.join(self._root, path)))
        except OSError:  # a link that leads nowhere, a folder that nobody may read: it stays behind
            return False

    def _check(self, number: int, line: str) -> None:
        try:
            pathspec.GitIgnoreSpec.from_lines([line])
        except ValueError as error:
            raise BadInput(f"{os.path.join(self._root, FILE)}:{number}: {line!r} is no pattern") from error

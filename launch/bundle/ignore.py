"""Decide which files of a code folder are skipped: built-in rules, and the user's own in .jobignore."""

import os
import re
from collections.abc import Sequence

from bootfile.ground.errors import BadInput, import_optional
from bootfile.ground.files import read_file

pathspec = import_optional("pathspec", "rules of skipped files need pathspec")

TESTS = "tests/"  # a script in such a folder is packed without the folder's other files
FILE = ".jobignore"  # in the code folder, in gitignore's syntax: `!pattern` includes again
_DATA = (  # data and results by name; a folder with modules in it is code
    "data/", "input_dir/", "output_dir/", "outputs/", "checkpoints/", "runs/", "logs/", "wandb/", "mlruns/",
    "lightning_logs/",
)  # fmt: skip
_BUILT_IN = (
    *_DATA, ".*", "__pycache__/", "*.py[co]", "*.egg-info/", TESTS, "node_modules/", "venv/", "*.log",
    "*.pth", "*.pt", "*.ckpt", "*.safetensors", "events.out.tfevents.*",
)  # fmt: skip


class Rules:
    """The rules of the code folder `root`. CodeFolder makes them before it visits the folder.

    more: additional patterns. Raises BadInput if .jobignore cannot be read.
    """

    def __init__(self, root: str, more: Sequence[str] = ()):
        self._root = root
        path = os.path.join(root, FILE)
        built_in = [*_BUILT_IN, *more]
        try:
            lines = [line or "#" for line in read_file(path, 2**20).decode().split("\n")]
        except FileNotFoundError:
            lines = []
        except (OSError, ValueError) as error:
            raise BadInput(f"{path} cannot be read: {error}") from error
        self._built_in = pathspec.GitIgnoreSpec.from_lines(built_in)
        # pathspec's x/** is also the folder x
        contents = [re.sub(r"/\*\*$", "/**/*", line) for line in lines]
        for number, line in enumerate(contents, 1):
            try:
                pathspec.GitIgnoreSpec.from_lines([line])
            except (ValueError, re.error) as error:
                raise BadInput(f"{path}:{number}: not a pattern of gitignore, {line!r}: {error}") from error
        self._all = pathspec.GitIgnoreSpec.from_lines([*built_in, *contents])
        self._names = built_in  # by the number of the pattern
        self._unnamed: set[int] = set()  # numbers of the user's patterns that name nothing, such as `!*/`
        for number, line in enumerate(lines, 1):
            if not line.strip("!*?/ "):
                self._unnamed.add(len(self._names))
            self._names.append(f"{FILE}:{number}  {line}")

    def find(self, path: str, is_folder: bool) -> str | None:
        """Return the rule that skips `path` (relative, with /); None if the path is kept.

        Call it for a folder before its content: as in git, rules do not include files of a skipped folder
        again. Lines such as `!*/` include paths that other lines of the user skip, but not .git.
        """
        place = f"{path}/" if is_folder else path
        match = self._all.check_file(place)
        if not match.include and match.index in self._unnamed:
            match = self._built_in.check_file(place)
        if not match.include or (match.index < len(_DATA) and not self._is_data(path, is_folder)):
            return None
        return self._names[match.index]

    def _is_data(self, path: str, is_folder: bool) -> bool:
        """Return whether this is a folder of data itself, without modules, and not the content of one."""
        if not is_folder or f"{os.path.basename(path)}/" not in _DATA:
            return False
        try:
            return not any(name.endswith(".py") for name in os.listdir(os.path.join(self._root, path)))
        except OSError:  # a broken link, a folder without permission: it is skipped
            return True

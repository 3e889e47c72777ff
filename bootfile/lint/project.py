"""Find the modules of the same project that a script imports."""

import os

from bootfile.ground.errors import BadInput
from bootfile.lint import sources

MOST_MODULES = 150
MOST_PARSED = 600  # modules that stay in memory for the next script
# packages that a folder of the same name next to a script does not replace
_OF_OTHERS = {
    "bootfile",
    "torch", "torchvision", "numpy", "accelerate", "transformers", "lightning", "pytorch_lightning", "apex",
    "os", "sys", "random", "math", "time", "glob", "json", "argparse", "logging", "copy", "re", "shutil",
    "collections", "itertools", "functools", "typing", "dataclasses", "pathlib", "signal", "pickle", "tqdm",
}  # fmt: skip


class Project:
    """The modules of the project of a script, by path. A module that cannot be read counts as unknown.

    parsed: modules that other scripts of the same command have read, to which it adds its own.
    """

    def __init__(self, script: str, parsed: "dict[str, sources.Source | None] | None" = None):
        folder = os.path.dirname(os.path.abspath(script))
        self._roots = [folder]
        # a script in a package imports from the folder of the package
        for _ in range(3):
            folder = os.path.dirname(folder)
            if folder == os.path.dirname(folder):
                break
            self._roots.append(folder)
        for folder in self._roots[:2]:
            # folders that scripts add to sys.path
            for name in ("lib", "src"):
                if os.path.isdir(os.path.join(folder, name)):
                    self._roots.append(os.path.join(folder, name))
        self._found: dict[tuple[str, str], str] = {}
        self._parsed: dict[str, sources.Source | None] = {} if parsed is None else parsed
        self._sources: dict[str, sources.Source | None] = {}

    def find(self, module: str, level: int = 0, importer: str = "") -> str:
        """Return the path of a module, "" if it is not one of the project. level: dots of a relative import
        in the file `importer`."""
        relative = module.replace(".", os.sep)
        if level:
            folder = os.path.dirname(os.path.abspath(importer))
            for _ in range(level - 1):
                folder = os.path.dirname(folder)
            return self._find_below(folder, relative)
        if module.partition(".")[0] in _OF_OTHERS:
            return ""
        for folder in self._roots:
            path = self._find_below(folder, relative)
            if path:
                return path
        return ""

    def read(self, path: str) -> sources.Source | None:
        """Return a module; None if it cannot be read, or if the project is too large."""
        if path not in self._sources:
            # what lies beyond counts as unknown, about which the rules are silent
            if len(self._sources) >= MOST_MODULES:
                return None
            self._sources[path] = self._parse(path)
        return self._sources[path]

    def _parse(self, path: str) -> sources.Source | None:
        if path in self._parsed:
            return self._parsed[path]
        try:
            source = sources.read(path)
        except BadInput:
            source = None
        if len(self._parsed) < MOST_PARSED:
            self._parsed[path] = source
        return source

    def _find_below(self, folder: str, relative: str) -> str:
        place = (folder, relative)
        if place not in self._found:
            stem = os.path.join(folder, relative)
            paths = (f"{stem}.py", os.path.join(stem, "__init__.py"))
            self._found[place] = next((path for path in paths if os.path.isfile(path)), "")
        return self._found[place]

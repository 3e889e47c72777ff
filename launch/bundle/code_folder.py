"""Select the files that are uploaded with a script: `pack` writes them, `simulate` runs them."""

import ast
import functools
import os
import shutil
from collections.abc import Sequence
from typing import NamedTuple

from common.ground.exits import BadInput
from launch import manifests
from launch.bundle import ignore, limits

_PARTS = ("common", "datasets", "jobs")  # of a Bootfile repository
_LINKED = ("common", "datasets")  # may be links to those of another Bootfile repository
REQUIREMENTS = ("pip-requirements.txt", "requirements.txt")  # dependency lists; the first that exists counts
_OTHER = "not needed by the job"


class File(NamedTuple):
    """A file to upload. path: in the code folder, with /. source: links resolved. size: bytes."""

    path: str
    source: str
    size: int


class Skipped(NamedTuple):
    """A skipped file, or a folder (with / at its end), and the rule."""

    path: str
    rule: str


class CodeFolder:
    """The files that a job needs.

    In a Bootfile repository these are all of common and datasets, because some of their modules are imported
    by name. From the job's folder they are the job, its imports there, and all files other than scripts and
    documents (*.md). For any other script these are the files of its folder. The rules of
    launch/bundle/ignore.py apply.

    extra: more files and folders to keep against the rules (which still apply inside such a folder)
    without: a folder to skip
    code_dir: take this whole folder instead
    name: the last component of the folder's path
    job_path: path of the script in it, with /
    is_repository: whether it is a Bootfile repository
    """

    def __init__(
        self,
        job: str,
        extra: Sequence[str] = (),
        without: str | None = None,
        code_dir: str | None = None,
    ):
        self._job = os.path.abspath(job)
        folder = os.path.dirname(self._job)
        while not _is_repository(folder) and folder != os.path.dirname(folder):
            folder = os.path.dirname(folder)
        self.root, self._parts = os.path.dirname(self._job), set[str]()
        self.is_repository = _is_repository(folder)
        if code_dir is not None:
            self.root = os.path.abspath(code_dir)
            if not os.path.isdir(self.root) or os.path.commonpath([self.root, self._job]) != self.root:
                raise BadInput(f"--code_dir {code_dir} is not a folder above {job}")
        elif self.is_repository:
            self.root, self._parts = folder, {*_PARTS, os.path.relpath(self._job, folder).split(os.sep)[0]}
        self.name = os.path.basename(self.root) or "code"
        self.job_path = _slashes(os.path.relpath(self._job, self.root))
        self._without = without and os.path.realpath(without)
        self._extra = [self._below(path) for path in extra]

    def holds(self, path: str) -> bool:
        """Return whether `path` is inside the folders that are uploaded."""
        parts = [os.path.join(self.root, part) for part in self._parts or ["."]]
        parts = [os.path.normpath(part) for part in parts]
        return any(os.path.commonpath([part, os.path.abspath(path)]) == part for part in parts)

    def find_above(self, module: str) -> str | None:
        """Return the nearest folder above the code folder that holds a Python module of this name."""
        folder = os.path.dirname(self.root)
        while folder != os.path.dirname(folder):
            path = os.path.join(folder, module)
            if os.path.isfile(f"{path}.py") or os.path.isdir(path):
                return folder
            folder = os.path.dirname(folder)
        return None

    def job_in(self, folder: str) -> str:
        """Return the path of the script in a copy."""
        return os.path.join(folder, *self.job_path.split("/"))

    @property
    def files(self) -> list[File]:
        """Return the files to upload, sorted by path.

        Raises BadInput for a link out of the folder, a special file, an invalid name, or an exceeded limit.
        """
        return self._found[0]

    @property
    def skipped(self) -> list[Skipped]:
        """Return the skipped files and folders, sorted by path."""
        return sorted(self._found[1])

    def copy(self, destination: str) -> None:
        """Copy the files to a new folder. Raises BadInput as `files` does."""
        os.makedirs(destination)
        for path, source, _ in self.files:
            target = os.path.join(destination, path)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            shutil.copy2(source, target)

    @functools.cached_property
    def _found(self) -> tuple[list[File], list[Skipped]]:
        documents = ("*.md",) if self._parts else ()
        self._rules, self._scripts = ignore.Rules(self.root, documents), set[str]()
        if self._parts and self.job_path.startswith("jobs/"):
            self._scripts = _imported_beside(self._job)
        self._files: list[File] = []
        self._left: list[Skipped] = []
        try:
            self._visit("", (os.path.realpath(self.root),), None)
        except OSError as error:
            raise BadInput(f"{error.filename} cannot be read: {error.strerror}") from error
        self._files.sort(key=lambda file: os.fsencode(file.path))
        limits.check([(file.path, file.size) for file in self._files])
        return self._files, self._left

    def _visit(self, folder: str, real: tuple[str, ...], rule_above: str | None) -> None:
        """Add the content of `folder` (relative, "" or with / at its end).

        real: the real paths of the folders above, then its own
        rule_above: the rule that skips all files that are not wanted by name
        """
        for entry in sorted(os.scandir(os.path.join(self.root, folder)), key=lambda entry: entry.name):
            path, wanted = folder + entry.name, (self.job_path, *self._extra)
            is_folder = entry.is_dir()
            rule = None if path in wanted else rule_above or self._rule(path, is_folder, entry.path)
            is_above = is_folder and any(name.startswith(f"{path}/") for name in wanted)
            if rule is not None and not is_above:
                self._left.append(Skipped(path + "/" * is_folder, rule))
                continue
            limits.check_name(path)
            source = self._resolved(path, entry, real) if entry.is_symlink() else entry.path
            if is_folder:
                self._visit(f"{path}/", (*real, os.path.realpath(source)), rule)
            elif entry.is_file():
                self._files.append(File(path, source, entry.stat().st_size))
            else:
                raise BadInput(f"{path} is not a regular file and cannot be uploaded")

    def _rule(self, path: str, is_folder: bool, absolute: str) -> str | None:
        top, _, rest = path.partition("/")
        if self._without is not None and is_folder and os.path.realpath(absolute) == self._without:
            return "the output of pack"
        if path in REQUIREMENTS:
            return f"a {REQUIREMENTS[0]} is made from it"
        if path == manifests.NAME:
            return "pack writes its own"
        if self._parts and top not in self._parts:
            return _OTHER
        if (
            self._scripts
            and top == "jobs"
            and rest.endswith((".py", ".ipynb"))
            and absolute not in self._scripts
        ):
            return _OTHER
        return self._rules.find(path, is_folder)

    def _resolved(self, path: str, entry: os.DirEntry, real: tuple[str, ...]) -> str:
        """Return the target of a link. Raises BadInput if it is outside the code folder."""
        target, shown = os.path.realpath(entry.path), os.readlink(entry.path)
        if not os.path.exists(target):
            raise BadInput(f"{path} is a symbolic link to {shown}, which does not exist; {_ADVICE}")
        if path in _LINKED and os.path.basename(target) == path and _is_repository(os.path.dirname(target)):
            return target  # a project that `launch new` wrote
        if os.path.commonpath([real[0], target]) != real[0]:
            raise BadInput(f"{path} is a symbolic link to {shown}, which is not in {self.root}; {_ADVICE}")
        if target in real:
            raise BadInput(f"{path} is a symbolic link to {shown}, a folder that contains it; {_ADVICE}")
        return target

    def _below(self, path: str) -> str:
        """Return `path` relative to the code folder, with /."""
        path = os.path.abspath(path)
        if not os.path.lexists(path):
            raise BadInput(f"{path} does not exist")
        if path == self.root or os.path.commonpath([self.root, path]) != self.root:
            raise BadInput(f"{path} is not in the code folder {self.root}")
        return _slashes(os.path.relpath(path, self.root))


_ADVICE = f"skip it with a line in {ignore.FILE}, or replace it by a copy"


def _imported_beside(script: str) -> set[str]:
    """Return `script` and the scripts in its folder and in packages there that it imports, directly or
    not."""
    folder, found, todo = os.path.dirname(script), set(), [script]
    while todo:
        file = todo.pop()
        if file in found or not os.path.isfile(file):
            continue
        found.add(file)
        try:
            with open(file, "rb") as source:
                tree = ast.parse(source.read(), file)
        except (OSError, SyntaxError, ValueError) as error:
            raise BadInput(f"{file} cannot be read as Python: {error}") from error
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" if node.module else alias.name for alias in node.names]
                names += [node.module] if node.module else []
            for name in names:
                path = os.path.join(folder, *name.split("."))
                todo += [f"{path}.py", os.path.join(path, "__init__.py")]
                todo += [os.path.join(folder, name.split(".")[0], "__init__.py")]
    return found


def _slashes(path: str) -> str:
    return path.replace(os.sep, "/")


def _is_repository(folder: str) -> bool:
    """Return whether a folder is a Bootfile repository. Other projects also have `common` and `datasets`."""
    return all(
        os.path.exists(os.path.join(folder, part)) for part in ("common/distributed/entry.py", "datasets")
    )

"""Select the files that are uploaded with a script: `pack` writes them, `simulate` runs them.

CodeFolder takes the script, and gives the files that it needs; Rules are those that skip a file: the built-in
ones, and the user's own in .jobignore. Outside of the contract are links out of the folder, special files,
names that a store does not take, and more files than a platform takes: each is one BadInput before anything
is written.
"""

import itertools
import os
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path, PurePosixPath

from bootfile.ground.errors import BadInput, import_optional
from bootfile.ground.files import explained, read_file
from common.object_store.location import check_keys
from launch import manifests
from launch.bundle import imports
from launch.explain import human_size

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


class _Rules:
    """The rules of the code folder `root`. more: further built-in patterns. Raises BadInput."""

    def __init__(self, root: str, more: Sequence[str]):
        self._root = root
        path = os.path.join(root, FILE)
        try:
            lines = [line or "#" for line in read_file(path, 2**20).decode().split("\n")]
        except FileNotFoundError:
            lines = []
        except (OSError, ValueError) as error:
            raise BadInput(f"{path} cannot be read: {error}") from error
        # pathspec's x/** is also the folder x
        contents = [re.sub(r"/\*\*$", "/**/*", line) for line in lines]
        for number, line in enumerate(contents, 1):
            try:
                pathspec.GitIgnoreSpec.from_lines([line])
            except (ValueError, re.error) as error:
                raise BadInput(f"{path}:{number}: not a pattern of gitignore, {line!r}: {error}") from error
        built_in = [*_BUILT_IN, *more]
        self._built_in = pathspec.GitIgnoreSpec.from_lines(built_in)
        self._all = pathspec.GitIgnoreSpec.from_lines([*built_in, *contents])
        # by the number of the pattern
        self._names = built_in + [f"{FILE}:{number}  {line}" for number, line in enumerate(lines, 1)]

    def find(self, path: str, is_folder: bool) -> str | None:
        """Return the rule that skips `path` (relative, with /); None if the path is kept. Call it for a
        folder before its content: as in git, rules do not include files of a skipped folder again. Lines such
        as `!*/` include paths that other lines of the user skip, but not .git."""
        place = f"{path}/" if is_folder else path
        match = self._all.check_file(place)
        if match.include is False and not self._names[match.index].partition("  ")[2].strip("!*?/ "):
            match = self._built_in.check_file(place)
        # the first rules name folders of data, which are kept if they hold modules
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


_ENTRY = "common/distributed/entry.py"  # of a Bootfile repository
_PARTS = ("bootfile", "common", "datasets", "jobs")  # folders of a Bootfile repository
_LINKED = ("bootfile", "common", "datasets", "launch")  # may be links to those of another Bootfile repository
_DOCUMENTS = ("*.md", "*.ipynb")  # folders of a Bootfile repository
REQUIREMENTS = ("pip-requirements.txt", "requirements.txt")  # dependency lists; the first that exists counts
_REPLACED = dict.fromkeys(REQUIREMENTS, f"a {REQUIREMENTS[0]} is made from it")  # file: why it is skipped
_REPLACED[manifests.NAME] = "pack writes its own"
# limits of ModelArts for a code folder (its documents, November 2026): files and folders, bytes
_ENTRIES = 1000
_SIZE = 5 * 10**9
_IMPORT = re.compile(r"^\s*(from|import)\s+(bootfile\b|common\b|datasets\.)", re.MULTILINE)
_NO_RULE = "not found"
_LEVELS = 2  # folders above a script in which its modules may be
_PROJECT = (".git", "pyproject.toml", "setup.py", "requirements.txt")  # a folder with one is the project
_OWN = 2  # files that pack adds: the dependency list and the manifest


class CodeFolder:
    """The files that a job needs. `pack` and `simulate` make one before they write anything.

    In a Bootfile repository these are bootfile, common, datasets and the job's folder, without documents, and
    LICENSE, modules and packages of the repository that the job imports. For a script that does not use
    Bootfile these are the files of its folder, wherever it is. Rules apply. A
    script in a folder `tests` is taken without the other files of that folder.

    without: a folder to skip
    code_dir: take this whole folder instead
    name: the last component of the folder's path
    job_path: path of the script in it, with /
    is_repository: whether it is a Bootfile repository
    files: path in the folder, with / -> the file to upload, links resolved. A job that `pack` wrote as one
        file is alone.
    skipped: path of a file, or of a folder with / at its end -> the rule

    Raises BadInput for a link out of the folder, a special file, an invalid name, an exceeded limit, or a
    module that the job imports and a rule skips.
    """

    def __init__(self, job: str, without: str | None = None, code_dir: str | None = None):
        job = os.path.abspath(job)
        self.root = os.path.abspath(code_dir or os.path.dirname(job))
        if os.path.commonpath([self.root, job]) != self.root:
            raise BadInput(f"--code_dir {code_dir} is not a folder above {job}")
        # the nearest of the folders above the script
        repository = next(filter(_is_repository, map(str, PurePosixPath(job).parents)), "")
        self._parts: set[str] = set()  # names at the top that are taken; empty: all
        self._is_own_folder = code_dir is None and not repository  # the root is the script's folder only
        self.is_repository = bool(repository)
        if repository and code_dir is None:
            top = os.path.relpath(job, repository).split(os.sep)[0]
            self.is_repository = top in (*_PARTS, os.path.basename(job)) or _imports_bootfile(self.root)
            if self.is_repository:
                self.root = repository
                self._parts = {*_PARTS, top}
                if not os.path.islink(os.path.join(repository, "LICENSE")):  # it may lead out of the folder
                    self._parts.add("LICENSE")
        self.name = os.path.basename(self.root) or "code"
        self.job_path = os.path.relpath(job, self.root)
        self._without = without and os.path.realpath(without)
        self._rules = _Rules(self.root, _DOCUMENTS if self._parts else ())
        self._programs: set[str] = set()  # the script, and the modules in its folder that it imports
        self.files: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        # a job that `pack` wrote as one file has all its modules in it
        if zipfile.is_zipfile(job):
            self.files = {self.job_path: job}
            self.is_repository = _ENTRY in zipfile.ZipFile(job).namelist()
            return
        self._collect()
        rule = self._find_rule_above(self.job_path)
        if rule not in (_NO_RULE, TESTS):
            raise BadInput(f"{self.job_path} is not uploaded (rule: {rule}): name another boot file")
        # Where Python looks first: a job of Bootfile puts the root before its own folder.
        folders = ("", os.path.dirname(self.job_path))
        self._programs = imports.follow(self.job_path, self.root, folders, self._include)
        check_keys(self.files, self.root)
        self._check_limits()

    def _collect(self) -> None:
        """Fill files and skipped: at the beginning, and again for each module at the top that is imported."""
        self.files = {}
        self.skipped = {}
        try:
            self._visit("", (os.path.realpath(self.root),))
        except OSError as error:
            raise BadInput(f"{error.filename} cannot be read: {error.strerror}") from error
        if self._find_rule_above(self.job_path) == TESTS:
            self.files[self.job_path] = os.path.join(self.root, self.job_path)
        self.files = dict(sorted(self.files.items()))
        self.skipped = dict(sorted(self.skipped.items()))

    def check_modules_above(self) -> None:
        """Raise BadInput if a program imports a module of the project that is above the script's folder: with
        sys.path or PYTHONPATH it finds it here, and on the platform it does not."""
        if not self._is_own_folder:
            return
        for path, above in itertools.product(sorted(self._programs), _folders_above(self.root)):
            script_folder = os.path.relpath(self.root, above)
            folders = (script_folder, "", "src")  # where Python may look, that of the script first
            for imported in imports.find(f"{script_folder}/{path}", above, folders):
                outside = [name for name in imported.modules if not name.startswith(f"{script_folder}/")]
                name = imported.name.partition(".")[0]
                if outside and not imported.is_optional and not _is_installed(name):
                    raise BadInput(
                        f"{path}:{imported.line} imports {imported.name}, and {outside[-1]} is above the "
                        f"folder of the script: add --code_dir {above}"
                    )

    def _include(self, path: str, imported: imports.Import) -> list[str]:
        """Return the modules of an import that are uploaded and whose imports are followed. A package at the
        top comes with all its files, because its modules may read them. path: of the program. Raises BadInput
        for a module that a rule skips, unless the program continues without it."""
        included = []
        for module in imported.modules:
            top = module.partition("/")[0]
            if module not in self.files and self._parts and top not in self._parts:
                self._parts.add(top)
                self._collect()
            rule = self._find_rule_above(module)
            if module in self.files:
                included.append(module)
            elif not imported.is_optional and not (imported.is_later and rule.startswith(FILE)):
                raise BadInput(
                    f"{path}:{imported.line} imports {imported.name}, and {module} is not uploaded (rule: "
                    f"{rule}): move it, or include it with a line `!{module}` in {FILE}"
                )
        return [module for module in included if module.partition("/")[0] not in _LINKED]  # those are whole

    def _find_rule_above(self, path: str) -> str:
        """Return the rule that skips a file or a folder above it; _NO_RULE without one."""
        above = (rule for name, rule in self.skipped.items() if f"{path}/".startswith(f"{name.rstrip('/')}/"))
        return next(above, _NO_RULE)

    def _check_limits(self) -> None:
        """Raise BadInput if the platform would refuse the folder."""
        # the platform counts folders, too
        entries = set()
        for path in map(PurePosixPath, self.files):
            entries.update(str(entry) for entry in (path, *path.parents[:-1]))
        count = len(entries) + _OWN
        size = sum(map(os.path.getsize, self.files.values()))
        if count > _ENTRIES or size > _SIZE:
            folder, most = Counter(path.rpartition("/")[0] for path in entries).most_common(1)[0]
            raise BadInput(
                f"{count} files and folders of {human_size(size)}, and a code folder may have {_ENTRIES} of "
                f"{human_size(_SIZE)}; {most} are in {folder or '.'}/: put data into an input, not here"
            )

    def _visit(self, folder: str, real: tuple[str, ...]) -> None:
        """Add the content of `folder` (with / at its end). real: the real paths above, then its own."""
        for entry in os.scandir(os.path.join(self.root, folder)):
            path = folder + entry.name
            is_folder = entry.is_dir()
            # before a link is resolved: a link that a rule skips may lead anywhere
            if rule := self._find_rule(path, is_folder, entry.path):
                self.skipped[f"{path}/" if is_folder else path] = rule
                continue
            source = self._resolve(path, entry, real) if entry.is_symlink() else entry.path
            if is_folder:
                self._visit(f"{path}/", (*real, os.path.realpath(source)))
            elif entry.is_file():
                self.files[path] = source
            else:
                raise BadInput(f"{path} is not a regular file and cannot be uploaded")

    def _find_rule(self, path: str, is_folder: bool, absolute: str) -> str | None:
        """Return the rule that skips a file or a folder; None if it is uploaded. absolute: its path."""
        if self._without is not None and os.path.realpath(absolute) == self._without:
            return "the output of pack"
        if path in _REPLACED:
            return _REPLACED[path]
        if self._parts and path.partition("/")[0] not in self._parts:
            return "not needed by the job"
        return self._rules.find(path, is_folder)

    def _resolve(self, path: str, entry: os.DirEntry, real: tuple[str, ...]) -> str:
        """Return the target of a link. Raises BadInput if it is outside the code folder."""
        target = os.path.realpath(entry.path)
        # a project that `launch new` wrote has links to the rooms of a Bootfile repository
        if path in _LINKED and os.path.basename(target) == path and _is_repository(os.path.dirname(target)):
            return target
        is_outside = os.path.commonpath([real[0], target]) != real[0]
        is_circle = target in real
        if is_outside or is_circle or not os.path.exists(target):
            expected = f"expected another file or folder in {self.root}; skip it with a line in {FILE}"
            raise BadInput(f"{path} is a symbolic link to {os.readlink(entry.path)}: {expected}")
        return target


def _folders_above(folder: str) -> list[str]:
    """Return the folders above a script that may be its project: up to the one with a mark of a project."""
    folders = []
    for above in map(str, [*PurePosixPath(folder).parents][:_LEVELS]):
        if above in (os.sep, os.path.expanduser("~")):
            break
        folders.append(above)
        if any(os.path.exists(os.path.join(above, mark)) for mark in _PROJECT):
            break
    return folders


def _is_installed(name: str) -> bool:
    """Return whether a module comes with Python or with a package that is installed; "": a relative one."""
    installed = [folder for folder in sys.path if folder.endswith(("site-packages", "dist-packages"))]
    is_known = name in sys.stdlib_module_names
    return bool(name) and (is_known or PathFinder.find_spec(name, installed) is not None)


def _imports_bootfile(folder: str) -> bool:
    """Return whether a module in the folder, or in one below it, imports Bootfile."""
    modules = itertools.chain(Path(folder).glob("*.py"), Path(folder).glob("*/*.py"))
    with explained(folder):
        return any(_IMPORT.search(path.read_text(encoding="utf-8", errors="replace")) for path in modules)


def _is_repository(folder: str) -> bool:
    """Return whether a folder is a Bootfile repository. Other projects also have `common` and `datasets`."""
    return all(os.path.exists(os.path.join(folder, name)) for name in (_ENTRY, "datasets"))

"""What of a script's surroundings is uploaded to a platform."""

import os
import shutil

from common.exits import BadInput

_PARTS = ("common", "datasets", "jobs")  # of a Bootfile repository
_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "tests", "*.egg-info")
_LIMIT = 1000  # files and folders that ModelArts takes


class CodeFolder:
    """Of the Bootfile repository that `job` stands in: common, datasets, jobs and where the job is; else the
    folder of the script. Hidden files and tests stay behind. name: the last component of its path."""

    def __init__(self, job: str):
        self._job = os.path.abspath(job)
        folder = os.path.dirname(self._job)
        while not _is_repository(folder) and folder != os.path.dirname(folder):
            folder = os.path.dirname(folder)
        self._root, self._parts = folder, {*_PARTS, os.path.relpath(self._job, folder).split(os.sep)[0]}
        if not _is_repository(folder):
            self._root, self._parts = os.path.dirname(self._job), {"."}
        self.name = os.path.basename(self._root) or "code"

    def holds(self, path: str) -> bool:
        """Whether `path` would be uploaded, too."""
        parts = [os.path.normpath(os.path.join(self._root, part)) for part in self._parts]
        return any(os.path.commonpath([part, os.path.abspath(path)]) == part for part in parts)

    def job(self, folder: str) -> str:
        """The path of the script in a copy."""
        return os.path.join(folder, os.path.relpath(self._job, self._root))

    def copy(self, destination: str) -> None:
        """Make a copy. Raises BadInput when it has more files and folders than a platform takes."""
        os.makedirs(destination)
        for part in sorted(self._parts):
            source, target = os.path.join(self._root, part), os.path.join(destination, part)
            if os.path.isdir(source):
                self._check_size(source)
                shutil.copytree(
                    source, target, ignore=_LEFT_OUT, ignore_dangling_symlinks=True, dirs_exist_ok=True
                )
            elif os.path.exists(source):
                shutil.copy2(source, target)

    def _check_size(self, source: str) -> None:
        count = 0
        for folder, folders, files in os.walk(source):
            left_out = _LEFT_OUT(folder, [*folders, *files])
            folders[:] = [name for name in folders if name not in left_out]
            count += len(folders) + len(set(files) - left_out)
            if count > _LIMIT:
                raise BadInput(
                    f"{source} holds more than {_LIMIT} files and folders, too many for a code folder"
                )


def _is_repository(folder: str) -> bool:
    return all(os.path.isdir(os.path.join(folder, part)) for part in ("common", "datasets"))

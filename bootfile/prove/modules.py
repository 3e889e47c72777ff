"""Find the modules that belong to a script: their digests are in its proof."""

import os

from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained

_MOST = 1000  # modules of a script
_SKIPPED = ("__pycache__", "node_modules", "site-packages")
_ENVIRONMENT = "pyvenv.cfg"  # the file in the folder of a virtual environment

Modules = dict[str, str]


def find_modules(script: str) -> Modules:
    """Return the script and the Python files below its folder: path in the folder -> path of the file.

    Hidden folders, virtual environments and installed packages are skipped. A folder that is a symbolic link
    is not entered. Raises BadInput if there are more than 1000 modules, or if a folder cannot be read.
    """
    script = os.path.abspath(script)
    root = os.path.dirname(script)
    modules = {os.path.basename(script): script}
    folders = [root]
    with explained(f"the modules of {script} cannot be read"):
        while folders:
            for entry in os.scandir(folders.pop()):
                # a link may lead out of the project, for example to all data
                if entry.is_dir(follow_symlinks=False):
                    if not _is_skipped(entry):
                        folders.append(entry.path)
                elif entry.name.endswith(".py") and entry.is_file():
                    modules[os.path.relpath(entry.path, root).replace(os.sep, "/")] = entry.path
            # a script in the home folder, for example: its digests would take longer than the runs
            if len(modules) > _MOST:
                raise BadInput(f"{root} has more than {_MOST} modules")
    return dict(sorted(modules.items()))


def _is_skipped(folder: os.DirEntry[str]) -> bool:
    if folder.name.startswith(".") or folder.name in _SKIPPED:
        return True
    return os.path.exists(os.path.join(folder.path, _ENVIRONMENT))

"""Find the modules that belong to a script: their digests are in its proof."""

import os
from typing import NoReturn

from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained

_MOST = 1000  # modules of a script
_SKIPPED = ("__pycache__", "node_modules", "site-packages")
_ENVIRONMENT = "pyvenv.cfg"  # the file in the folder of a virtual environment

Modules = dict[str, str]


def find_modules(script: str) -> Modules:
    """Return the script and the Python files below its folder: path in the folder -> path of the file.

    They are all files, and not those that it imports: a test of its digests must also see a module that only
    some runs import. Hidden folders, virtual environments and installed packages are skipped. A folder that
    is a symbolic link is not entered: it may lead out of the project, for example to all data. Raises
    BadInput if there are more than 1000 modules, or if a folder cannot be read.
    """
    script = os.path.abspath(script)
    root = os.path.dirname(script)
    modules = {os.path.basename(script): script}

    def fail(error: OSError) -> NoReturn:
        raise error

    with explained(f"the modules of {script} cannot be read"):
        for folder, folders, files in os.walk(root, onerror=fail):
            folders[:] = [
                name
                for name in folders
                if not name.startswith(".")
                and name not in _SKIPPED
                and not os.path.exists(os.path.join(folder, name, _ENVIRONMENT))
            ]
            paths = [os.path.join(folder, name) for name in files if name.endswith(".py")]
            modules |= {os.path.relpath(path, root): path for path in paths if os.path.isfile(path)}
            # a script in the home folder, for example: its digests would take longer than the runs
            if len(modules) > _MOST:
                raise BadInput(f"{root} has more than {_MOST} modules")
    return dict(sorted(modules.items()))

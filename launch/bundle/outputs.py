"""Write what `pack` has chosen: a folder with a manifest, or one file that Python starts.

They take the manifest and the contents: path, with / -> file to copy, or the content itself. Equal contents
give equal bytes under an equal name, so that packing again changes nothing. What another program has written
is never replaced. The folder's name contains the digest of its content. The file is a zip archive with the
modules that the job needs: `python FILE.py` and torchrun run it as `python jobs/NAME.py` would in the folder.
"""

import contextlib
import io
import os
import zipfile
from pathlib import PurePosixPath

from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained, write_atomic
from common.ground.shared_folders import locked, make_folder_atomic
from launch import manifests


def write_folder(to: str, manifest: dict, contents: dict[str, str | bytes]) -> tuple[str, bool]:
    """Write the snapshot to the folder `to` atomically. Return (its path, False if it existed). Raises
    BadInput if a snapshot of that name was changed, if a file changes meanwhile, or if the disk is full."""
    final = os.path.join(to, manifests.make_folder_name(manifest))
    with explained(f"{to} cannot be written"):
        os.makedirs(to, exist_ok=True)
        with locked(to):
            # the name has the digest of the content: a folder of this name is compared, and never replaced
            if os.path.lexists(final):
                wrong = _find_wrong(final, manifest)
                if wrong:
                    raise BadInput(f"{final} exists, and {wrong} in it is not what was packed: delete it")
                return final, False
            with make_folder_atomic(final) as folder:
                manifests.write_files(folder, contents | {manifests.NAME: manifests.to_bytes(manifest)})
                wrong = _find_wrong(folder, manifest)
                if wrong:
                    raise BadInput(f"{wrong} was changed while it was packed")
    return final, True


def _find_wrong(folder: str, manifest: dict) -> str | None:
    """Return a file of a snapshot that is not what the manifest lists; None if all are."""
    stored = None
    with contextlib.suppress(OSError), open(os.path.join(folder, manifests.NAME), "rb") as content:
        stored = manifests.parse(content.read())
    if not stored or stored | {"git": None} != manifest | {"git": None}:
        return manifests.NAME
    for file in manifest["files"]:
        source = os.path.join(folder, file["path"])
        if not os.path.isfile(source) or manifests.describe_file(file["path"], source) != file:
            return file["path"]
    return None


_MAIN = '''"""Run the job of this archive, as `python -m {module}` would."""

import atexit
import importlib.util
import os
import sys

NEEDS = "its packages, besides torch: pip install {packages}"
if {{"-h", "--help"}} & {{*sys.argv[1:]}}:
    atexit.register(print, "\\nThis file needs", NEEDS)
__spec__ = importlib.util.find_spec("{module}")  # a new process imports the job by its name
__file__ = __spec__.origin
sys.path.insert(0, os.path.dirname(__file__))  # as for any script, modules of its folder can be imported
try:
    exec(__spec__.loader.get_code(__spec__.name))
except ModuleNotFoundError as error:
    if importlib.util.find_spec(error.name.partition(".")[0]):
        raise
    print("error:", error, "for", sys.executable + ";", NEEDS, file=sys.stderr)
    sys.exit(2)
'''
_TIME = (1980, 1, 1, 0, 0, 0)  # each file in the archive has it, so that equal contents are equal files


def write_file(path: str, manifest: dict, contents: dict[str, str | bytes], packages: list[str]) -> bool:
    """Write the archive, and return whether it is a new one. path: ends in .py. packages: the names of those
    that the job needs, for its --help. Raises BadInput if the path is another program, or if the name of the
    job is not that of a module."""
    job = manifest["job"].removesuffix(".py")
    if "." in job:
        raise BadInput(f"{manifest['job']} has a dot in its path, as no module has: rename it")
    files = {name: _read(source) for name, source in contents.items()}
    text = _MAIN.format(module=job.replace("/", "."), packages=" ".join(packages))
    files |= {"__main__.py": text.encode(), manifests.NAME: manifests.to_bytes(manifest)}
    for name in contents:  # folders without __init__.py would join those of other packages of that name
        if name.endswith(".py"):
            folders = list(PurePosixPath(name).parents)[:-1]
            files = {str(folder / "__init__.py"): b"" for folder in folders} | files
    # in the order of the names, with one time and one mode: equal contents give equal bytes
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(files.items()):
            info = zipfile.ZipInfo(name, _TIME)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = 0o644 << 16
            archive.writestr(info, content)
    with explained(f"{path} cannot be written"):
        if os.path.lexists(path):
            # only what `pack` wrote may be replaced
            if not zipfile.is_zipfile(path) or manifests.NAME not in zipfile.ZipFile(path).namelist():
                raise BadInput(f"{path} exists, and was not written by pack: name another file")
            if _read(path) == memory.getvalue():
                return False
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        write_atomic(path, memory.getvalue())
    return True


def _read(source: str | bytes) -> bytes:
    """Return the content of a file, or the content itself. Raises BadInput if the file cannot be read."""
    if isinstance(source, bytes):
        return source
    with explained(f"{source} cannot be read"), open(source, "rb") as file:
        return file.read()

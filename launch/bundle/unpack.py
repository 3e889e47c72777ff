# The code of a single file: `pack --single_file` adds a header and the archive.
import atexit
import base64
import hashlib
import io
import os
import shutil
import sys
import tempfile
import types
import zipfile

_JOB = "@JOB@"  # its path in the archive
_SHA256 = "@SHA256@"  # of the archive


def _unpack():
    """Unpack into a new folder that only this user may enter, and return (folder, paths of the files in it).

    Every process unpacks for itself, so no process waits for another or trusts an existing folder."""
    archive, folder = base64.b64decode(_ARCHIVE), None
    if hashlib.sha256(archive).hexdigest() != _SHA256:
        _refuse("this file was changed after it was packed: copy it again, completely")
    try:
        folder = tempfile.mkdtemp(prefix="bootfile-")  # 0700
        with zipfile.ZipFile(io.BytesIO(archive)) as members:
            members.extractall(folder)
            return folder, members.namelist()
    except OSError as error:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        _refuse(f"cannot unpack this file: {error}; TMPDIR may name another folder")


def _refuse(text: str):
    print(f"error: {text}", file=sys.stderr, flush=True)
    sys.exit(2)


def _main():
    folder, names = _unpack()
    owner, leave = os.getpid(), os._exit

    def clean():
        """Remove the folder, unless the job wrote results next to its code."""
        if os.getpid() != owner or not os.path.isdir(folder):  # a forked child
            return
        files = {os.path.join(base, file) for base, _, files in os.walk(folder) for file in files}
        results = files - {os.path.join(folder, name) for name in names}
        if all(os.path.basename(os.path.dirname(path)) == "__pycache__" for path in results):
            shutil.rmtree(folder, ignore_errors=True)
        else:
            text = f"{folder} is kept because the job wrote files there: name an output folder"
            print(text, file=sys.stderr, flush=True)

    def leave_clean(code: int):  # jobs end with os._exit: a communication library may hang in its destructor
        clean()
        leave(code)

    atexit.register(clean)
    os._exit = leave_clean
    job = os.path.join(folder, *_JOB.split("/"))
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path[0] = os.path.dirname(job)
    # The job is the main module, with its own __file__: so it finds its modules, and processes that
    # multiprocessing starts find it. Processes that run this command again unpack for themselves.
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = job
    with open(job, "rb") as file:
        code = compile(file.read(), job, "exec")
    exec(code, main.__dict__)


_ARCHIVE = """
@ARCHIVE@
"""

if __name__ == "__main__":
    _main()

# The code of a single file: `pack --single_file` adds a header and the archive.
import atexit
import base64
import contextlib
import fcntl
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
import time
import types
import zipfile

_JOB = "@JOB@"  # its path in the archive
_SHA256 = "@SHA256@"  # of the archive
_PREFIX, _NEW = f"bootfile-{os.getuid()}-{os.uname().nodename}-", "new-"
_MEMBERS = ".members.json"
_UNPACKS = 3600.0  # seconds: no process unpacks for longer


def _unpack():
    """Unpack into a new folder that only this user may enter. Every process unpacks for itself, so no process
    waits for another or trusts an existing folder. A folder is in use while a process holds its lock."""
    archive = base64.b64decode(_ARCHIVE)
    if hashlib.sha256(archive).hexdigest() != _SHA256:
        _refuse("this file was changed after it was packed: copy it again, completely")
    members, folder = zipfile.ZipFile(io.BytesIO(archive)), None
    names = members.namelist()
    if not all(map(_stays_inside, names)):
        _refuse("the archive in this file has a path that leads out of its folder")
    try:
        folder = tempfile.mkdtemp(prefix=_NEW + _PREFIX)  # 0700
        lock = os.open(folder, os.O_RDONLY)  # held until this process ends
        with contextlib.suppress(
            OSError
        ):  # a file system without locks: no folder of another process is removed
            fcntl.flock(lock, fcntl.LOCK_SH)
        with open(os.path.join(folder, _MEMBERS), "w") as file:
            json.dump(names, file)
        for name in names:
            target = os.path.join(folder, *name.split("/"))
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "xb") as file:
                file.write(members.read(name))
        used = os.path.join(os.path.dirname(folder), os.path.basename(folder)[len(_NEW) :])
        os.rename(folder, used)  # from here on others remove it if the lock is free
        return used
    except OSError as error:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        _refuse(f"cannot unpack this file: {error}; TMPDIR may name another folder")


def _refuse(text: str):
    print(f"error: {text}", file=sys.stderr, flush=True)
    sys.exit(2)


def _stays_inside(name: str):
    return "\\" not in name and not {"", ".", ".."} & {*name.split("/")}


def _clean(folder: str):
    """Remove the folder, and the folders of killed processes. Results that a job wrote next to its code
    stay."""
    _remove(folder)
    if os.path.isdir(folder):
        text = f"{folder} is kept because the job wrote files there: name an output folder"
        print(text, file=sys.stderr, flush=True)
    for name in os.listdir(os.path.dirname(folder)):
        if name.startswith((_PREFIX, _NEW + _PREFIX)):
            with contextlib.suppress(OSError):  # in use, another user's, or already removed
                _remove_if_unlocked(os.path.join(os.path.dirname(folder), name))


def _remove_if_unlocked(folder: str):
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        facts, is_new = os.fstat(lock), os.path.basename(folder).startswith(_NEW)
        if facts.st_uid != os.getuid() or (is_new and time.time() < facts.st_mtime + _UNPACKS):
            return
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if is_new:  # no job has run in it
            shutil.rmtree(folder)
        else:
            _remove(folder)
    finally:
        os.close(lock)


def _remove(folder: str):
    with open(os.path.join(folder, _MEMBERS)) as members:
        names = [name for name in json.load(members) if _stays_inside(name)]
    files = [os.path.join(folder, *name.split("/")) for name in names]
    for file in files:
        if os.path.isfile(file):
            os.unlink(file)
    for path in {os.path.dirname(file) for file in files}:
        shutil.rmtree(os.path.join(path, "__pycache__"), ignore_errors=True)
    for path, _, _ in os.walk(folder, topdown=False):
        if path != folder and not os.listdir(path):
            os.rmdir(path)
    if os.listdir(folder) == [_MEMBERS]:
        os.unlink(os.path.join(folder, _MEMBERS))
        os.rmdir(folder)


def _main():
    folder = _unpack()
    owner, leave = os.getpid(), os._exit

    def clean():
        if os.getpid() == owner and os.path.isdir(folder):  # not in a forked child
            try:
                _clean(folder)
            except (OSError, ValueError) as error:
                print(f"{folder} could not be removed: {error}", file=sys.stderr, flush=True)

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

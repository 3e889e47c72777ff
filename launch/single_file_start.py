# What a single file runs before its job: `pack --single_file` puts a text above it, and the archive into it.
import atexit
import base64
import fcntl
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
import types
import zipfile

_JOB, _SHA256 = "@JOB@", "@SHA256@"  # the job's path in the archive; of the archive
_PREFIX = f"bootfile-{os.getuid()}-"
_MEMBERS = ".members.json"


def _unpack():
    """Every process unpacks for itself into a new folder that only its user may enter, so none waits for
    another. Returns the folder and its lock: it is in use as long as somebody has the lock."""
    archive = base64.b64decode(_ARCHIVE)
    if hashlib.sha256(archive).hexdigest() != _SHA256:
        sys.exit("error: this file is not as it was packed: copy it again, the whole of it")
    with zipfile.ZipFile(io.BytesIO(archive)) as members:
        names = members.namelist()
        if not all(map(_stays_inside, names)):
            sys.exit("error: the archive in this file has a path that leads out of its folder")
        folder = tempfile.mkdtemp(prefix=f"new-{_PREFIX}")  # 0700
        lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_SH)
        with open(os.path.join(folder, _MEMBERS), "w") as file:
            json.dump(names, file)
        for name in names:
            target = os.path.join(folder, *name.split("/"))
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "xb") as file:
                file.write(members.read(name))
    used = os.path.join(os.path.dirname(folder), os.path.basename(folder).removeprefix("new-"))
    os.rename(folder, used)  # from here on others may take it away when nobody has the lock
    return used, lock


def _stays_inside(name):
    return bool(name) and "\\" not in name and not {"", ".", ".."} & {*name.split("/")}


def _clean(folder):
    """Take away the folder, and those of processes that were killed. Only what was unpacked, and what Python
    made of it: results that a job wrote beside its code stay."""
    _remove(folder)
    if os.path.isdir(folder):
        print(f"{folder} stays, as files were written there; name an output folder", file=sys.stderr)
    for entry in os.scandir(os.path.dirname(folder)):
        if not entry.name.startswith(_PREFIX) or entry.is_symlink() or entry.stat().st_uid != os.getuid():
            continue
        try:
            lock = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(entry.path)
        except OSError:  # in use
            pass
        finally:
            os.close(lock)


def _remove(folder):
    try:
        with open(os.path.join(folder, _MEMBERS)) as file:
            names = [name for name in json.load(file) if _stays_inside(name)]
    except (OSError, ValueError):
        return
    files = [os.path.join(folder, *name.split("/")) for name in names]
    folders = {os.path.dirname(file) for file in files}
    for file in files:
        if os.path.isfile(file):
            os.unlink(file)
    for path in sorted(folders, key=len, reverse=True):
        shutil.rmtree(os.path.join(path, "__pycache__"), ignore_errors=True)
        while path != folder and os.path.isdir(path) and not os.listdir(path):
            os.rmdir(path)
            path = os.path.dirname(path)
    if os.listdir(folder) == [_MEMBERS]:
        os.unlink(os.path.join(folder, _MEMBERS))
        os.rmdir(folder)


def _main():
    folder, lock = _unpack()
    owner, leave = os.getpid(), os._exit

    def clean():
        if os.getpid() == owner and os.path.isdir(folder):  # not in what it has forked
            try:
                _clean(folder)
            except OSError as error:
                print(f"{folder} could not be taken away: {error}", file=sys.stderr)

    def leave_clean(code):  # jobs leave so when a communication library may hang in its destructor
        clean()
        leave(code)

    atexit.register(clean)
    os._exit = leave_clean
    job = os.path.join(folder, *_JOB.split("/"))
    if sys.path and sys.path[0] == os.path.dirname(os.path.abspath(__file__)):
        sys.path[0] = os.path.dirname(job)
    # The job is the main module, and its file is where its __file__ says: so it finds its modules, processes
    # that multiprocessing starts find it, and those that run this command again unpack for themselves.
    main = types.ModuleType("__main__")
    main.__file__, main._lock, main._first = job, lock, sys.modules["__main__"]
    sys.modules["__main__"] = main
    with open(job, "rb") as file:
        code = compile(file.read(), job, "exec")
    exec(code, main.__dict__)


_ARCHIVE = """
@ARCHIVE@
"""

if __name__ == "__main__":
    _main()

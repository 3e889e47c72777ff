"""--train_url s3://...: the job writes to a folder of this node, and a thread of rank 0 brings what is there
to the URL.

    <train_url>/checkpoints/step_400.pt step_400.pt.json latest    epoch_<n>.pth best.pth metrics.jsonl ...
    <train_url>/.bootfile-outputs.json    what is whole: {"format", "files": [{path, size, sha256}], "step"}

The list is written last, so a job that is killed at any moment leaves the list of before, and what that names
is what a restart goes on from. Older checkpoints go only after the list that no longer names them. Files
below other folders (an index, packs) stay on the node.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import threading
import time

from common import arguments, checkpoint, exits, meeting, restoring
from common.exits import BadInput
from common.object_store import ObjectStore, StoreError
from common.restoring import CHECKPOINTS, MARKER, File
from common.url_lease import Lease
from common.writer import describe

_EVERY, _SAY_EVERY = 30.0, 30.0  # seconds
_TRIES = 2  # for the last upload
_LAST = 10.0  # seconds for it where the job ends with an error
_BUSY = 10.0  # seconds for the last moments of the job before, after a restart in place
_FOREVER = re.compile(r".*\.(pt|pth|pt\.json)")  # appear by a rename, and are never written to again

_mirrors: dict[str, "Mirror"] = {}


def of(folder: str) -> "Mirror | None":
    """On rank 0, the mirror of an output folder that stands for a URL, the same one each time; else None."""
    url = arguments.url_of(folder)
    if url and folder not in _mirrors:
        _mirrors[folder] = Mirror(folder, url)
    return _mirrors.get(folder)


def watch(folder: str) -> None:
    """On rank 0, where something was written to an output folder: bring it to the URL that it stands for."""
    if (mirror := of(folder)) and not mirror.started:
        mirror.start(0)


def opened(args, first: bool) -> "Mirror | None":
    """On every process, before it is resumed: the mirror on the first, open, with what was uploaded before;
    None on others, and where the output folder is no URL's.

    args: output_dir, resume and keep. Raises BadInput on every process.
    """
    if not arguments.url_of(args.output_dir):
        return None
    mirror, trouble = None, None
    if first:
        mirror = of(args.output_dir)
        try:
            mirror.open(args.resume, args.keep)
        except BadInput as error:
            trouble = error
    meeting.everybody("restoring", "to restore the outputs", trouble)
    return mirror


class Mirror:
    """folder: of this node. url: what it stands for."""

    def __init__(self, folder: str, url: str):
        self.folder, self.url, self.error = folder, url, ""
        self.store, self.lease, self.keep = ObjectStore(url, threads=4), None, 1
        self._listed: dict[str, File] = {}  # what the list there says, by path
        self._files: dict[str, File] = {}  # what the next list will say
        self._doomed: set[str] = set()  # what the next checkpoint replaces
        self._garbage: set[str] = set()  # what no list names any more
        self._sent: dict[str, tuple] = {}  # path -> what the file was like when it was sent
        self._wake, self._ending, self._asked = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        exits.before_leaving(lambda: self.finish(_LAST))
        exits.on_success(self._end)

    def open(self, resume: str = "auto", keep: int = 1) -> None:
        """Become the only one that writes there; bring back what is newer there. Raises BadInput."""
        self.keep = keep
        self._lock = open(self._make(".lock"), "a")  # noqa: SIM115
        deadline = time.monotonic() + _BUSY
        while True:
            try:
                fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                if time.monotonic() > deadline:
                    raise BadInput(
                        f"{self.url} belongs to another job that is running on this node (it writes to "
                        f"{self.folder}): give every job a train_url of its own"
                    ) from None
                time.sleep(0.2)
        shutil.rmtree(os.path.join(self.folder, ".mirror"), ignore_errors=True)
        self.lease = Lease(self.store, self.folder)
        try:
            self._look(resume)
        except BaseException:
            self._release()
            raise

    def _look(self, resume: str) -> None:
        marker = restoring.read_marker(self.store)
        self._listed = dict(marker.files) if marker else {}
        self._files = self._listed.copy()
        there = {entry.key for entry in self.store.list(CHECKPOINTS)}
        self._doomed = there - self._files.keys()
        with contextlib.suppress(
            StoreError
        ):  # a job need not have the right to; `launch clean` takes them, too
            for key, upload, _ in self.store.uploads():  # of a job that was killed: they are billed for ever
                self.store.abort(key, upload)
        if resume == "auto":
            self._doomed |= restoring.restore(self.store, self.folder, marker, there)

    @property
    def started(self) -> bool:
        return self._thread.ident is not None

    def start(self, step: int) -> None:
        """Training begins, or goes on after `step`: upload from now on."""
        for path in self._files:
            number = restoring.step_of(path)
            if number is not None and (step == 0 or number > step):
                self._doomed.add(path)  # of another run, or what this one will do again
        self._thread.start()

    def saved(self) -> None:
        """There is a new checkpoint."""
        self._asked.set()
        self._wake.set()

    def finish(self, seconds: float | None = None) -> str:
        """Upload what is left, and let go of the URL. Returns why something was not uploaded, or "".

        seconds: at most so long.
        """
        self._ending.set()
        self._wake.set()
        if not self.started:  # there was no training
            self._release()
        begin = said = time.monotonic()
        while self._thread.is_alive():
            now = time.monotonic()
            if seconds is not None and now - begin > seconds:
                self.error = self.error or f"the last upload to {self.url} did not end within {seconds:.0f} s"
                break
            if now - said > _SAY_EVERY:
                said = now
                _say(f"waiting for the upload to {self.url} ({now - begin:.0f} s)")
            self._thread.join(0.1)
        return self.error

    def _end(self) -> None:
        if error := self.finish():
            exits.say_error(error)
            exits.leave(exits.NOT_SAVED)

    # the thread

    def _work(self) -> None:
        while not self._ending.is_set():
            self._wake.wait(_EVERY)
            self._wake.clear()
            if not self._ending.is_set():
                self._try()
        for _ in range(_TRIES):
            self._try()
            if not self.error:
                break
        self._release()

    def _release(self) -> None:
        lease, self.lease = self.lease, None
        if lease:
            with contextlib.suppress(BadInput):  # a job after this one finds that it does not change
                lease.release()

    def _try(self) -> None:
        asked = self._asked.is_set()
        self._asked.clear()
        try:
            if self.lease is None:
                self.open("never")  # a job that never resumes
            self._upload()
            self.error = ""
        except Exception as error:  # the training goes on whatever is wrong here
            reason = str(error) if isinstance(error, BadInput) else describe(error, self.folder)
            new = not self.error
            self.error = f"not uploaded to {self.url}: {reason}"
            if (asked or new) and not self._ending.is_set():
                _say(f"warning: {self.error}; training goes on, the next save tries again")

    def _upload(self) -> None:
        if self.lease.lost:
            raise BadInput(self.lease.lost)
        for name in restoring.HISTORY:  # reaches as far as the checkpoint that comes after it
            self._send(name)
        if newest := next(iter(checkpoint.found(os.path.join(self.folder, CHECKPOINTS))), None):
            self._upload_checkpoint(f"{CHECKPOINTS}/{os.path.basename(newest)}")
        for name in sorted(os.listdir(self.folder)):
            path = os.path.join(self.folder, name)
            if os.path.isfile(path) and not (name.startswith(".") or name.endswith(".partial")):
                self._send(name)
        if self._files != self._listed:
            self._write_marker()
        self.store.delete(sorted(self._garbage))
        self._garbage.clear()

    def _upload_checkpoint(self, path: str) -> None:
        """The file and its checksum, then the list; what it replaces is garbage from there on."""
        checksum = f"{path}.json"
        known = self._files.copy()
        try:
            self._send(path)
            self._send(checksum)
        except BaseException:
            self._files = known  # one without the other is none
            raise
        if all(self._files.get(each) == self._listed.get(each) for each in (path, checksum)):
            return
        number, latest = restoring.step_of(path), f"{CHECKPOINTS}/{checkpoint.LATEST}"
        steps = {restoring.step_of(each) for each in self._files.keys() - self._doomed} - {None}
        for old in sorted(steps | {number})[: -self.keep]:
            self._doomed |= set(restoring.names_of(old))
        self._doomed -= {path, checksum, latest}
        content = f"{os.path.basename(path)}\n".encode()
        self.store.write(latest, content)
        self._files[latest] = File(len(content), hashlib.sha256(content).hexdigest())
        for each in self._doomed:
            self._files.pop(each, None)
            self._sent.pop(each, None)
        self._write_marker()
        self._garbage |= self._doomed
        self._doomed.clear()

    def _send(self, name: str) -> None:
        """Bring a file to the URL, where another one is there; it is in the next list."""
        path = os.path.join(self.folder, name)
        snapshot = self._make(os.path.join(".mirror", name.replace("/", "-")))
        try:
            status = os.stat(path)
            state = status.st_ino, status.st_size, status.st_mtime_ns
            if self._sent.get(name) == state:
                return
            _copy(path, snapshot)
        except FileNotFoundError:  # another took its place meanwhile, and will be sent
            return
        try:
            own = File(os.path.getsize(snapshot), _sha256(snapshot))
            if self._files.get(name) != own:
                self.store.send(snapshot, name, sha256=own.sha256)
            self._files[name], self._sent[name] = own, state
        finally:
            os.unlink(snapshot)

    def _write_marker(self) -> None:
        steps = [step for step in map(restoring.step_of, self._files) if step is not None]
        marker = {
            "format": restoring.FORMAT,
            "files": [{"path": path, **file._asdict()} for path, file in sorted(self._files.items())],
            "step": max(steps, default=None),
        }
        self.store.write(MARKER, json.dumps(marker, indent=1).encode())
        self._listed = self._files.copy()

    def _make(self, name: str) -> str:
        """Where a file of ours lies."""
        path = os.path.join(self.folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return path


def _copy(path: str, snapshot: str) -> None:
    """What the file is now, whatever is written to it while it is sent."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(snapshot)
    if _FOREVER.fullmatch(path):
        with contextlib.suppress(PermissionError, OSError):  # not every file system has links
            os.link(path, snapshot)
            return
    shutil.copyfile(path, snapshot)


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def _say(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(line, flush=True)

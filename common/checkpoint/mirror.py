"""--train_url s3://...: the job writes to a folder of this node, and a thread of rank 0 uploads it.

    <train_url>/checkpoints/step_400.pt step_400.pt.json latest    epoch_<n>.pth best.pth metrics.jsonl ...
    <train_url>/.bootfile-outputs.json    the list of complete files with size and sha256 (output_list.py)

At any moment, every file in the list is at the URL with that sha256. Before a file is overwritten, the list
is written without it; after new files have arrived, the list is written with them. A checkpoint stays in the
list, and at the URL, until newer ones replace it. A restart continues from the newest checkpoint in the list.
Files in other folders (an index, packs) stay on the node.

If the list names a checkpoint, the weights of all epochs that were evaluated before it are at the URL; a
restart from it evaluates the later epochs, and writes their weights again. A job that was paused and lost its
lease cannot replace the list of its successor, because the list is written with If-Match. If a store ignores
If-Match, a restart still finds the successor's checkpoints (restore.py).
"""

import contextlib
import os
import re
import shutil
import threading

from common.checkpoint import files as checkpoint
from common.checkpoint import output_list
from common.checkpoint import restore as restoring
from common.checkpoint.lease import Lease
from common.checkpoint.output_list import File
from common.checkpoint.restore import CHECKPOINTS, HISTORY
from common.checkpoint.saver import describe
from common.distributed import barrier, ranks
from common.ground import exits
from common.ground.exits import BadInput, print_line
from common.ground.files import sha256_file, state_of
from common.ground.heartbeat import Heartbeat
from common.object_store.store import ObjectStore, StoreError
from common.run.output import WEIGHTS, Output

_EVERY = 30.0  # seconds between uploads
_TRIES = 2  # for the last upload
_LAST = 10.0  # seconds for the last upload if the job ends with an error
_FOREVER = re.compile(r".*\.(pt|pth|pt\.json)")  # written by a rename and never changed in place
_LATEST = f"{CHECKPOINTS}/{checkpoint.LATEST}"
_SNAPSHOTS = ".mirror"  # in the output folder: copies of the files that are being sent
# files that a job may send in parts: unfinished uploads of other names belong to other programs
_IN_PARTS = re.compile(
    r"checkpoints/step_\d+\.pt|epoch_\d+\.pth|best\.pth|(metrics|state)\.jsonl|receipt\.bin"
)


def open_mirror(output: Output, resume: str, keep: int) -> "Mirror | None":
    """Return the mirror of an output with a URL on rank 0, and None on the other ranks.

    Call it on every rank, before the run is resumed: if resume is "auto", it restores the newest checkpoint.
    keep: the number of checkpoints to keep at the URL. Raises BadInput on every rank.
    """
    mirror, trouble = None, None
    if ranks.is_first():
        try:
            mirror = Mirror(output)
            mirror.open(resume, keep)
        except BadInput as error:
            trouble = error
        except OSError as error:
            trouble = BadInput(f"cannot restore into {output.folder}: {error.strerror} ({error.filename})")
    barrier.wait_for_all("restoring", "to restore the outputs", trouble)
    return mirror


class Mirror:
    """Uploads the files of an output to its URL, in a thread."""

    def __init__(self, output: Output):
        if output.url is None:
            raise ValueError(f"{output.folder} has no URL")
        self.output, self.folder, self.url, self.error = output, output.folder, output.url, ""
        self.store, self.keep = ObjectStore(output.url, threads=4), 1
        self.lease: Lease | None = None
        self._listed: dict[str, File] = {}  # the files in the list at the URL
        self._etag: str | None = None  # the version of the list at the URL
        self._sure = True  # whether _listed is certain: the last attempt to write the list succeeded
        self._files: dict[str, File] = {}  # the complete files at the URL
        self._sent: dict[str, tuple | None] = {}  # path -> the file's state when it was sent
        self._saved = False  # whether this start has saved a checkpoint
        self._resumed = 0  # the step that training continues from
        self._replaced = True  # whether the last checkpoint that was sent has replaced the older ones
        self._doomed: set[str] = set()  # files that the next checkpoint replaces
        self._garbage: set[str] = set()  # files to delete: the list does not name them any more
        self._wake, self._ending, self._asked = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        exits.at_end("upload", self._end)

    def open(self, resume: str = "auto", keep: int = 1) -> None:
        """Take the lease of the URL; if resume is "auto", restore a newer checkpoint. Raises BadInput."""
        self.keep = keep
        self.output.hold()
        shutil.rmtree(os.path.join(self.folder, _SNAPSHOTS), ignore_errors=True)
        self.lease = Lease(self.store, self.folder)
        try:
            self._look(resume)
        except BaseException:
            self._release()
            raise

    def _look(self, resume: str) -> None:
        self._listed, self._etag = restoring.read_list(self.store)
        self._files = self._listed.copy()
        there = {entry.key for entry in self.store.list(CHECKPOINTS)}
        self._doomed = {path for path in there - self._files.keys() if restoring.step_of(path) is not None}
        self._replaced = not self._doomed
        with contextlib.suppress(StoreError):  # the permission may be missing; `launch clean` does it too
            for key, upload, _ in self.store.uploads():  # left by a killed job: billed until aborted
                if _IN_PARTS.fullmatch(key):
                    self.store.abort(key, upload)
        if resume == "auto":
            self._doomed |= restoring.restore(self.store, self.folder, self._listed, there)
            if self._listed:  # a job that was killed while it replaced best.pth has removed it from the list
                self._files = restoring.stored(self.store, ["best.pth"]) | self._files

    def results(self) -> list[str]:
        """Return the checkpoints and weights that the list at the URL names."""
        return [path for path in self._listed if path.endswith((".pt", ".pth"))]

    def start(self, step: int) -> None:
        """Upload from now on. step: the step that training continues from, or 0."""
        self._resumed = step
        for path in self._files:
            number = restoring.step_of(path)
            if number is not None and (step == 0 or number > step):
                self._doomed.add(path)  # of another run, or of steps that this run repeats
        self._thread.start()

    def saved(self) -> None:
        """Upload now: the run has saved a checkpoint and deleted old ones."""
        self._saved = True
        self._asked.set()
        self._wake.set()

    def finish(self, seconds: float | None = None) -> str:
        """Upload the remaining files and release the lease. Return why a file was not uploaded, or "".

        seconds: the longest time to wait (default: no limit).
        """
        self._ending.set()
        self._wake.set()
        if self._thread.ident is None:  # there was no training
            self._release()
        heartbeat = Heartbeat()
        while self._thread.is_alive():
            if seconds is not None and heartbeat.seconds > seconds:
                self.error = self.error or f"the last upload to {self.url} did not end within {seconds:.0f} s"
                break
            heartbeat.beat(f"waiting for the upload to {self.url}")
            self._thread.join(0.1)
        return self.error

    def _end(self, error: BaseException | None) -> None:
        reason = self.finish(_LAST if error else None)
        if reason and not error:
            exits.say_error(reason)
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
            with contextlib.suppress(BadInput):  # the next job takes over a lease that does not change
                lease.release()

    def _check_lease(self) -> None:
        """Raise BadInput if another job has taken the lease."""
        assert self.lease is not None  # open() has taken it
        self.lease.check()

    def _try(self) -> None:
        asked = self._asked.is_set()
        self._asked.clear()
        try:
            if self.lease is None:
                self.open("never")  # a job without a Checkpointer does not resume
            self._upload()
            self.error = ""
        except Exception as error:  # no error of an upload may stop the training
            reason = str(error) if isinstance(error, BadInput) else describe(error, self.folder)
            new = not self.error
            self.error = f"not uploaded to {self.url}: {reason}"
            if (asked or new) and not self._ending.is_set():
                print_line(f"warning: {self.error}; the training continues, and the next save retries")

    def _upload(self) -> None:
        self._check_lease()
        # The checkpoint is chosen first, so the weights and the history reach at least to its step.
        step = self._newest()
        pair = restoring.names_of(step) if step is not None else ()
        names = self._plain_files()
        weights = filter(WEIGHTS.fullmatch, names)
        results = [*weights, *HISTORY, *pair, *([_LATEST] if pair else [])]
        others = [name for name in names if name not in results]
        try:
            changed = {name: file for name in (*results, *others) if (file := self._snapshot(name, step))}
            self._replaced = self._replaced and changed.keys().isdisjoint(pair)
            self._write_list()  # without the files that are overwritten
            for name in results:
                self._send(name, changed)
            if step is not None and not self._replaced and set(pair) <= self._files.keys():
                self._retire(step)
                self._write_list()
                self._replaced = True
            for name in others:
                self._send(name, changed)
            self._write_list()
        finally:
            shutil.rmtree(os.path.join(self.folder, _SNAPSHOTS), ignore_errors=True)
        if self._garbage:
            self._check_lease()
            self.store.delete(sorted(self._garbage))
            self._garbage.clear()

    def _newest(self) -> int | None:
        """Return the step of the newest whole checkpoint of this run on the node."""
        for path in checkpoint.list_newest_first(os.path.join(self.folder, CHECKPOINTS)):
            name = f"{CHECKPOINTS}/{os.path.basename(path)}"
            step = restoring.step_of(name)
            if not self._saved and step != self._resumed:  # may be another run's
                continue
            with contextlib.suppress(checkpoint.Refused, OSError):
                if name not in self._files or self._sent.get(name) != state_of(path):
                    checkpoint.verify(path)
                return step
        return None

    def _plain_files(self) -> list[str]:
        """Return the names of the files directly in the folder."""
        names = [name for name in os.listdir(self.folder) if not name.startswith(".")]
        files = filter(lambda name: os.path.isfile(os.path.join(self.folder, name)), names)
        return sorted(name for name in files if not name.endswith(".partial"))

    def _snapshot(self, name: str, step: int | None) -> File | None:
        """Copy a file, so that it can change while it is sent, and remove its earlier version from the files
        at the URL. Return None if it is at the URL already.

        step: the step of the newest checkpoint, for the content of LATEST.
        """
        snapshot = os.path.join(self.folder, _SNAPSHOTS, name)
        os.makedirs(os.path.dirname(snapshot), exist_ok=True)
        state = None
        if name == _LATEST:
            assert step is not None  # it is sent together with a checkpoint
            with open(snapshot, "w", encoding="utf-8") as file:
                file.write(f"{checkpoint.name_of(step)}\n")
        else:
            path = os.path.join(self.folder, name)
            try:
                state = state_of(path)
                if name in self._files and self._sent.get(name) == state:
                    return None
                _copy(path, snapshot)
            except FileNotFoundError:  # it is being replaced: the next upload sends it
                return None
        own = File(os.path.getsize(snapshot), sha256_file(snapshot))
        self._sent[name] = state
        if self._files.get(name) == own:
            return None
        self._files.pop(name, None)
        return own

    def _send(self, name: str, changed: dict[str, File]) -> None:
        if name in changed:
            self._check_lease()
            self.store.send(os.path.join(self.folder, _SNAPSHOTS, name), name, sha256=changed[name].sha256)
            self._files[name] = changed[name]
            self._garbage.discard(name)

    def _retire(self, step: int) -> None:
        """Remove from the list the files that the checkpoint of `step` replaces."""
        steps = restoring.steps_of(self._files.keys() - self._doomed)
        for old in sorted(steps | {step})[: -self.keep]:
            self._doomed |= set(restoring.names_of(old))
        self._doomed -= {*restoring.names_of(step), _LATEST}
        for each in self._doomed:
            self._files.pop(each, None)
        self._garbage |= self._doomed
        self._doomed.clear()

    def _write_list(self) -> None:
        """Write the list of the complete files at the URL. A checkpoint is listed only with its checksum."""
        files = {
            path: file
            for path, file in self._files.items()
            if (step := restoring.step_of(path)) is None
            or set(restoring.names_of(step)) <= self._files.keys()
        }
        if files == self._listed and self._sure:
            return
        self._check_lease()
        self._sure = False
        text = output_list.text(files, max(restoring.steps_of(files), default=None))
        etag = self.store.replace(output_list.NAME, text, self._etag)
        if not etag:  # another job has replaced it, or an attempt of this job whose answer was lost
            self._etag = self.store.read_version(output_list.NAME)[1]
            self._check_lease()  # after the read: a job that takes the lease from now on changes the ETag
            etag = self.store.replace(output_list.NAME, text, self._etag)
        if not etag:
            raise BadInput(f"the list at {self.url} changed while it was written")
        self._etag, self._listed, self._sure = etag, files, True


def _copy(path: str, snapshot: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(snapshot)
    if _FOREVER.fullmatch(path):
        with contextlib.suppress(PermissionError, OSError):  # not every file system has hard links
            os.link(path, snapshot)
            return
    shutil.copyfile(path, snapshot)

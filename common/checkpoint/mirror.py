"""--train_url s3://...: the job writes to a folder of this node, and a thread of rank 0 uploads it.

    <train_url>/checkpoints/step_400.pt step_400.pt.json step_400.shards/    epoch_<n>.pth best.pth ...
    <train_url>/.bootfile-outputs.json    the list of complete files with size and sha256 (output_list.py)

At any moment, every file in the list is at the URL with that sha256. Before a file is overwritten, the list
is written without it; after new files have arrived, the list is written with them. A checkpoint stays in the
list, and at the URL, until newer ones replace it. A restart continues from the newest checkpoint in the list.
Files in other folders (an index, packs) stay on the node.

If the list names a checkpoint, the weights of all epochs that were evaluated before it are at the URL; a
restart from it evaluates the later epochs, and writes their weights again. A job that was paused and lost its
lease cannot replace the list of its successor, because the list is written with If-Match.
"""

import contextlib
import json
import math
import os
import re
import shutil
import threading
import time

from bootfile.exact import checked_files
from bootfile.exact import files as checkpoint
from bootfile.exact.saver import NotSaved, describe
from bootfile.ground.errors import BadInput, print_line
from bootfile.ground.files import explained, sha256_file, state_of
from bootfile.ground.heartbeat import Heartbeat
from bootfile.ground.lease import Lease
from bootfile.ground.results import CHECKPOINTS, WEIGHTS, checkpoint_names, dtensor_folder
from bootfile.processes import signals
from common.checkpoint import output_list
from common.checkpoint import restore as restoring
from common.checkpoint.output_list import File
from common.checkpoint.restore import HISTORY, names_of, steps_of
from common.ground import endings
from common.object_store.store import ObjectStore, StoreError
from common.run.output import SNAPSHOTS, Output

_EVERY = 30.0  # seconds between uploads
_PATIENCE = 300.0  # seconds for which the last upload is repeated if the store is busy or cannot be reached
_SAY = 10.0  # seconds between the lines about the last upload
_LONGEST_PAUSE = 20.0  # seconds between two attempts; the first pause is 1 s
_LAST = 10.0  # seconds for the last upload if the job ends with an error
_FOREVER = re.compile(r".*\.(pt|pth|pt\.json|distcp|metadata)")  # they are never changed in place
KEY = ".bootfile-lease.json"
_RELEASED = "released by"  # in the record of a job that has ended


class UrlLease(Lease):
    """The right to write below the URL of a store: an object there. A job replaces only the version that it
    has read (If-Match)."""

    def __init__(self, store: ObjectStore):
        self.store = store
        super().__init__(store.location.url())  # takes it, or raises BadInput
        self._check_store()

    def read(self) -> tuple[dict, str | None]:
        """Return the record of the holder, and its ETag."""
        content, etag = self.store.read_version(KEY)
        if etag is None:
            return {}, None
        holder = None
        with contextlib.suppress(ValueError, RecursionError):
            holder = json.loads(content)
        if not isinstance(holder, dict) or not holder:
            holder = {"id": None}  # a damaged record is that of an unknown job
        return {} if holder.get(_RELEASED) else holder, etag

    def replace(self, version: str | None) -> str | None:
        return self.store.replace(KEY, json.dumps(self.own | {"time": time.time()}).encode(), version)

    def delete(self) -> None:
        """Delete the record. If the store does not delete objects, write into it that the lease is free: the
        next job would wait 25 s otherwise."""
        try:
            self.store.delete([KEY])
        except StoreError as error:
            if not error.forbidden:
                raise
            self.store.replace(KEY, json.dumps({_RELEASED: self.own["id"]}).encode(), self.version)

    def _check_store(self) -> None:
        """Print a warning if the store cannot refuse the write of a second job: there is a record, so
        If-None-Match must fail."""
        etag = self.replace(None) if self.version else ""
        if etag is None:  # refused
            return
        self.version = etag or self.version
        reason = "ignores conditional writes" if etag else "returns no ETag"
        print_line(
            f"warning: the store of {self.place} {reason}: two jobs that start there at the same moment "
            "cannot be kept apart; start only one"
        )


class Mirror:
    """Uploads the files of an output to its URL, in a thread of rank 0, and holds the lease of the URL.

    If `resume` is "auto", it restores the newest checkpoint of the URL first. keep: the number of checkpoints
    to keep at the URL. Raises BadInput.
    """

    def __init__(self, output: Output, resume: str | None = None, keep: int = 1):
        self.folder = output.folder
        self.url = str(output.url)
        self.keep = keep
        self.error = ""  # why the last upload failed
        self._is_temporary = False  # whether the cause of `error` may pass by itself
        self.store = ObjectStore(self.url, threads=4)
        self._sent: dict[str, tuple] = {}  # path -> the file's state when it was sent
        self._every = 0  # distance in steps of the old checkpoints that stay at the URL; 0: none stay
        self._start_step = 0  # step that this start continues from
        self._newest_step = 0  # step of the newest checkpoint of this run
        self._wake = threading.Event()  # the thread looks for changes now
        self._ending = threading.Event()  # the thread uploads once more and ends
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        shutil.rmtree(os.path.join(self.folder, SNAPSHOTS), ignore_errors=True)
        # from here on no other job writes to the URL; if this start fails, the next one need not wait
        self.lease = UrlLease(self.store)
        self._keeps_all = False  # whether the store does not delete objects
        try:
            with explained(f"cannot restore into {self.folder}"):
                self._read_url(resume)
        except BaseException:
            self._release()
            raise
        endings.at_end("upload", self._end)

    def _read_url(self, resume: str | None) -> None:
        """Find out what is at the URL, and restore its newest checkpoint if `resume` is "auto"."""
        # the complete files at the URL, path -> File, and the ETag of their list
        self._files, self._etag = restoring.read_list(self.store)
        self._listed: dict[str, File] | None = self._files.copy()  # None: a write may have failed
        stored = {entry.key for entry in self.store.list(CHECKPOINTS)}
        # files of checkpoints to delete when the next one is stored: at first those of unfinished uploads
        self._outdated = {path for path in stored - self._files.keys() if restoring.step_of(path) is not None}
        if resume == "auto" and self._files:
            self._outdated |= restoring.restore(self.store, self.folder, self._files)
            # a job that was killed while it replaced best.pth has removed it from the list
            best = self.store.head("best.pth")
            if best and best.sha256:
                self._files = {best.key: File(best.size, best.sha256)} | self._files

    def results(self) -> list[str]:
        """Return the checkpoints and weights that the list at the URL names."""
        return [path for path in self._files if path.endswith((".pt", ".pth"))]

    def start(self, step: int, every: int = 0) -> None:
        """Upload from now on. step: the step that training continues from, or 0. every: the distance of the
        old checkpoints that stay, in steps (ladder.py); 0: none."""
        self._every = every
        self._start_step = step
        self._newest_step = step
        # checkpoints after `step` are of another run, or of steps that this run repeats
        self._outdated |= {path for path in self._files if (restoring.step_of(path) or 0) > step}
        self._thread.start()

    def saved(self, step: int) -> None:
        """Upload now, in the thread: the run has saved the checkpoint of this step and deleted old ones."""
        self._newest_step = step
        self._wake.set()

    def finish(self, seconds: float = math.inf) -> str:
        """Upload the remaining files and release the lease, and wait for it at most `seconds`. Return why a
        file was not uploaded, or ""."""
        self._ending.set()
        self._wake.set()
        if self._thread.ident is None:  # there was no training
            self._release()
        # in short parts, so that a signal and the limit end the wait
        heartbeat = Heartbeat(_SAY)
        while self._thread.is_alive():
            if heartbeat.seconds > seconds:
                self.error = self.error or f"the last upload to {self.url} did not end within {seconds:.0f} s"
                break
            reason = f": {self.error}" if self.error else ""
            heartbeat.beat(f"waiting for the upload to {self.url}{reason}")
            self._thread.join(0.1)
        return self.error

    def _end(self, error: BaseException | None) -> None:
        """Upload the rest at the end of main(). If that fails after a main() that was right, raise
        NotSaved."""
        reason = self.finish(_LAST if error else math.inf)
        if reason and not error:
            raise NotSaved(reason)

    # the thread

    def _work(self) -> None:
        """Upload every 30 s and after each save, until finish(). Then upload the last files, retry while the
        store is busy, and release the lease."""
        while not self._ending.is_set():
            self._wake.wait(_EVERY)
            self._wake.clear()
            if not self._ending.is_set():
                self._try()
        deadline = time.monotonic() + _PATIENCE
        pause = 1.0
        # after an error that may pass it tries until the deadline, after another one once more
        while self._try() and time.monotonic() + pause < deadline and (self._is_temporary or pause == 1):
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        self._release()

    def _release(self) -> None:
        """Release the lease."""
        with contextlib.suppress(BadInput):  # the next job takes over a lease that does not change
            self.lease.release()

    def _try(self) -> str:
        """Upload the newest checkpoint and all other files, in the thread. Return the error, or ""."""
        before = self.error
        try:
            self._upload(self._newest_step)
            self.error = ""
        except Exception as error:  # no error of an upload may stop the training
            reason = str(error) if isinstance(error, BadInput) else describe(error, self.folder)
            self.error = f"not uploaded to {self.url}: {reason}"
            self._is_temporary = isinstance(error, StoreError) and error.later
            if self.error != before and not self._ending.is_set():
                print_line(f"warning: {self.error}; the training continues, and the next save retries")
        return self.error

    def _upload(self, step: int) -> None:
        """Upload the checkpoint of a step and all other files, as far as they have changed: first the weights
        and what a restart needs, then the rest. Then delete the checkpoints that this one replaces. Raises
        BadInput, StoreError and OSError; also then the list at the URL is right."""
        self.lease.check()
        # The checkpoint was chosen first, so the weights and the history reach at least to its step.
        checkpoint_files = self._find_whole(step)
        entries = os.scandir(self.folder)
        plain_files = sorted(entry.name for entry in entries if entry.is_file() and entry.name[0] != ".")
        needed = [*filter(WEIGHTS.fullmatch, plain_files), *HISTORY, *checkpoint_files]
        others = [name for name in plain_files if name not in needed]
        for older_step in self._find_missing():
            others += self._find_whole(older_step)
        try:
            snapshots = {name: self._snapshot(name) for name in (*needed, *others)}
            self._write_list()  # without the files that are overwritten
            # the list is written after each part: a restart can use the first one before the rest has arrived
            for names in (needed, others):
                for name in names:
                    if file := snapshots[name]:  # else it is at the URL already
                        self.lease.check()
                        self.store.send(os.path.join(self.folder, SNAPSHOTS, name), name, sha256=file.sha256)
                        self._files[name] = file
                is_stored = bool(checkpoint_files) and self._files.keys() >= set(checkpoint_files)
                # the checkpoint that this start has loaded replaces no other one
                replaces_others = is_stored and self._newest_step > self._start_step
                if replaces_others:
                    self._retire(step)
                self._write_list()
        finally:
            shutil.rmtree(os.path.join(self.folder, SNAPSHOTS), ignore_errors=True)
        # a restart may need those that the list still names
        deleted = self._outdated if replaces_others else self._outdated - self._files.keys()
        if deleted and not self._keeps_all:
            self.lease.check()
            self._delete(sorted(deleted))
        self._outdated = self._outdated - deleted

    def _delete(self, names: list[str]) -> None:
        """Delete the files of checkpoints that the list does not name any more. If the store refuses it, they
        stay, with a warning: everything that a restart needs is there."""
        try:
            self.store.delete(names)
        except StoreError as error:
            if not error.forbidden:
                raise
            self._keeps_all = True
            print_line(
                f"warning: {error}: the store does not delete {', '.join(names)}: they stay there, and so "
                "does each checkpoint that a newer one replaces"
            )

    def _find_kept(self, steps: set[int]) -> set[int]:
        """Return the steps of old checkpoints that stay at the URL. steps: those that are whole."""
        if not self._every:
            return set()
        from bootfile.exact import ladder  # most runs keep only the newest ones

        return ladder.find_kept(steps, self._every, lambda step: True)  # verified before they were sent

    def _find_missing(self) -> list[int]:
        """Return the steps of older checkpoints that this node has and the URL lacks, because they were saved
        faster than they could be uploaded: those of --keep_every, and the last `keep` when the job ends by
        itself."""
        at_url = steps_of(self._files.keys() - self._outdated)
        names = checkpoint_names(os.path.join(self.folder, CHECKPOINTS))
        steps = steps_of(f"{CHECKPOINTS}/{name}" for name in names)
        on_node = sorted(step for step in steps if step <= self._newest_step)
        ends_by_itself = self._ending.is_set() and not signals.asked()
        wanted = self._find_kept(at_url | set(on_node))
        if ends_by_itself:
            wanted |= set(on_node[-self.keep :])
        return sorted(wanted - at_url - {self._newest_step})

    def _find_whole(self, step: int) -> list[str]:
        """Return the files of the checkpoint of a step, its folder first; [] if this node does not have it,
        or if it is damaged."""
        name, checksum = names_of(step)
        path = os.path.join(self.folder, name)
        with contextlib.suppress(checkpoint.Refused, OSError):
            if name in self._files and self._sent.get(name) == state_of(path):
                facts = checked_files.facts_of(path)  # verified before it was sent
            else:
                facts = checked_files.verify(path)
            shards = [os.path.join(dtensor_folder(name), shard) for shard in facts.get("shards", ())]
            return [*shards, name, checksum]
        return []

    def _snapshot(self, name: str) -> File | None:
        """Copy a file, so that it can change while it is sent, and remove its earlier version from the files
        at the URL. Return None if it is at the URL already."""
        path = os.path.join(self.folder, name)
        snapshot = os.path.join(self.folder, SNAPSHOTS, name)
        try:
            state = state_of(path)
            if name in self._files and self._sent.get(name) == state:
                return None
            _copy(path, snapshot)
        except FileNotFoundError:  # it is being replaced: the next upload sends it
            return None
        file = File(os.path.getsize(snapshot), sha256_file(snapshot))
        self._sent[name] = state
        # written again with the same content: it is at the URL
        if self._files.get(name) == file:
            return None
        self._files.pop(name, None)
        return file

    def _retire(self, step: int) -> None:
        """Remove from the list the files that the checkpoint of `step`, which is whole at the URL, replaces.
        They are deleted when the list is written without them."""
        at_url = steps_of(self._files.keys() - self._outdated)
        replaced = sorted(at_url | {step})[: -self.keep]
        self._outdated |= restoring.of_steps(self._files, replaced)
        # not this checkpoint: another run may have left one of the same step, which was outdated
        kept = self._find_kept(at_url) | {step}
        self._outdated -= restoring.of_steps(self._outdated, kept)
        for path in self._outdated:
            self._files.pop(path, None)

    def _write_list(self) -> None:
        """Write the list of the complete files at the URL. A checkpoint is listed only with its checksum."""
        steps = steps_of(self._files)
        cut = [step for step in steps if not set(names_of(step)) <= self._files.keys()]
        left_out = restoring.of_steps(self._files, cut)
        files = {path: file for path, file in self._files.items() if path not in left_out}
        if files == self._listed:
            return
        self.lease.check()
        self._listed = None  # until it is known that the write has succeeded
        text = output_list.text(files, max(steps_of(files), default=None))
        for _attempt in range(2):
            etag = self.store.replace(output_list.NAME, text, self._etag)
            if etag is not None:
                self._etag = etag
                self._listed = files
                return
            # another job has replaced it, or an attempt of this job whose answer was lost
            _, self._etag = self.store.read_version(output_list.NAME)
            self.lease.check()  # after the read: a job that takes the lease from now on changes the ETag
        raise BadInput(f"the list at {self.url} changed while it was written")


def _copy(path: str, snapshot: str) -> None:
    """Copy a file, or make a hard link to it if it is never changed in place."""
    os.makedirs(os.path.dirname(snapshot), exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(snapshot)
    if _FOREVER.fullmatch(path):
        with contextlib.suppress(OSError):  # not every file system has hard links
            os.link(path, snapshot)
            return
    shutil.copyfile(path, snapshot)

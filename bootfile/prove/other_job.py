"""The runs of a script that does not use Bootfile: its files are compared."""

import contextlib
import itertools
import json
import os
import random
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from typing import IO, Any, NamedTuple

import torch

from bootfile.exact import files
from bootfile.ground.errors import BadInput
from bootfile.processes import sessions
from bootfile.prove import causes, surroundings, trial
from bootfile.prove.cases import AGAIN, DAMAGED, KILLED, REFERENCE, STOPPED, Case
from bootfile.prove.damage import change, describe
from bootfile.prove.job import Job
from bootfile.prove.modules import find_modules
from bootfile.receipt import weights
from bootfile.receipt.compare import find_files
from bootfile.receipt.reading import find_receipt

_NOT_KNOWN = ("another number of processes", "a restart with 2 processes", "another number of workers")
_ROOM = 10  # copies of the output folder that must fit on the disk before a further one is made
_TRACED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "traced.py")
Version = tuple[str, int, int]  # path, inode and time of the last change of a file, in ns


class Left(NamedTuple):
    """What a start has left: its files of tensors, and the digests of their tensors and counters."""

    versions: set[Version]
    digests: frozenset[str] = frozenset()


class OtherJob(Job):
    """A script that writes files of weights, and continues with other options."""

    def __init__(
        self,
        script: str,
        options: list[str],
        root: str,
        kills: int,
        *,
        compare: str,
        resume_with: str,
        stops: int = 0,
    ):
        super().__init__(script, options, root, kills)
        folder = re.split(r"[*?\[]", compare)[0]
        self._output = os.path.dirname(compare)
        if folder != compare:  # the folder before the first wildcard, which may be one above the files
            self._output = os.path.dirname(folder)
        if not self._output:
            raise BadInput(f'--compare {compare}: expected files in a folder of the run, as "OUT/*.pt"')
        if os.path.lexists(self._output):
            raise BadInput(f"{self._output} exists: move it away, because each run writes its own")
        self.weights = os.path.relpath(compare, self._output)
        self._resume_with = shlex.split(resume_with)
        self._stops = stops
        self._writes = 0  # how many files the reference writes
        self._seconds = 0.0  # that the reference takes
        self._is_read = False  # whether a restart has read a damaged file
        self.unchecked += [f"{what}: not known" for what in _NOT_KNOWN]

    def plan(self) -> list[Case]:
        cases = [AGAIN, Case(KILLED, kills=self.kills, changes=(surroundings.THREADS,))]
        if self._stops:
            cases.append(Case(STOPPED, stops=self._stops))
        return [*cases, DAMAGED]

    def run(self, case: Case) -> str:
        with self._working_folder(case) as place:
            try:
                done, written = self._run(case, place)
            finally:
                # also after a failure: the next run writes at the same place
                output = os.path.join(place or "", self._output)
                if os.path.exists(output):
                    shutil.move(output, self.folder(case.name))
        if case.name == REFERENCE:
            self._writes = written
            self._check_reference()
        return done

    def _run(self, case: Case, place: str | None) -> tuple[str, int]:
        """Run a case in the output folder, and return (what was done, files of tensors that were written).

        A script may end before a SIGKILL reaches it. Then the run is made again, with an earlier one.

        place: the folder in which the script works, if it is another one. Raises trial.Failed, NotRun.
        """
        if case.stops:
            return self._run_with_stops(case, place), 0
        if not case.kills:
            return self._run_once(case, place, [])
        # by written files, because the steps are not known; not at the ends, where nothing is lost
        first = max(1, int(0.2 * self._writes))
        last = max(1, int(0.8 * self._writes))
        output = os.path.join(place or "", self._output)
        before = len(self.doubts)
        for bound in trial.lower_bounds(first, last):
            if len(self.doubts) > before:  # those of the try before
                del self.doubts[before:]
                for folder in (output, *self._snapshots()):
                    shutil.rmtree(folder, ignore_errors=True)
            done, written = self._run_once(case, place, trial.choose_steps(case.kills, first, bound))
            if len(self.doubts) == before:
                break
        return done, written

    def _run_once(self, case: Case, place: str | None, kills: list[float]) -> tuple[str, int]:
        """Run a case once, as _run() does. kills: numbers of files after which the script is killed."""
        writes = set[tuple[int, int]]()  # (inode, time) of each file that was seen
        left: list[Left] = []  # the files at each kill with a restart, and at the end

        names = {os.path.join(self._output, name) for name in find_files(self.folder(REFERENCE), "**/*")}

        def watch() -> float:
            """Return the number of files of tensors that were written: a kill waits for the first one."""
            is_whole = False
            for path, inode, changed in self._versions():
                writes.add((inode, changed))
                is_whole = is_whole or path in names
            # the only file may have the name under which it is written, and no restart would find it
            if len(writes) < 2 and not is_whole:
                return 0.0
            return len(writes)

        def watch_nothing() -> float:
            """watch() reads the files: it would look as if the restart had read the damaged ones."""
            return 0.0

        def after_kill() -> list[str]:
            """Return the command of the restart; that of a first start if no file can be read yet."""
            if not any(map(self._load, self._files())):
                return self.command()
            left.append(self._read_left())
            # kept for the damaged restart, and to find the cause if this run differs
            if not os.path.exists(self._snapshot):
                shutil.copytree(self._output, self._snapshot)
            elif case.name == KILLED and self._has_room():
                shutil.copytree(self._output, os.path.join(self.root, f"at-kill-{len(left)}"))
            return self._restart()

        command = self.command()
        done = ""
        damaged = []
        if case.damages:
            damaged = self._damage(case)
            command = self._restart()
            done = describe(case, "the largest tensor", damaged)
        if case.kills:
            self._record(case, command, self._restart())
        else:
            self._record(case, command)
        # to tell the files that the restart has written from those that it has only read
        before = self._versions()
        with _watch_reads(damaged) as read:
            progress = watch_nothing if damaged else watch
            start = self._start(case, place)
            began = time.monotonic()
            killed = trial.run(command, self._log(case.name), progress, kills, after_kill, start)
        if case.name == REFERENCE:
            self._seconds = time.monotonic() - began
        self._is_read = bool(read)
        self._restore_damaged(damaged, before & self._versions())
        if case.kills:
            left.append(self._read_left())
            done = self._describe_kills(killed, left)
        return done, len(writes)

    def _run_with_stops(self, case: Case, place: str | None) -> str:
        """Run a case with SIGTERMs at random moments of its starts, and return what was done."""
        begin = self._start(case, place)
        began = 0.0

        def start(command: list[str], mark: str, output: IO[Any]) -> Any:
            nonlocal began
            began = time.monotonic()
            return begin(command, mark, output)

        def watch() -> float:
            return time.monotonic() - began

        def after_stop() -> list[str]:
            if any(map(self._load, self._files())):
                return self._restart()
            return self.command()

        self._record(case, self.command(), self._restart())
        stopped: list[float] = []
        # a start may take less time than the reference, which was the first one
        for share in (0.8, 0.4, 0.2):
            draw = random.Random(0)
            moments = [self._seconds * share * draw.uniform(0.2, 1) for _ in range(case.stops)]
            shutil.rmtree(os.path.join(place or "", self._output), ignore_errors=True)
            stopped = trial.run(
                self.command(), self._log(case.name), watch, moments, after_stop, start, stops=True
            )
            if stopped:
                break
        if not stopped:
            self.doubts.append(f"{case.name}: the script had ended before: let it train longer")
            return "no SIGTERM"
        times = ", ".join(f"{moment:.1f}" for moment in stopped)
        return f"SIGTERM after {times} s of a start, each with a restart"

    def _has_room(self) -> bool:
        """Return whether another copy of the output folder takes a small part of the disk."""
        size = 0
        for path in self._files():
            with contextlib.suppress(OSError):
                size += os.path.getsize(path)
        return shutil.disk_usage(self.root).free > _ROOM * size

    def _restore_damaged(self, damaged: list[str], unchanged: set[Version]) -> None:
        """Replace the damaged files that the restart has not written again by those of the snapshot: they are
        no result of this run, and would differ."""
        for path in {path for path, _, _ in unchanged}:
            if path in damaged:
                name = os.path.relpath(path, self._output)
                shutil.copy2(os.path.join(self._snapshot, name), path)

    def _describe_kills(self, killed: list[float], left: list[Left]) -> str:
        """Return what was done in a case with SIGKILLs. It is a doubt if no restart had to train on. killed:
        files at each SIGKILL. left: as in _run()."""
        if not any(_has_trained(before, after) for before, after in itertools.pairwise(left)):
            self.doubts.append(
                "no restart had to train on from a file: let it train longer, and save more often"
            )
        if not killed:
            return "no SIGKILL"
        times = ", ".join(f"{kill:.0f}" for kill in killed)
        kills = f"{len(killed)} SIGKILLs, each with a restart"
        if len(killed) == 1:
            kills = "a SIGKILL and a restart"
        return f"{kills}: after {times} of about {self._writes} writes of files"

    def _check_reference(self) -> None:
        """Raise BadInput if the reference has no files to compare. A missing receipt is a line."""
        names = find_files(self.folder(REFERENCE), self.weights)
        if not names:
            raise BadInput(f"{self.script} wrote no file {os.path.join(self._output, self.weights)}")
        for name in names:  # a file that cannot be compared is refused before the other runs
            weights.read_parts(os.path.join(self.folder(REFERENCE), name))
        if not find_receipt(self.folder(REFERENCE)):
            self.unchecked.append("the samples: no receipt (guides/receipts.md)")

    def refused(self, case: Case) -> bool:
        return case.damages == "all" and self._is_read  # one tensor may have no effect

    def find_cause(self, case: Case) -> str:
        """Return why a run with SIGKILLs differs, in words; "" if that is not known.

        `prove` calls it once, after all runs: it runs the reference again, and a restart from the files of
        the first SIGKILL, both with a line for each step (traced.py). If their steps are equal, the next
        SIGKILL follows: a schedule that begins again may be right where the first one was.
        """
        if not os.path.isdir(self._snapshot):
            return ""
        print("looking for the cause: the reference and a restart run again", flush=True)
        names = find_files(self.folder(REFERENCE), self.weights)
        differences = []
        # only files that both runs have can be compared
        if names == find_files(self.folder(case.name), self.weights):
            differences = weights.find_differences(self.folder(REFERENCE), self.folder(case.name), names)
        # new processes, with the threads of this one: the cause must be in what the restart has read
        reference = self._trace_or_nothing("traced-reference", self.command())
        cause = ""
        for number, snapshot in enumerate(self._snapshots(), 1):
            saved = self._describe_saved(snapshot)
            restart = []
            if reference:
                shutil.copytree(snapshot, self._output)
                restart = self._trace_or_nothing(f"traced-restart-{number}", self._restart())
            if restart:
                from_steps = causes.explain_steps(reference, restart, saved)
                if from_steps:
                    return from_steps
            cause = cause or causes.explain(reference, restart, saved, differences)
        return cause

    def _describe_saved(self, snapshot: str) -> causes.Saved:
        """Return what the files in a folder have."""
        states = {}
        for name in find_files(snapshot, "**/*"):
            state = self._load(os.path.join(snapshot, name))
            if state:
                states[name] = state
        return causes.describe_saved(states)  # without the states: they may need much memory

    def _trace_or_nothing(self, name: str, command: list[str]) -> list[causes.Step]:
        """Return the steps of a command; [] if it fails, as a script that traced.py cannot run, or that needs
        a folder with another name."""
        try:
            return self._trace(name, command)
        except trial.Failed:
            return []
        finally:
            shutil.rmtree(self._output, ignore_errors=True)

    def find_notes(self) -> list[str]:
        """Return a line if the script has a DistributedSampler and calls no set_epoch(): all epochs then have
        the same order, also after a restart."""
        text = ""
        with contextlib.suppress(BadInput, OSError):  # a folder with thousands of modules, for example
            for path in find_modules(self.script).values():
                with open(path, encoding="utf-8", errors="replace") as file:
                    text += file.read()
        if "DistributedSampler(" not in text or "set_epoch" in text:
            return []
        return [
            "DistributedSampler without set_epoch(): each epoch has the same order, also without a restart"
        ]

    def _trace(self, name: str, command: list[str]) -> list[causes.Step]:
        """Run a command of the script to its end in a new process, and return its steps. Its output is
        deleted. Raises trial.Failed."""
        path = os.path.join(self.root, f"{name}.jsonl")
        traced = [sys.executable, _TRACED, path, *command[1:]]

        def start(command: list[str], mark: str, output: IO[Any]) -> Any:
            return sessions.start(command, mark, output, surroundings.environment())

        def watch_nothing() -> float:
            return 0.0

        def refuse() -> list[str]:
            raise AssertionError("it is not killed")

        trial.run(traced, self._log(name), watch_nothing, [], refuse, start)
        shutil.rmtree(self._output, ignore_errors=True)
        if not os.path.exists(path):  # the script has no optimizer of torch
            return []
        with open(path, encoding="utf-8") as file:
            return [json.loads(line) for line in file]

    def _restart(self) -> list[str]:
        """Return the command that continues from the files of an earlier start."""
        return self.command(tuple(self._resume_with))

    def _files(self) -> list[str]:
        return [os.path.join(self._output, name) for name in find_files(self._output, "**/*")]

    def _versions(self) -> set[Version]:
        """Return what changes with each write of a file of tensors."""
        versions = set[Version]()
        for path in self._files():
            with contextlib.suppress(OSError), open(path, "rb") as file:
                status = os.fstat(file.fileno())
                if file.read(2) == b"PK":  # torch.save writes a zip file
                    versions.add((path, status.st_ino, status.st_mtime_ns))
        return versions

    def _read_left(self) -> Left:
        """Return the files as they are, for example after a SIGKILL."""
        versions = self._versions()
        digests = set[str]()
        for path, _, _ in versions:
            with contextlib.suppress(BadInput):  # a file that the kill has cut
                digests |= weights.read_progress(path)
        return Left(versions, frozenset(digests))

    def _load(self, path: str) -> dict[str, Any]:
        try:
            return weights.load(path)
        except files.Refused:
            return {}

    def _damage(self, case: Case) -> list[str]:
        """Prepare an output folder whose files are damaged. Return the damaged ones. Raises NotRun."""
        if os.path.isdir(self._snapshot):
            shutil.copytree(self._snapshot, self._output)
        paths = []
        for path in self._files():
            state = self._load(path)
            if change(state, case):
                torch.save(state, path)
                paths.append(path)
        if not paths:
            raise self._not_run("no file with weights could be damaged")
        return paths


@contextlib.contextmanager
def _watch_reads(paths: list[str]) -> Iterator[list[str]]:
    """Yield a list that holds, after the block, those of the files that another process has read.

    The access times of the files are set to 0 first: Linux then updates them at the next read, also with
    `relatime`. The files stay open, so that a file is known after it was replaced.
    """
    read = list[str]()
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(open(path, "rb")) for path in paths]
        for file in opened:
            os.utime(file.fileno(), ns=(0, os.fstat(file.fileno()).st_mtime_ns))
        yield read
        read += [file.name for file in opened if os.fstat(file.fileno()).st_atime_ns]


def _has_trained(before: Left, after: Left) -> bool:
    """Return whether a start has trained: it wrote a file again, or two new ones (the last file alone proves
    no training), with a tensor or a counter that no file had before. A script that was killed after its last
    step writes what it has read."""
    if after.digests <= before.digests:
        return False
    old_paths = {path for path, _, _ in before.versions}
    new_paths = {path for path, _, _ in after.versions} - old_paths
    written_again = {path for path, _, _ in after.versions - before.versions} & old_paths
    return bool(written_again) or len(new_paths) > 1

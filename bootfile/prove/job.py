"""A script whose runs `prove` compares: how a run is started, disturbed, recorded and made again.

The base class is for a script that does not use Bootfile: its files of tensors are compared. A job with the
options of Bootfile (own_job.py) is such a script, of which more is known.
"""

import contextlib
import functools
import glob
import itertools
import json
import os
import random
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from bootfile.console.words import mask_words
from bootfile.exact import digest, files
from bootfile.ground.errors import BadInput
from bootfile.ground.files import explained
from bootfile.processes import sessions
from bootfile.prove import cases, causes, forks, trial
from bootfile.prove.cases import AGAIN, DAMAGED, KILLED, ONE_CHANGE, REFERENCE, SAME, STOPPED, Case, NotRun
from bootfile.receipt import weights
from bootfile.receipt.compare import find_files
from bootfile.receipt.reading import find_receipt

_NOT_KNOWN = ("another number of processes", "a restart with 2 processes", "another number of workers")
_TRACED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "traced.py")
_FACTOR = 1 + 2**-6  # of a damaged tensor: 1.6 % more, also in the texts
Version = tuple[str, int, int]  # path, inode and time of the last change of a file, in ns


class Left(NamedTuple):
    """What a start has left: its files of tensors, and the digests of their tensors and counters."""

    versions: set[Version]
    digests: set[str]

    def has_trained_since(self, before: "Left") -> bool:
        """Return whether a tensor or a counter is new, and a file was written again or two new ones were. A
        single new file may be the last one of a script that was killed after its last step."""
        old_paths = {path for path, _, _ in before.versions}
        paths = [path for path, _, _ in self.versions - before.versions]
        is_written = len(paths) > 1 or not old_paths.isdisjoint(paths)
        return is_written and not self.digests <= before.digests


class Job:
    """A script with its options, and the folders of its runs. Each run writes to the same output folder, and
    the files are then moved to the folder of the run.

    script: its path. options: of the user. root: a folder for the runs. kills: SIGKILLs of the case KILLED.
    compare: pattern of its files of weights. resume_with: options of a restart. stops: SIGTERMs.
    `weights`: that pattern in the folder of a run.
    `unchecked`: lines on what could not be checked. `doubts`: lines on why the runs prove nothing.
    `same_bits`: numbers of processes whose runs must have equal states; [] for a job without shards.
    `processes`: those of the reference, if it is a job with shards.
    `commands`: the name of a run -> its commands, without credentials; the last one is that of a restart.
    """

    keeps_threads = False  # whether a restart continues with the threads of its checkpoint
    _longer = "let it train longer, and save more often"

    def __init__(
        self,
        script: str,
        options: list[str],
        root: str,
        kills: int,
        compare: str,
        resume_with: str,
        stops: int = 0,
    ):
        self.script = script
        self.options = options
        self.root = root
        self.kills = kills
        self.stops = stops
        # the folder before the first wildcard, which may be one above the files
        self.output = os.path.dirname(re.split(r"[*?\[]", compare)[0])
        if not self.output:
            raise BadInput(f'--compare {compare}: expected files in a folder of the run, as "OUT/*.pt"')
        if os.path.lexists(self.output):
            raise BadInput(f"{self.output} exists: move it away, because each run writes its own")
        self.weights = os.path.relpath(compare, self.output)
        with explained(f"--resume_with {resume_with}: expected words as a shell has them", ValueError):
            self._resume_with = shlex.split(resume_with)
        self.unchecked = cases.find_unchanged()
        self.doubts: list[str] = []
        self.same_bits: list[int] = []
        self.processes = 1
        self.commands: dict[str, list[str]] = {}
        self._forks = forks.Forks() if forks.are_possible() else None
        self._start_time = 0.0  # when the last start began
        # of the present run: (inode, time) of each file that was written; the files at each SIGKILL
        self._writes: set[tuple[int, int]] = set()
        self._left: list[Left] = []
        self._reference = 0  # files that the reference writes
        self._seconds = float("inf")  # that the fastest run has taken
        self._is_read = False  # whether a restart has read a damaged file

    def folder(self, name: str) -> str:
        """Return the folder of a run with this name."""
        return os.path.join(self.root, name.replace(" ", "-"))

    def command(self, *more: str) -> list[str]:
        """Return the command of a run, with these options after those of the user."""
        return [sys.executable, self.script, *self.options, *more]

    def plan(self) -> list[Case]:
        """Return the cases after the reference."""
        self.unchecked += [f"{what}: not known" for what in _NOT_KNOWN]
        stopped = [Case(STOPPED, stops=self.stops)] if self.stops else []
        return [AGAIN, Case(KILLED, kills=self.kills, changes=(cases.THREADS,)), *stopped, DAMAGED]

    def run_reference(self) -> None:
        """Make the run with which the others are compared: without it nothing can be. Raises BadInput."""
        shutil.rmtree(self.folder(REFERENCE), ignore_errors=True)
        try:
            self.run(Case(REFERENCE))
            self._accept_reference()
        except (trial.Failed, BadInput) as error:
            if not self._forks:
                raise BadInput(str(error)) from error
            # a script may fail in a fork only, for example if it asks for another start method
            self.close()
            self.run_reference()

    def repeat(self, case: Case) -> bool:
        """Make the reference again in a new process, and delete a run that differs, so that it can be made
        again, too. Return False if new processes have made both before. Raises BadInput."""
        if not self._forks:
            return False
        self.close()
        self.run_reference()
        self._delete(case, self.folder(case.name))
        return True

    def close(self) -> None:
        """End the process that makes forks. Later runs are new processes."""
        if self._forks:
            self._forks.close()
        self._forks = None

    def run(self, case: Case) -> str:
        """Run a case, and return what was done. Raises trial.Failed, NotRun, BadInput."""
        # the run to compare with was refused, or could not be made
        if case.against != REFERENCE and not os.path.isdir(self.folder(case.against)):
            raise NotRun(f"there is no run: {case.against}")
        with cases.working_folder(case.changes, f"{self.folder(case.name)}.surroundings") as place:
            try:
                return self._run(case, place)
            finally:
                # also after a failure: the next run writes at the same place. A script that writes next to
                # itself writes there from any working folder
                for output in {os.path.join(place or "", self.output), self.output}:
                    if os.path.exists(output):
                        shutil.move(output, self.folder(case.name))

    def _run(self, case: Case, place: str | None) -> str:
        """Run a case in the output folder, and return what was done.

        A script may end before a SIGKILL reaches it, or before a restart has to train on. Then the run is
        made again, with earlier SIGKILLs. place: the folder in which the script works, if it is another one.
        """
        done, damaged = self._damage(case) if case.damages else (self._describe_options(case), [])
        command = self._command(case, bool(case.damages))
        self._record(case, command, self._command(case, bool(case.damages or case.kills or case.stops)))
        watch, tries = self._plan_kills(case)
        # to tell the files that the restart has written from those that it has only read
        before = self._versions()
        with _watch_reads(damaged) as read:
            for number, kills in enumerate(tries):
                if number:
                    self._delete(case, self.output)
                self._left.clear()
                self._writes.clear()
                began = time.monotonic()
                killed = trial.run(
                    command,
                    self._log(case.name),
                    self._start(case, place),
                    watch,
                    kills,
                    lambda: self._continue(case),
                    stops=bool(case.stops),
                )
                if not case.damages:
                    self._seconds = min(self._seconds, time.monotonic() - began)
                if self._has_trained(case, killed):
                    break
            else:
                self.doubts.append(f"no restart had to train on ({case.name}): {self._longer}")
        self._is_read = bool(read)
        self._restore_damaged(damaged, before & self._versions())
        if case.name == REFERENCE:
            self._reference = len(self._writes)
        return self._describe_kills(case, killed) if case.kills or case.stops else done

    def _start(self, case: Case, place: str | None) -> Callable[[list[str], str, IO[Any]], Any]:
        """Return the function that starts a command of a run, for trial.run(). place: in which it works.

        It makes a fork if that is possible, because a fork has imported torch already. A case of other
        surroundings needs new processes: a fork has the hash seed and the imports of its server. So does a
        case whose processes are replaced.
        """
        start_process: Callable[..., Any] = sessions.start
        seed = 1
        if self._forks and not case.losses and case not in (AGAIN, SAME, *ONE_CHANGE):
            start_process = self._forks.start
            seed = forks.SEED
        # of a case with SIGKILLs only the restarts have the changes
        changes = itertools.chain([() if case.kills else case.changes], itertools.repeat(case.changes))

        def start(command: list[str], mark: str, output: IO[Any]) -> Any:
            self._begin()
            return start_process(command, mark, output, cases.environment(next(changes), seed), place)

        return start

    def _begin(self) -> None:
        """Note that a start begins."""
        self._start_time = time.monotonic()

    def _record(self, case: Case, *commands: list[str]) -> None:
        """Keep the commands of a run for the page of the proof, without credentials."""
        texts = [shlex.join(mask_words(command[1:])[0]) for command in commands]
        self.commands[case.name] = [*dict.fromkeys(texts)]

    def _command(self, case: Case, is_restart: bool) -> list[str]:
        """Return the command of a case, or that of its restarts."""
        return self.command(*(self._resume_with if is_restart else ()))

    def _describe_options(self, case: Case) -> str:
        """Return the options of a case."""
        return ""

    def _plan_kills(self, case: Case) -> tuple[Callable[[], float], Iterable[list[float]]]:
        """Return (what measures the progress of a run, for each try of it the progress at its signals)."""
        if case.damages:  # _progress() reads the files, as if the restart had read the damaged ones
            return float, [[]]
        writes = self._reference
        if case.stops:
            draw = random.Random(0)
            moments = np.array([draw.uniform(0.2, 1) for _ in range(case.stops)])
            # computed before each try: the one before it may have been faster than all other runs
            tries = ((self._seconds * share * moments).tolist() for share in (0.8, 0.4, 0.2))
            return lambda: time.monotonic() - self._start_time, tries
        # by written files, because the steps are not known; not at the ends, where nothing is lost
        return self._progress, trial.choose_tries(case.kills, max(1, int(0.2 * writes)), int(0.8 * writes))

    def _progress(self) -> float:
        """Return how many files of tensors the run has written so far. A SIGKILL waits for the first one."""
        versions = self._versions()
        self._writes |= {(inode, changed) for _, inode, changed in versions}
        # the first file counts once it has its final name: a script may write it under a temporary one
        if len(self._writes) < 2:
            names = {os.path.relpath(path, self.output) for path, _, _ in versions}
            return float(any(os.path.exists(os.path.join(self.folder(REFERENCE), name)) for name in names))
        return len(self._writes)

    def _continue(self, case: Case) -> list[str]:
        """Return the command after a SIGKILL: that of a first start if no file can be read yet."""
        if not any(map(_load, self._files())):
            return self._command(case, is_restart=False)
        self._left.append(self._read_left())
        self._keep_snapshot(case)
        return self._command(case, is_restart=True)

    def _keep_snapshot(self, case: Case) -> None:
        """Keep the files at a SIGKILL: for the damaged restart, and to find the cause if this run differs."""
        if case.name == KILLED:
            number = len(self._snapshots()) + 1
            folder = os.path.join(self.root, f"at-kill-{number}")
            # the file of a link such as `latest` may be deleted by then
            shutil.copytree(self.output, folder, ignore_dangling_symlinks=True)

    def _snapshots(self) -> list[str]:
        """Return the folders that the case KILLED has kept, in the order of its SIGKILLs."""
        folders = glob.glob(os.path.join(glob.escape(self.root), "at-kill-*"))
        return sorted(folders, key=lambda folder: int(folder.rpartition("-")[2]))

    def _delete(self, case: Case, output: str) -> None:
        """Delete what a run has written, before it is made again."""
        for folder in (output, *(self._snapshots() if case.name == KILLED else ())):
            shutil.rmtree(folder, ignore_errors=True)

    def _has_trained(self, case: Case, killed: list[float]) -> bool:
        """Return whether a restart of a case had steps left to train; True for a case without a restart."""
        if not case.kills and not case.stops:
            return True
        if case.stops and len(self._left) < len(killed):  # one without files begins again
            return True
        left = itertools.pairwise([*self._left, self._read_left()])
        return any(after.has_trained_since(before) for before, after in left)

    def _describe_kills(self, case: Case, killed: list[float]) -> str:
        """Return what was done in a case with SIGKILLs or SIGTERMs."""
        if not killed:
            return f"no {'SIGTERM' if case.stops else 'SIGKILL'}"
        if case.stops:
            times = ", ".join(f"{moment:.1f}" for moment in killed)
            restarts = "each with a restart" if killed[1:] else "and a restart"
            return f"SIGTERM after {times} s of a start, {restarts}"
        kills = f"{len(killed)} SIGKILLs, each with a restart" if killed[1:] else "a SIGKILL and a restart"
        times = ", ".join(f"{kill:.0f}" for kill in killed)
        return f"{kills}: after {times} of about {self._reference} writes of files"

    def _accept_reference(self) -> None:
        """Raise BadInput if the reference has no files to compare. A missing receipt is a line."""
        folder = self.folder(REFERENCE)
        names = find_files(folder, self.weights)
        if not names:
            raise BadInput(f"{self.script} wrote no file {os.path.join(self.output, self.weights)}")
        for name in names:  # a file that cannot be compared is refused before the other runs
            weights.read_parts(os.path.join(folder, name))
        if not find_receipt(folder):
            self.unchecked.append("the samples: no receipt (guides/receipts.md)")

    def _damage(self, case: Case) -> tuple[str, list[str]]:
        """Prepare an output folder whose files are damaged. Return (what was done, the damaged files). Raises
        NotRun."""
        for snapshot in self._snapshots()[:1]:
            shutil.copytree(snapshot, self.output)
        paths = []
        for path in self._files():
            state = _load(path)
            if change(state, case):
                torch.save(state, path)
                paths.append(path)
        if not paths:
            raise NotRun("no file with weights could be damaged")
        return describe_damage(case, "the largest tensor", paths), paths

    def _restore_damaged(self, damaged: list[str], unchanged: set[Version]) -> None:
        """Replace the damaged files that the restart has not written again by those of the snapshot: they are
        no result of this run, and would differ."""
        for path in {path for path, _, _ in unchanged} & {*damaged}:
            name = os.path.relpath(path, self.output)
            shutil.copy2(os.path.join(self._snapshots()[0], name), path)

    def refused(self, case: Case) -> bool:
        """Return whether a run that equals the reference has refused its damaged checkpoint: it has read it,
        and all tensors were damaged. A single one may have no effect."""
        return case.damages == "all" and self._is_read

    def describe_coverage(self, killed: list[str]) -> tuple[str, list[str]]:
        """Return (what the reference covered, in words; lines on what was not checked). killed: the names of
        the runs with SIGKILLs."""
        return "", []

    def find_cause(self, case: Case) -> str:
        """Return why a run with SIGKILLs differs, in words; "" if that is not known.

        `prove` calls it once, after all runs: it runs the reference again, and a restart from the files of
        the first SIGKILL, both with a line for each step (traced.py). If their steps are equal, the next
        SIGKILL follows: a schedule that begins again may be right where the first one was.
        """
        snapshots = self._snapshots()
        if not snapshots:
            return ""
        print("looking for the cause: the reference and a restart run again", flush=True)
        first, second = self.folder(REFERENCE), self.folder(case.name)
        names = find_files(first, self.weights)
        # only files that both runs have can be compared
        are_comparable = names == find_files(second, self.weights)
        differences = weights.find_differences(first, second, names) if are_comparable else []
        # new processes, with the threads of this one: the cause must be in what the restart has read
        reference = self._trace("traced-reference", self.command())
        cause = ""
        for number, snapshot in enumerate(snapshots, 1):
            names = find_files(snapshot, "**/*")
            saved = causes.describe_saved({name: _load(os.path.join(snapshot, name)) for name in names})
            restart = []
            if reference:
                shutil.copytree(snapshot, self.output)
                restart = self._trace(f"traced-restart-{number}", self.command(*self._resume_with))
            if cause_in_steps := causes.explain_steps(reference, restart, saved):
                return cause_in_steps
            cause = cause or causes.explain(reference, restart, saved, differences)
        return cause

    def _trace(self, name: str, command: list[str]) -> list[causes.Step]:
        """Run a command of the script in a new process, delete its output, and return its steps. Return [] if
        it uses no optimizer of torch, or fails, for example because it needs a folder with another name."""
        path = os.path.join(self.root, f"{name}.jsonl")
        start = functools.partial(sessions.start, environment=cases.environment())
        try:
            trial.run([sys.executable, _TRACED, path, *command[1:]], self._log(name), start)
            with open(path, encoding="utf-8") as file:
                return [json.loads(line) for line in file]
        except (trial.Failed, FileNotFoundError):
            return []
        finally:
            shutil.rmtree(self.output, ignore_errors=True)

    def _log(self, name: str) -> str:
        return f"{self.folder(name)}.log"

    def _files(self) -> list[str]:
        return [os.path.join(self.output, name) for name in find_files(self.output, "**/*")]

    def _versions(self) -> set[Version]:
        """Return the Version of each file of tensors. It changes when the file is written again."""
        versions = set[Version]()
        for path in self._files():
            with contextlib.suppress(OSError), open(path, "rb") as file:
                status = os.fstat(file.fileno())
                if file.read(2) == b"PK":  # torch.save writes a zip file
                    versions.add((path, status.st_ino, status.st_mtime_ns))
        return versions

    def _read_left(self) -> Left:
        """Return what the last start has left, for example after a SIGKILL."""
        versions = self._versions()
        digests = set[str]()
        for path, _, _ in versions:
            with contextlib.suppress(BadInput):  # a file that the kill has cut
                digests |= weights.read_progress(path)
        return Left(versions, digests)


def _load(path: str) -> dict[str, Any]:
    """Return the dictionary in a file of tensors; {} for another file."""
    try:
        return weights.load(path)
    except files.Refused:
        return {}


def change(state: dict[str, Any], case: Case) -> str:
    """Multiply the tensors of floating-point numbers that the case damages, in place: the largest one, which
    most models use, or all of them. Return the name of the largest, "" if there is none."""
    tensors = []
    for name, value in digest.leaves(state):
        # all changes are computed before one is written: two names may share memory. No copy can change a
        # tensor that repeats one element
        if isinstance(value, torch.Tensor) and value.is_floating_point() and 0 not in value.stride():
            changed = (value.detach().double() * _FACTOR).to(value.dtype)
            # a mask of zeros and infinities would stay as it is
            if digest.summarize(0, {name: changed}) != digest.summarize(0, {name: value}):
                tensors.append((value.numel(), name, value.detach(), changed))
    tensors.sort(key=lambda row: row[:2])  # by size, and then by name
    for _, _, tensor, changed in tensors if case.damages == "all" else tensors[-1:]:
        tensor.copy_(changed)
    return tensors[-1][1] if tensors else ""


def describe_damage(case: Case, largest: str, paths: list[str]) -> str:
    """Return what was done to checkpoints, in words. largest: the name of their largest tensor."""
    what = largest if case.damages == "largest" else "each tensor"
    return f"{what} of {', '.join(map(os.path.basename, paths))} is changed by 1.6 %"


@contextlib.contextmanager
def _watch_reads(paths: list[str]) -> Iterator[list[str]]:
    """Yield a list. After the block it holds those of the files that another process has read in the block.

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

"""The runs of a job that `prove` makes: jobs of Bootfile, and other scripts."""

import contextlib
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

import torch

from bootfile.console.words import get_option, mask_words
from bootfile.exact import digest, files
from bootfile.ground.errors import BadInput
from bootfile.processes import forking, sessions
from bootfile.prove import forks, surroundings, trial
from bootfile.prove.losses import Losses
from bootfile.receipt import records, starts
from bootfile.receipt.compare import find_files
from bootfile.receipt.reading import find_receipt
from bootfile.receipt.records import RECORD

_BAD_INPUT = 2  # exit code of a job that refuses its options
_STEPS, _EPOCHS = 24, 4  # length of a run, if the options name no number
_HELP_SECONDS = 60  # for --help: a script that does not know it may begin to train
_HINT = "if it does not use Bootfile, name its files with --compare and --resume_with"
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
REFERENCE, KILLED = "reference", "killed and restarted"
SAME_THREADS = f"{KILLED}, with the same number of threads"  # runs only if KILLED differs
PROCESSES = "--processes_per_node"
REPLACED = "killed processes are replaced, the others stay alive"
_LOSSES = {4: ((0,), (3,), (1, 2)), 2: ((0,), (1,))}  # processes -> ranks of each SIGKILL
_NOT_KNOWN = ("another number of processes", "a restart with 2 processes", "another number of workers")


Version = tuple[str, int, int]  # path, inode and time of the last change of a file, in ns


class NotRun(Exception):
    """A case cannot be run. The message has the reason."""


class Case(NamedTuple):
    """A run that is compared with another one.

    checks_state: whether states, figures and weights must be equal too.
    must_differ: whether a difference is right.
    option: of the job, for a job of Bootfile.
    value, other: those of the option; the second one is used if the reference has the first one.
    kills: number of SIGKILLs.
    against: name of the run with which it is compared.
    damages: tensors of its checkpoint that are changed: "largest", "all" or "" (none).
    changes: names of `surroundings`, what is changed around the job; another number of threads: at a restart.
    losses: ranks that get a SIGKILL at once, each time at another step; the job replaces them (--elastic).
    """

    name: str
    checks_state: bool = True
    must_differ: bool = False
    option: str = ""
    value: str = ""
    other: str = ""
    kills: int = 0
    against: str = REFERENCE
    damages: str = ""
    changes: tuple[str, ...] = ()
    losses: tuple[tuple[int, ...], ...] = ()


AGAIN = Case("the same again, in other surroundings", changes=surroundings.ALL)
SAME = Case("the same again")  # runs only if AGAIN differs, and then those with one change
ONE_CHANGE = [Case(f"the same again, with {change}", changes=(change,)) for change in surroundings.ALL]
DAMAGED = Case("restarted from a damaged checkpoint", must_differ=True, damages="largest")
ALL_DAMAGED = Case("restarted from a checkpoint with all tensors damaged", must_differ=True, damages="all")
_OTHER_PROCESSES = Case("another number of processes", False, False, PROCESSES, "2", "1")
_CHANGES = (
    _OTHER_PROCESSES,
    Case("another number of workers", True, False, "--workers", "1", "2"),
    Case("another engine", False, False, "--data_backend", "threads", "pytorch"),
    Case("another seed", True, True, "--seed", "1", "2"),
)


class Job:
    """A job with its options, and the folders of its runs.

    script: its path. options: of the user. root: a folder for the runs. kills: SIGKILLs of the case KILLED.
    `unchecked`: lines on what could not be checked. `doubts`: lines on why the runs prove nothing.
    `same_bits`: numbers of processes whose runs must have equal states; [] for a job without shards.
    `processes`: those of the reference, if it is a job with shards.
    `keeps_threads`: whether a restart continues with the threads of its checkpoint.
    `commands`: the name of a run -> its commands, without credentials; the second one is that of a restart.
    """

    weights: str  # pattern of the files of weights in a run's folder
    keeps_threads = False

    def __init__(self, script: str, options: list[str], root: str, kills: int):
        self.script, self.options, self.root, self.kills = script, options, root, kills
        self.unchecked: list[str] = []
        self.doubts: list[str] = []
        self.same_bits: list[int] = []
        self.processes = 1
        self.commands: dict[str, list[str]] = {}
        self._forks = forks.Forks() if forks.are_possible() else None
        self.unchecked += surroundings.find_unchanged()

    def folder(self, name: str) -> str:
        return os.path.join(self.root, name.replace(" ", "-"))

    def plan(self) -> list[Case]:
        """Return the cases after the reference."""
        raise NotImplementedError

    def run(self, case: Case) -> str:
        """Run a case, and return what was done. Raises trial.Failed, NotRun, BadInput."""
        raise NotImplementedError

    def refused(self, case: Case) -> bool:
        """Return whether a run that equals the reference has refused its damaged checkpoint."""
        raise NotImplementedError

    def command(self, options: tuple[str, ...] = ()) -> list[str]:
        return [sys.executable, self.script, *self.options, *options]

    def close(self) -> None:
        """End what was started."""
        if self._forks:
            self._forks.close()
        self._forks = None

    def run_reference(self) -> None:
        """Make the run with which the others are compared. Raises trial.Failed, BadInput."""
        try:
            self.run(Case(REFERENCE))
        except (trial.Failed, BadInput):
            if not self._forks:
                raise
            self._run_reference_again()

    def repeat(self, case: Case) -> bool:
        """Delete a run that differs, and make the reference again, if there are forks: new processes make it
        and all later runs. Return False without forks: the difference counts. Raises trial.Failed, BadInput.
        """
        if not self._forks:
            return False
        self._run_reference_again()
        for folder in (self.folder(case.name), *[self._snapshot] * (case.name == KILLED)):
            shutil.rmtree(folder, ignore_errors=True)
        return True

    def _run_reference_again(self) -> None:
        self.close()
        shutil.rmtree(self.folder(REFERENCE), ignore_errors=True)
        self.run(Case(REFERENCE))

    def _start(self, case: Case, folder: str | None) -> Callable[[list[str], str, IO[Any]], Any]:
        """Return the function that starts a command of a run. folder: in which it works."""
        is_forked = self._forks and case not in (AGAIN, SAME, *ONE_CHANGE) and not case.losses
        starts = 0

        def start(command: list[str], mark: str, output: IO[Any]) -> Any:
            nonlocal starts
            starts += 1
            changes = case.changes
            if starts == 1:  # the first start has the threads of the reference
                changes = tuple(change for change in changes if change != surroundings.THREADS)
            if is_forked and self._forks:
                return self._forks.start(command, mark, output, changes)
            environment = surroundings.environment(changes)
            return sessions.start(command, mark, output, environment, folder)

        return start

    def _working_folder(self, case: Case) -> contextlib.AbstractContextManager[str | None]:
        return surroundings.working_folder(case.changes, f"{self.folder(case.name)}.surroundings")

    def _record(self, case: Case, *commands: list[str]) -> None:
        self.commands[case.name] = [shlex.join(mask_words(command[1:])[0]) for command in commands]

    def _log(self, name: str) -> str:
        return f"{self.folder(name)}.log"

    def _not_run(self, reason: str) -> NotRun:
        self.doubts.append(reason)
        return NotRun(reason)

    @property
    def _snapshot(self) -> str:
        return os.path.join(self.root, "at-the-first-kill")


class OwnJob(Job):
    """A job with Bootfile's options. It continues if it is started again with the same --output_dir."""

    weights = "*.pth"
    keeps_threads = True

    def __init__(self, script: str, options: list[str], root: str, kills: int):
        super().__init__(script, options, root, kills)
        for name in ("--output_dir", "--train_url", "--resume"):
            if get_option(self.options, name) is not None:
                raise BadInput(f"{name} is chosen for each run: leave it out")
        shown = self._read_help()
        self._known = set(_OPTION.findall(shown))
        if not {"--output_dir", "--save_every", "--report_every", "--max_steps"} <= self._known:
            raise BadInput(f"{self.script} does not have Bootfile's options: {_HINT}")
        self._chosen = dict[str, int]()  # options that are not the user's -> value
        self.steps = self._choose_value("--max_steps", _STEPS)
        if {"--epochs", "--epoch_steps"} <= self._known:
            epochs = get_option(self.options, "--epochs") or ""
            length = self.steps // int(epochs) if epochs.isdecimal() else -(-self.steps // _EPOCHS)
            length = self._choose_value("--epoch_steps", max(1, length))
            self.steps = min(self.steps, length * self._choose_value("--epochs", -(-self.steps // length)))
        self._every = self._choose_value("--save_every", max(1, self.steps // 6))
        self._choose_value("--report_every", 1)
        default = re.search(r"--exact_shards V\s[^(]*\(default:\s+(\d+)\)", shown)
        shards = get_option(self.options, "--exact_shards") or (default[1] if default else "")
        if shards.isdecimal():
            self.same_bits = [number for number in (1, 2, 4) if int(shards) % number == 0]

    def _read_help(self) -> str:
        """Return what --help prints. Raises BadInput if it fails, or does not end."""
        begin = time.monotonic()

        def refuse() -> list[str]:
            raise BadInput(f"{self.script} --help did not end within {_HELP_SECONDS} s: {_HINT}")

        command, log = [sys.executable, self.script, "--help"], self._log("help")
        try:
            trial.run(command, log, lambda: time.monotonic() - begin, [_HELP_SECONDS], refuse)
        except trial.Failed as error:
            raise BadInput(f"{error} ({_HINT})") from error
        with open(log, encoding="utf-8", errors="replace") as file:
            return file.read()

    def _choose_value(self, name: str, value: int) -> int:
        """Return an option that counts. Add it if the user did not give it; if it was added here, change it.
        Raises BadInput."""
        if name in self._chosen:
            self.options.remove(f"{name}={self._chosen[name]}")
        given = get_option(self.options, name)
        if given is None:
            self._chosen[name] = value
            self.options.append(f"{name}={value}")
        elif not given.isdecimal():
            raise BadInput(f"{name} {given}: `prove` needs a number of steps")
        return value if given is None else int(given)

    def _fit(self, steps: int) -> bool:
        """Choose the options again after a reference of `steps` steps: a small data set has fewer in an epoch
        than --epoch_steps. Return whether one has changed. Raises BadInput."""
        before = dict(self._chosen)
        if "--epochs" in before:
            self._choose_value("--epochs", -(-self.steps * before["--epochs"] // steps))
        else:
            self.steps = steps
        if "--save_every" in before:
            self._every = self._choose_value("--save_every", max(1, self.steps // 6))
        return self._chosen != before

    def plan(self) -> list[Case]:
        cases = [AGAIN, Case(KILLED, kills=self.kills, changes=(surroundings.THREADS,))]
        for case in _CHANGES:
            is_engine = case.option == "--data_backend"
            generated = is_engine and get_option(self.options, "--custom_data") == "true"
            if self.same_bits and case.option == PROCESSES:
                own = self.processes = self._choose_value(case.option, 1)
                others = [str(number) for number in self.same_bits if number != own]
                cases += [Case(f"{each} processes", True, False, case.option, each, each) for each in others]
            elif case.option in self._known and not generated:
                cases.append(case)
            else:
                why = "has generated data" if generated else f"has no {case.option}"
                self.unchecked.append(f"{case.name}: {os.path.basename(self.script)} {why}")
        if PROCESSES in self._known and get_option(self.options, PROCESSES) in (None, "1"):
            whole = "2 processes" if self.same_bits else _OTHER_PROCESSES.name
            if any(case.name == whole for case in cases):
                killed = Case("2 processes, killed and restarted", True, False, PROCESSES, "2", "2")
                cases.append(killed._replace(kills=1, against=whole))
        elif PROCESSES not in self._known:
            script = os.path.basename(self.script)
            self.unchecked.append(f"a restart with 2 processes: {script} has no {PROCESSES}")
        count = max(self.same_bits, default=1)
        if "--elastic" in self._known and count > 1:
            if reason := forking.why_not():
                self.unchecked.append(f"{REPLACED}: {reason}")
            else:
                numbers = (str(count), str(count))
                cases.append(Case(REPLACED, True, False, PROCESSES, *numbers, losses=_LOSSES[count]))
        return [*cases, DAMAGED]

    def run(self, case: Case) -> str:
        folder, option = self.folder(case.name), tuple[str, ...]()
        if not os.path.isdir(self.folder(case.against)) and case.against != REFERENCE:
            raise NotRun(f"there is no run: {case.against}")
        done = self._damage(folder, case) if case.damages else ""
        if case.option:
            option = (f"{case.option}={self._choose(case)}", *["--elastic=true"] * bool(case.losses))
        command = self.command((*option, f"--output_dir={folder}"))
        self._record(case, command)
        if case.losses:
            return self._replace_processes(case, command)
        kills = trial.choose_steps(case.kills, self._every + 1, self.steps - 1, self._every)
        last = 0  # the step of the newest checkpoint when the last start began

        def watch() -> int:
            """Return the steps so far, or 0 if this start has no checkpoint yet: it is not killed then."""
            return self._progress(folder) if self._find_newest(folder) > last else 0

        def after_kill() -> list[str]:
            nonlocal last
            last = self._find_newest(folder)
            if case.name == KILLED and last < self.steps and not os.path.exists(self._snapshot):
                shutil.copytree(folder, self._snapshot)
            return command

        try:
            with self._working_folder(case) as place:
                start = self._start(case, place)
                killed = trial.run(command, self._log(case.name), watch, kills, after_kill, start)
        except trial.Failed as error:
            if not case.option or case.kills or error.code != _BAD_INPUT:
                raise
            shutil.rmtree(folder, ignore_errors=True)
            self.unchecked.append(f"{case.name}: {error}")
            raise NotRun(str(error)) from error
        trained = self._progress(folder)
        if case.name == REFERENCE and 0 < trained < self.steps and self._fit(trained):
            shutil.rmtree(folder)
            return self.run(case)
        if not case.kills:
            return done or "".join(option)
        resumed = [start["step"] for start in starts.read(folder)[1:]]
        if not killed:
            self.doubts.append(f"{case.name}: no SIGKILL came before the end: give more --max_steps")
        elif not any(0 < step < self.steps for step in resumed):
            self.doubts.append(f"{case.name}: no restart had to train on: give more --max_steps")
        steps, resumed_at = (", ".join(f"{step:.0f}" for step in each) for each in (killed, resumed))
        return f"SIGKILL after step {steps}; continued from step {resumed_at}" if killed else "no SIGKILL"

    def _replace_processes(self, case: Case, command: list[str]) -> str:
        """Run a case with losses, and return what was done. If a SIGKILL comes too late, the run is made
        again, once and with other steps. Raises trial.Failed, NotRun."""
        folder, log = self.folder(case.name), self._log(case.name)
        gap = max(1, self.steps // (len(case.losses) + 1))  # a part of the run follows the last one
        for seed in (0, 1):
            shutil.rmtree(folder, ignore_errors=True)
            steps = trial.choose_steps(len(case.losses), 1, self.steps - gap, gap, seed)
            losses = Losses(log, lambda: self._progress(folder), [*zip(steps, case.losses, strict=False)])
            try:
                trial.run(command, log, losses.watch, [], lambda: command, self._start(case, None))
            except trial.Failed as error:
                if losses.killed or error.code != _BAD_INPUT:
                    raise losses.explain(error) from error
                self.unchecked.append(f"{case.name}: {error}")
                raise NotRun(str(error)) from error
            if losses.is_done and losses.killed:
                return losses.describe()
        self.doubts.append(f"{case.name}: a SIGKILL came too late: give more --max_steps")
        return losses.describe()

    def refused(self, case: Case) -> bool:
        return bool(starts.read(self.folder(case.name))[-1]["step"] != self._damaged)

    def _choose(self, case: Case) -> str:
        """Return the value of a case's option that the reference does not have."""
        used, start = get_option(self.options, case.option), starts.read(self.folder(REFERENCE))[-1]
        if case.option == "--data_backend":  # auto or the default: the reference has chosen one
            used = start.get("data backend")
        if case.option == PROCESSES:  # the default: one for each GPU
            used = str(start["environment"].get("processes per node", used))
        return case.other if used == case.value else case.value

    def _progress(self, folder: str) -> int:
        try:
            return os.path.getsize(os.path.join(folder, records.FILE)) // RECORD.itemsize
        except OSError:
            return 0

    def _find_newest(self, folder: str) -> int:
        """Return the step of the newest checkpoint in a run's folder, 0 without one."""
        return next(map(files.step_of, files.list_newest_first(os.path.join(folder, "checkpoints"))), 0)

    def _damage(self, folder: str, case: Case) -> str:
        """Prepare a folder whose newest checkpoint is damaged. Return what was done. Raises NotRun."""
        source = self._snapshot if os.path.isdir(self._snapshot) else self.folder(KILLED)
        if os.path.isdir(source):
            shutil.copytree(source, folder)
        for path in files.list_newest_first(os.path.join(folder, "checkpoints")):
            try:
                state = files.read(path)
            except files.Refused:  # its write was interrupted
                continue
            facts = files.facts_of(path)
            if files.step_of(path) >= self.steps:  # a restart would have nothing to train
                files.discard(path)
            elif name := _change(state["objects"], case):
                files.write(path, state, **facts)
                self._damaged = files.step_of(path)
                return _describe(case, name, [path])
        shutil.rmtree(folder, ignore_errors=True)
        raise self._not_run("no checkpoint could be damaged")


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
    ):
        super().__init__(script, options, root, kills)
        folder = re.split(r"[*?\[]", compare)[0]
        self._output = os.path.dirname(folder) if folder != compare else os.path.dirname(compare)
        if not self._output:
            raise BadInput(f'--compare {compare}: expected files in a folder of the run, as "OUT/*.pt"')
        if os.path.lexists(self._output):
            raise BadInput(f"{self._output} exists: move it away, because each run writes its own")
        self.weights = os.path.relpath(compare, self._output)
        self._resume_with = shlex.split(resume_with)
        self._writes = 0  # of files, in the reference
        self._is_read = False  # whether a restart has read a damaged file
        self.unchecked += [f"{what}: not known" for what in _NOT_KNOWN]

    def plan(self) -> list[Case]:
        return [AGAIN, Case(KILLED, kills=self.kills, changes=(surroundings.THREADS,)), DAMAGED]

    def run(self, case: Case) -> str:
        with self._working_folder(case) as place:
            return self._run(case, place)

    def _run(self, case: Case, place: str | None) -> str:
        command, kills, left = self.command(), [], []  # left: the files at each kill, and at the end
        if case.kills:
            first, last = (int(self._writes * part) for part in (0.2, 0.8))
            kills = trial.choose_steps(case.kills, max(1, first), max(1, last))
        writes = set[tuple[int, int]]()

        def watch() -> float:
            """Return the number of files of tensors that were written: a kill waits for the first one."""
            writes.update((file, time) for _, file, time in self._versions())
            return len(writes)

        def after_kill() -> list[str]:
            if not any(map(self._load, self._files())):
                return self.command()
            left.append(self._versions())
            if not os.path.exists(self._snapshot):
                shutil.copytree(self._output, self._snapshot)
            return self._restart()

        try:
            done, damaged = "", self._damage(case) if case.damages else []
            if damaged:
                command, done = self._restart(), _describe(case, "the largest tensor", damaged)
            self._record(case, command, *[self._restart()] * bool(case.kills))
            before = self._versions()
            with _watch_reads(damaged) as read:  # watch() reads the files, too
                progress = (lambda: 0.0) if damaged else watch
                start = self._start(case, place)
                killed = trial.run(command, self._log(case.name), progress, kills, after_kill, start)
            self._is_read = bool(read)
            left.append(self._versions())
            for path in {path for path, *_ in before & left[-1]} & {*damaged}:  # no result of this run
                shutil.copy2(os.path.join(self._snapshot, os.path.relpath(path, self._output)), path)
        finally:
            if os.path.exists(output := os.path.join(place or "", self._output)):
                shutil.move(output, self.folder(case.name))
        if case.name == REFERENCE:
            self._writes = len(writes)
            if not find_files(self.folder(REFERENCE), self.weights):
                raise BadInput(f"{self.script} wrote no file {os.path.join(self._output, self.weights)}")
            if not find_receipt(self.folder(REFERENCE)):
                self.unchecked.append("the samples: no receipt (python -m launch new --receipt FOLDER)")
        if not case.kills:
            return done
        if not any(map(_has_trained, left, left[1:])):
            self.doubts.append(
                "no restart had to train on from a file: let it train longer, and save more often"
            )
        times = ", ".join(f"{kill:.0f}" for kill in killed)
        return f"SIGKILL after file {times} of about {self._writes}" if killed else "no SIGKILL"

    def refused(self, case: Case) -> bool:
        return case.damages == "all" and self._is_read  # one tensor may have no effect

    def _restart(self) -> list[str]:
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

    def _load(self, path: str) -> dict[str, Any]:
        try:
            return files.load(path)
        except files.Refused:
            return {}

    def _damage(self, case: Case) -> list[str]:
        """Prepare an output folder whose files are damaged. Return the damaged ones. Raises NotRun."""
        if os.path.isdir(self._snapshot):
            shutil.copytree(self._snapshot, self._output)
        paths = []
        for path in self._files():
            if _change(state := self._load(path), case):
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


def _change(state: dict[str, Any], case: Case) -> str:
    """Change the tensors of floating-point numbers in a state by 1.6 %, as a restart must notice: those that
    the case damages. Return the name of the largest, or ""."""
    numbers = [
        (each.numel(), name, each)
        for name, each in digest.leaves(state)
        if hasattr(each, "is_floating_point") and each.is_floating_point() and each.numel()
    ]
    if not numbers:
        return ""
    *others, (_, name, largest) = sorted(numbers, key=lambda each: each[:2])
    for each in [largest, *(each for *_, each in others if case.damages == "all")]:
        each.mul_(1 + 2**-6)
    return name


def _describe(case: Case, largest: str, paths: list[str]) -> str:
    """Return what was done to checkpoints, in words. largest: the name of their largest tensor."""
    what = largest if case.damages == "largest" else "each tensor"
    return f"{what} of {', '.join(map(os.path.basename, paths))} is changed by 1.6 %"


def _has_trained(before: set[Version], after: set[Version]) -> bool:
    """Return whether a start wrote a file again, or two new ones: the last file alone proves no training."""
    old, new = ({path for path, *_ in versions} for versions in (before, after))
    changed = {path for path, *_ in after - before} & old
    return bool(changed) or len(new - old) > 1

"""The runs of a job that `prove` makes: jobs of Bootfile, and other scripts."""

import contextlib
import os
import re
import shlex
import shutil
import sys
import time
from typing import NamedTuple

import torch

from common.exact import files
from common.ground.exits import BadInput
from common.run import starts
from datasets.sampling import loop_receipt, receipt
from launch.prove import evidence, trial
from launch.simulate.commands import get_option

_STEPS = 24  # of a run, if the options name no number
_HELP_SECONDS = 60  # for --help: a script that does not know it may begin to train
_HINT = "if it does not use Bootfile, name its files with --compare and --resume_with"
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
REFERENCE, KILLED, DAMAGED = "reference", "killed and restarted", "restarted from a damaged checkpoint"
AGAIN = "the same again"


class Case(NamedTuple):
    """A run that is compared with the reference.

    checks_state: whether states and weights must be equal too.
    must_differ: whether a difference is right.
    option: of the job, for a job of Bootfile.
    value, other: those of the option; the second one is used if the reference has the first one.
    """

    name: str
    checks_state: bool = True
    must_differ: bool = False
    option: str = ""
    value: str = ""
    other: str = ""


_CHANGES = (
    Case("another number of processes", False, False, "--processes_per_node", "2", "1"),
    Case("another number of workers", True, False, "--workers", "1", "2"),
    Case("another engine", False, False, "--data_backend", "threads", "pytorch"),
    Case("another seed", True, True, "--seed", "1", "2"),
)


class Job:
    """A job with its options, and the folders of its runs.

    script: its path. options: of the user. root: a folder for the runs. kills: SIGKILLs of the case KILLED.
    `unchecked`: lines on what could not be checked. `doubts`: lines on why the runs prove nothing.
    `same_bits`: numbers of processes whose runs must have equal states; [] for a job without shards.
    """

    weights: str  # pattern of the files of weights in a run's folder

    def __init__(self, script: str, options: list[str], root: str, kills: int):
        self.script, self.options, self.root, self.kills = script, options, root, kills
        self.unchecked: list[str] = []
        self.doubts: list[str] = []
        self.same_bits: list[int] = []

    def folder(self, name: str) -> str:
        return os.path.join(self.root, name.replace(" ", "-"))

    def plan(self) -> list[Case]:
        """Return the cases after the reference."""
        raise NotImplementedError

    def run(self, case: Case) -> str:
        """Run a case, and return what was done. Raises trial.Failed, BadInput."""
        raise NotImplementedError

    def command(self, options: tuple[str, ...] = ()) -> list[str]:
        return [sys.executable, self.script, *self.options, *options]

    def _log(self, name: str) -> str:
        return f"{self.folder(name)}.log"

    def _doubt(self, reason: str) -> str:
        self.doubts.append(reason)
        return reason

    @property
    def _snapshot(self) -> str:
        return os.path.join(self.root, "at-the-first-kill")


class OwnJob(Job):
    """A job with Bootfile's options. It continues if it is started again with the same --output_dir."""

    weights = "*.pth"

    def __init__(self, *args):
        super().__init__(*args)
        for name in ("--output_dir", "--train_url", "--resume"):
            if get_option(self.options, name) is not None:
                raise BadInput(f"{name} is chosen for each run: leave it out")
        shown = self._read_help()
        self._known = set(_OPTION.findall(shown))
        if not {"--output_dir", "--save_every", "--report_every", "--max_steps"} <= self._known:
            raise BadInput(f"{self.script} does not have Bootfile's options: {_HINT}")
        self.steps = self._add("--max_steps", _STEPS)
        self._every = self._add("--save_every", max(1, self.steps // 6))
        self._add("--report_every", 1)
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

    def _add(self, name: str, steps: int) -> int:
        """Return an option that counts steps; add it if the user did not give it. Raises BadInput."""
        given = get_option(self.options, name)
        if given is None:
            self.options.append(f"{name}={steps}")
        elif not given.isdecimal():
            raise BadInput(f"{name} {given}: `prove` needs a number of steps")
        return steps if given is None else int(given)

    def plan(self) -> list[Case]:
        cases = [Case(AGAIN), Case(KILLED)]
        for case in _CHANGES:
            is_engine = case.option == "--data_backend"
            generated = is_engine and get_option(self.options, "--custom_data") == "true"
            if self.same_bits and case.option == "--processes_per_node":
                own = self._add(case.option, 1)
                others = [str(number) for number in self.same_bits if number != own]
                cases += [Case(f"{each} processes", True, False, case.option, each, each) for each in others]
            elif case.option in self._known and not generated:
                cases.append(case)
            else:
                why = "has generated data" if generated else f"has no {case.option}"
                self.unchecked.append(f"{case.name}: {os.path.basename(self.script)} {why}")
        return [*cases, Case(DAMAGED, must_differ=True)]

    def run(self, case: Case) -> str:
        folder, option = self.folder(case.name), tuple[str, ...]()
        if case.name == DAMAGED and not self._damage(folder):
            return self._doubt("no checkpoint could be damaged")
        if case.option:
            used = get_option(self.options, case.option)
            if case.option == "--data_backend":  # auto or the default: the reference has chosen one
                used = starts.read(self.folder(REFERENCE))[-1].get("data backend")
            option = (f"{case.option}={case.other if used == case.value else case.value}",)
        command = self.command((*option, f"--output_dir={folder}"))
        kills: list[float] = []
        if case.name == KILLED:
            kills = trial.choose_steps(self.kills, self._every + 1, self.steps - 1)

        def after_kill() -> list[str]:
            if not os.path.exists(self._snapshot):
                shutil.copytree(folder, self._snapshot)
            return command

        killed = trial.run(command, self._log(case.name), lambda: self._progress(folder), kills, after_kill)
        if case.name != KILLED:
            return "".join(option)
        if not killed:
            return self._doubt("no SIGKILL came before the end: give more --max_steps")
        resumed = [start["step"] for start in starts.read(folder)[1:]]
        if not any(resumed):
            self._doubt("no restart continued from a checkpoint: give more --max_steps")
        steps, resumed_at = (", ".join(f"{step:.0f}" for step in each) for each in (killed, resumed))
        return f"SIGKILL after step {steps}; continued from step {resumed_at}"

    def _progress(self, folder: str) -> int:
        try:
            return os.path.getsize(os.path.join(folder, receipt.FILE)) // loop_receipt.RECORD.itemsize
        except OSError:
            return 0

    def _damage(self, folder: str) -> bool:
        """Prepare a folder whose newest checkpoint is damaged. Return whether there is one."""
        if not os.path.isdir(self._snapshot):
            return False
        shutil.copytree(self._snapshot, folder)
        for path in files.list_newest_first(os.path.join(folder, "checkpoints")):
            try:
                state = files.read(path)
            except files.Refused:  # its write was interrupted
                continue
            facts = files.facts_of(path)
            del facts["sha256"], facts["size"]
            if name := evidence.damage(state["objects"]):
                files.write(path, state, **facts)
                print(f"      {name} of {os.path.basename(path)} is changed by 1.6 %")
                return True
        return False


class OtherJob(Job):
    """A script that writes files of weights, and continues with other options."""

    def __init__(self, *args, compare: str, resume_with: str):
        super().__init__(*args)
        folder = re.split(r"[*?\[]", compare)[0]
        self._output = os.path.dirname(folder) if folder != compare else os.path.dirname(compare)
        if not self._output:
            raise BadInput(f'--compare {compare}: expected files in a folder of the run, as "OUT/*.pt"')
        if os.path.lexists(self._output):
            raise BadInput(f"{self._output} exists: move it away, because each run writes to it anew")
        self.weights = os.path.relpath(compare, self._output)
        self._resume_with = shlex.split(resume_with)
        self._writes = 0  # of files, in the reference
        self.unchecked += ["another number of processes: not known", "another number of workers: not known"]

    def plan(self) -> list[Case]:
        return [Case(AGAIN), Case(KILLED), Case(DAMAGED, must_differ=True)]

    def run(self, case: Case) -> str:
        command, kills, left = self.command(), [], []  # left: the files at each kill, and at the end
        if case.name == DAMAGED:
            if not self._damage():
                return self._doubt("no file with weights could be damaged")
            command = self._restart()
        if case.name == KILLED:
            first, last = (int(self._writes * part) for part in (0.2, 0.8))
            kills = trial.choose_steps(self.kills, max(1, first), max(1, last))
        writes = set[tuple]()

        def watch() -> float:
            writes.update(self._versions())
            return len(writes)

        def after_kill() -> list[str]:
            if not any(self._load(path) for path in self._files()):
                return self.command()
            left.append(self._versions())
            if not os.path.exists(self._snapshot):
                shutil.copytree(self._output, self._snapshot)
            return self._restart()

        try:
            killed = trial.run(command, self._log(case.name), watch, kills, after_kill)
            left.append(self._versions())
        finally:
            if os.path.exists(self._output):
                shutil.move(self._output, self.folder(case.name))
        if case.name == REFERENCE:
            self._writes = len(writes)
            if not evidence.find_files(self.folder(REFERENCE), self.weights):
                raise BadInput(f"{self.script} wrote no file {os.path.join(self._output, self.weights)}")
            if not os.path.exists(os.path.join(self.folder(REFERENCE), loop_receipt.FILE.format(0))):
                self.unchecked.append("the samples: no receipt (python -m launch new --receipt FOLDER)")
        if case.name != KILLED:
            return ""
        if not any(map(_has_trained, left, left[1:])):
            self._doubt("no restart had to train on from a file: let it train longer, and save more often")
        times = ", ".join(f"{kill:.0f}" for kill in killed)
        return f"SIGKILL after write {times} of about {self._writes}"

    def _restart(self) -> list[str]:
        return self.command(tuple(self._resume_with))

    def _files(self) -> list[str]:
        return [os.path.join(self._output, name) for name in evidence.find_files(self._output, "**/*")]

    def _versions(self) -> set[tuple]:
        """Return what changes with each write of a file."""
        versions = set()
        for path in self._files():
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(path)
                versions.add((path, status.st_ino, status.st_mtime_ns))
        return versions

    def _load(self, path: str) -> dict:
        try:
            return files.load(path)
        except files.Refused:
            return {}

    def _damage(self) -> bool:
        """Prepare an output folder whose files are damaged. Return whether one of them was."""
        if not os.path.isdir(self._snapshot):
            return False
        shutil.copytree(self._snapshot, self._output)
        names = []
        for path in self._files():
            if evidence.damage(state := self._load(path)):
                torch.save(state, path)
                names.append(os.path.basename(path))
        if names:
            print(f"      the largest tensor of {', '.join(names)} is changed by 1.6 %")
        return bool(names)


def _has_trained(before: set[tuple], after: set[tuple]) -> bool:
    """Return whether a start wrote a file again, or two new ones: the last file alone proves no training."""
    old, new = ({path for path, *_ in versions} for versions in (before, after))
    changed = {path for path, *_ in after - before} & old
    return bool(changed) or len(new - old) > 1

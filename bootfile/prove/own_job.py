"""The runs of a job with the options of Bootfile."""

import math
import os
import re
import shutil
import sys
import time

from bootfile.console.words import get_option
from bootfile.exact import files
from bootfile.ground.errors import BadInput
from bootfile.processes import forking
from bootfile.prove import surroundings, trial
from bootfile.prove.cases import (
    AGAIN,
    CHANGES,
    DAMAGED,
    KILLED,
    OTHER_PROCESSES,
    PROCESSES,
    REFERENCE,
    REPLACED,
    Case,
    NotRun,
)
from bootfile.prove.damage import change, describe
from bootfile.prove.job import Job
from bootfile.prove.losses import Losses
from bootfile.receipt import records
from bootfile.receipt.records import RECORD
from bootfile.records import cut_states, read_starts

_BAD_INPUT = 2  # exit code of a job that refuses its options
_STEPS = 24  # steps of a run, if the options name no number
_EPOCHS = 4  # as well
_HELP_SECONDS = 60  # for --help: a script that does not know it may begin to train
_HINT = "if it does not use Bootfile, name its files with --compare and --resume_with"
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_LOSSES = {4: ((0,), (3,), (1, 2)), 2: ((0,), (1,))}  # processes -> ranks of each SIGKILL


class OwnJob(Job):
    """A job with Bootfile's options. It continues if it is started again with the same --output_dir."""

    weights = "*.pth"
    keeps_threads = True

    def __init__(self, script: str, options: list[str], root: str, kills: int):
        super().__init__(script, options, root, kills)
        for name in ("--output_dir", "--train_url", "--resume"):
            if get_option(self.options, name) is not None:
                raise BadInput(f"{name} is chosen for each run: leave it out")
        help_text = self._read_help()
        self._known = set(_OPTION.findall(help_text))
        if not {"--output_dir", "--save_every", "--report_every", "--max_steps"} <= self._known:
            raise BadInput(f"{self.script} does not have Bootfile's options: {_HINT}")
        self._chosen = dict[str, int]()  # options that are not the user's -> value
        self.steps = self._choose_length()
        self._every = self._choose_value("--save_every", max(1, self.steps // 6))
        self._choose_value("--report_every", 1)
        self.same_bits = self._find_same_bits(help_text)

    def _choose_length(self) -> int:
        """Choose the options of the length of a run, and return its steps. A run has several epochs if the
        job can have short ones."""
        steps = self._choose_value("--max_steps", _STEPS)
        if not {"--epochs", "--epoch_steps"} <= self._known:
            return steps
        # several short epochs: kills and saves then also meet their ends
        epochs = get_option(self.options, "--epochs") or ""
        length = math.ceil(steps / _EPOCHS)
        if epochs.isdecimal():
            length = steps // int(epochs)
        length = self._choose_value("--epoch_steps", max(1, length))
        return min(steps, length * self._choose_value("--epochs", math.ceil(steps / length)))

    def _find_same_bits(self, help_text: str) -> list[int]:
        """Return the numbers of processes that divide the shards of a job: their runs must have equal states.
        [] for a job without shards."""
        default = re.search(r"--exact_shards V\s[^(]*\(default:\s+(\d+)\)", help_text)
        shards = get_option(self.options, "--exact_shards")
        if not shards and default:
            shards = default[1]
        if not shards or not shards.isdecimal():
            return []
        return [number for number in (1, 2, 4) if int(shards) % number == 0]

    def _read_help(self) -> str:
        """Return what --help prints. Raises BadInput if it fails, or does not end."""
        begin = time.monotonic()

        def measure_seconds() -> float:
            return time.monotonic() - begin

        def refuse() -> list[str]:
            # trial.run() has killed it: a script that takes no notice of --help has begun to train
            raise BadInput(f"{self.script} --help did not end within {_HELP_SECONDS} s: {_HINT}")

        command = [sys.executable, self.script, "--help"]
        log = self._log("help")
        try:
            trial.run(command, log, measure_seconds, [_HELP_SECONDS], refuse)
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
            self._choose_value("--epochs", math.ceil(self.steps * before["--epochs"] / steps))
        else:
            self.steps = steps
        if "--save_every" in before:
            self._every = self._choose_value("--save_every", max(1, self.steps // 6))
        return self._chosen != before

    def plan(self) -> list[Case]:
        cases = [AGAIN, Case(KILLED, kills=self.kills, changes=(surroundings.THREADS,))]
        for case in CHANGES:
            if self.same_bits and case.option == PROCESSES:
                cases += self._plan_numbers_of_processes()
            elif self._can_have(case):
                cases.append(case)
        # these need the run with 2 processes before them, with which they are compared
        cases += self._plan_killed_processes(cases)
        cases += self._plan_replaced_processes()
        # the last: its checkpoint is one that the killed run has left
        return [*cases, DAMAGED]

    def _can_have(self, case: Case) -> bool:
        """Return whether the job has the option of a case, and it makes a difference. If not, a line is added
        to `unchecked`."""
        reason = ""
        if case.option == "--data_backend" and get_option(self.options, "--custom_data") == "true":
            reason = "has generated data"
        elif case.option not in self._known:
            reason = f"has no {case.option}"
        if reason:
            self.unchecked.append(f"{case.name}: {os.path.basename(self.script)} {reason}")
        return not reason

    def _plan_numbers_of_processes(self) -> list[Case]:
        """Return a case for each other number of processes that divides the shards of the job."""
        self.processes = self._choose_value(PROCESSES, 1)
        cases = []
        for number in self.same_bits:
            if number != self.processes:
                value = str(number)
                cases.append(Case(f"{value} processes", option=PROCESSES, value=value, other=value))
        return cases

    def _plan_killed_processes(self, cases: list[Case]) -> list[Case]:
        """Return the case of 2 processes that are killed together, if the reference has one process. cases:
        those before it; the run with 2 processes is the one with which it is compared."""
        if PROCESSES not in self._known:
            script = os.path.basename(self.script)
            self.unchecked.append(f"a restart with 2 processes: {script} has no {PROCESSES}")
            return []
        if get_option(self.options, PROCESSES) not in (None, "1"):
            return []
        undisturbed = "2 processes" if self.same_bits else OTHER_PROCESSES.name
        # with the run of 2 processes: another number of processes rounds sums differently
        if all(case.name != undisturbed for case in cases):
            return []
        return [
            Case(
                "2 processes, killed and restarted",
                option=PROCESSES,
                value="2",
                other="2",
                kills=1,
                against=undisturbed,
            )
        ]

    def _plan_replaced_processes(self) -> list[Case]:
        """Return the case of processes that are killed one by one, if the job can replace them."""
        count = max(self.same_bits, default=1)
        if "--elastic" not in self._known or count == 1:
            return []
        reason = forking.why_not()
        if reason:
            self.unchecked.append(f"{REPLACED}: {reason}")
            return []
        value = str(count)
        return [Case(REPLACED, option=PROCESSES, value=value, other=value, losses=_LOSSES[count])]

    def run(self, case: Case) -> str:
        folder = self.folder(case.name)
        # the run to compare with was refused, or could not be made
        if not os.path.isdir(self.folder(case.against)) and case.against != REFERENCE:
            raise NotRun(f"there is no run: {case.against}")
        done = self._damage(folder, case) if case.damages else ""
        options = []
        if case.option:
            options.append(f"{case.option}={self._choose(case)}")
        if case.losses:
            options.append("--elastic=true")
        command = self.command((*options, f"--output_dir={folder}"))
        self._record(case, command)
        if case.losses:
            return self._replace_processes(case, command)
        # a job refuses an option with BAD_INPUT: that case is not run, and the verdict does not depend on it
        try:
            killed = self._run_with_kills(case, command)
        except trial.Failed as error:
            if not case.option or case.kills or error.code != _BAD_INPUT:
                raise
            shutil.rmtree(folder, ignore_errors=True)
            self.unchecked.append(f"{case.name}: {error}")
            raise NotRun(str(error)) from error
        # a data set may have fewer steps in an epoch than the options of the reference expect
        trained = self._progress(folder)
        if case.name == REFERENCE and 0 < trained < self.steps and self._fit(trained):
            shutil.rmtree(folder)
            return self.run(case)
        if not case.kills:
            return done or "".join(options)
        return self._describe_kills(case, killed)

    def _run_with_kills(self, case: Case, command: list[str]) -> list[float]:
        """Run a case to its end, with its SIGKILLs, and return the steps so far at each.

        A job may end before a SIGKILL reaches it. Then the run is made again, with an earlier one. Raises
        trial.Failed.
        """
        # after the first save and before the last step: a restart has a state to load, and steps to train
        first = self._every + 1
        killed: list[float] = []
        for bound in trial.lower_bounds(first, max(first, self.steps - 1)):
            kills = trial.choose_steps(case.kills, first, bound, self._every)
            killed = self._run_once(case, command, kills)
            if not case.kills or self._has_trained_on(case):
                break
            if bound > first:  # the next try has a folder without results
                shutil.rmtree(self.folder(case.name))
                if case.name == KILLED:
                    shutil.rmtree(self._snapshot, ignore_errors=True)
        return killed

    def _has_trained_on(self, case: Case) -> bool:
        """Return whether a restart of a case had to train on: one from step 0 has lost the checkpoints, and
        one from the last step trains nothing."""
        return any(0 < start["step"] < self.steps for start in read_starts(self.folder(case.name))[1:])

    def _run_once(self, case: Case, command: list[str], kills: list[float]) -> list[float]:
        """Run a case once, and return the steps so far at each SIGKILL. A kill waits until this start has
        saved a checkpoint: otherwise the restart would repeat all of it. Raises trial.Failed."""
        folder = self.folder(case.name)
        resumed_from = 0  # the step of the newest checkpoint when the last start began

        def watch() -> int:
            """Return the steps so far, or 0 if this start has no checkpoint yet: it is not killed then."""
            return self._progress(folder) if self._find_newest(folder) > resumed_from else 0

        def after_kill() -> list[str]:
            nonlocal resumed_from
            resumed_from = self._find_newest(folder)
            is_first = not os.path.exists(self._snapshot)
            if case.name == KILLED and resumed_from < self.steps and is_first:
                shutil.copytree(folder, self._snapshot)  # the damaged checkpoints are made from it
            return command

        with self._working_folder(case) as place:
            start = self._start(case, place)
            return trial.run(command, self._log(case.name), watch, kills, after_kill, start)

    def _describe_kills(self, case: Case, killed: list[float]) -> str:
        """Return what was done in a case with SIGKILLs. It is a doubt if no restart had to train on."""
        resumed = [start["step"] for start in read_starts(self.folder(case.name))[1:]]
        if not killed:
            self.doubts.append(f"{case.name}: no SIGKILL came before the end: give more --max_steps")
            return "no SIGKILL"
        if not self._has_trained_on(case):
            self.doubts.append(f"{case.name}: no restart had to train on: give more --max_steps")
        killed_after = ", ".join(f"{step:.0f}" for step in killed)
        resumed_at = ", ".join(f"{step:.0f}" for step in resumed)
        return f"SIGKILL after step {killed_after}; continued from step {resumed_at}"

    def _replace_processes(self, case: Case, command: list[str]) -> str:
        """Run a case with losses, and return what was done. If a SIGKILL comes too late, the run is made
        again, once and with other steps. Raises trial.Failed, NotRun."""
        folder = self.folder(case.name)
        log = self._log(case.name)

        def find_progress() -> int:
            return self._progress(folder)

        def repeat_command() -> list[str]:
            # only trial.run() asks for it, after a kill of all processes: here the losses kill some of them
            return command

        gap = max(1, self.steps // (len(case.losses) + 1))  # a part of the run follows the last one
        for seed in (0, 1):
            shutil.rmtree(folder, ignore_errors=True)
            steps = trial.choose_steps(len(case.losses), 1, self.steps - gap, gap, seed)
            losses = Losses(log, find_progress, [*zip(steps, case.losses, strict=False)])
            try:
                trial.run(command, log, losses.watch, [], repeat_command, self._start(case, None))
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
        # the restart continued from another state than the damaged one
        last_start = read_starts(self.folder(case.name))[-1]
        return bool(last_start["step"] != self._damaged)

    def _choose(self, case: Case) -> str:
        """Return the value of a case's option that the reference does not have."""
        start = read_starts(self.folder(REFERENCE))[-1]
        used = get_option(self.options, case.option)
        if case.option == "--data_backend":  # auto or the default: the reference has chosen one
            used = start.get("data backend")
        if case.option == PROCESSES:  # the default: one for each GPU
            used = str(start["environment"].get("processes per node", used))
        return case.other if used == case.value else case.value

    def _progress(self, folder: str) -> int:
        """Return the steps so far of a run: each has a record in its receipt."""
        try:
            return os.path.getsize(os.path.join(folder, records.FILE)) // RECORD.itemsize
        except OSError:
            return 0

    def _find_newest(self, folder: str) -> int:
        """Return the step of the newest checkpoint in a run's folder, 0 without one."""
        paths = files.list_newest_first(os.path.join(folder, "checkpoints"))
        return next(map(files.step_of, paths), 0)

    def _damage(self, folder: str, case: Case) -> str:
        """Prepare a folder whose newest checkpoint is damaged. Return what was done. Raises NotRun."""
        # the folder at the first kill: at the end of the run the newest checkpoint leaves nothing to train
        source = self.folder(KILLED)
        if os.path.isdir(self._snapshot):
            source = self._snapshot
        if os.path.isdir(source):
            shutil.copytree(source, folder)
        for path in files.list_newest_first(os.path.join(folder, "checkpoints")):
            try:
                state = files.read(path)
            except files.Refused:  # its write was interrupted
                continue
            if files.step_of(path) >= self.steps:  # a restart would have nothing to train
                files.discard(path)
                continue
            facts = files.facts_of(path)
            facts.pop("sha256", None)  # a checkpoint before version 0.45 has one, of other bytes
            largest = change(state["objects"], case)
            if largest:
                files.write(path, state, **facts)
                self._damaged = files.step_of(path)
                # with its record the job would refuse it: that wrong weights are noticed is shown without
                cut_states(folder, self._damaged - 1)
                return describe(case, largest, [path])
        shutil.rmtree(folder, ignore_errors=True)
        raise self._not_run("no checkpoint could be damaged")

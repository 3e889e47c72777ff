"""A job with the options of Bootfile: a script whose arguments, steps and checkpoints are known.

The same command continues it. So its SIGKILLs come after certain steps, and more cases change one option.
"""

import contextlib
import math
import os
import re
import resource
import shutil
import signal
import time
from collections.abc import Callable
from typing import IO, Any

from bootfile.console.words import get_option
from bootfile.exact import checked_files, files
from bootfile.ground.errors import BadInput
from bootfile.processes import sessions
from bootfile.prove import cases, trial
from bootfile.prove.cases import PROCESSES, REFERENCE, Case, NotRun
from bootfile.prove.job import Job, change, describe_damage
from bootfile.receipt import records
from bootfile.receipt.reading import find_receipt
from bootfile.receipt.recorded_run import Run
from bootfile.records import cut_states, read_starts

_STEPS = 24  # steps of a run, if the options name no number
_EPOCHS = 4  # epochs of a run, if the options name no number
# For --help: a script that does not know it may begin to train. CPU seconds, as to import torch from a cold
# file system may take minutes; and seconds, for a script that waits.
_HELP_CPU = 60
_HELP_SECONDS = 600
_HINT = "if it does not use Bootfile, name its files with --compare and --resume_with"
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_LOSSES = {4: ((0,), (3,), (1, 2)), 2: ((0,), (1,))}  # processes -> ranks of each SIGKILL


class OwnJob(Job):
    """A job with Bootfile's options. It continues if it is started again with the same --output_dir."""

    keeps_threads = True
    _longer = "give more --max_steps"

    def __init__(self, script: str, options: list[str], root: str, kills: int):
        super().__init__(script, options, root, kills, os.path.join(root, "output", "*.pth"), "")
        for name in ("--output_dir", "--train_url", "--resume"):
            if get_option(options, name) is not None:
                raise BadInput(f"{name} is chosen for each run: leave it out")
        help_text = self._read_help()
        self._known = set(_OPTION.findall(help_text))
        if not {"--output_dir", "--save_every", "--report_every", "--max_steps"} <= self._known:
            raise BadInput(f"{script} does not have Bootfile's options: {_HINT}")
        self._chosen: dict[str, int] = {}  # option that the user has not given -> value
        self._resumed_from = 0  # the step of the newest checkpoint when the last start began
        self._damaged = 0  # the step of the damaged checkpoint
        self.steps = self._choose_length()
        self._every = self._settle_option("--save_every", max(1, self.steps // 6))
        self._settle_option("--report_every", 1)
        default = re.search(r"--exact_shards V\s[^(]*\(default:\s+(\d+)\)", help_text)
        shards = get_option(options, "--exact_shards") or (default[1] if default else "")
        if shards.isdecimal():  # runs on numbers of processes that divide it must have equal states
            self.same_bits = [number for number in (1, 2, 4) if int(shards) % number == 0]

    def _read_help(self) -> str:
        """Return what --help prints. Raises BadInput if it fails, or does not end."""

        def start(command: list[str], mark: str, output: IO[Any]) -> Any:
            task = sessions.start(command, mark, output)
            resource.prlimit(task.pid, resource.RLIMIT_CPU, (_HELP_CPU, _HELP_CPU))
            return task

        began = time.monotonic()
        command = [*super().command()[:2], "--help"]
        log = self._log("help")
        try:
            waited = trial.run(command, log, start, lambda: time.monotonic() - began, kills=[_HELP_SECONDS])
            is_too_long = bool(waited)
        except trial.Failed as error:
            is_too_long = error.code == -signal.SIGKILL
            if not is_too_long:
                raise BadInput(f"{error} ({_HINT})") from error
        if is_too_long:
            limits = f"{_HELP_CPU} CPU seconds, or {_HELP_SECONDS} s"
            raise BadInput(f"{self.script} --help did not end within {limits}: {_HINT}")
        with open(log, encoding="utf-8", errors="replace") as file:
            return file.read()

    def _choose_length(self) -> int:
        """Choose the options of the length of a run, and return its steps. A run has several short epochs if
        the job can have them: kills and saves then also meet their ends."""
        steps = self._settle_option("--max_steps", _STEPS)
        if not {"--epochs", "--epoch_steps"} <= self._known:
            return steps
        length = math.ceil(steps / _EPOCHS)
        if get_option(self.options, "--epochs") is not None:
            length = steps // self._settle_option("--epochs", _EPOCHS)
        length = self._settle_option("--epoch_steps", max(1, length))
        return min(steps, length * self._settle_option("--epochs", math.ceil(steps / length)))

    def _settle_option(self, name: str, value: int) -> int:
        """Settle an option of all runs, and return its number: the user's, or else this one, which is added
        to the command of each run. Raises BadInput."""
        text = get_option(self.options, name)
        if text is None:
            self._chosen[name] = value
            return value
        if not text.isdecimal() or not int(text):
            raise BadInput(f"{name} {text}: `prove` needs a whole number above 0")
        return int(text)

    def command(self, *more: str) -> list[str]:
        return super().command(*(f"{name}={value}" for name, value in self._chosen.items()), *more)

    def _command(self, case: Case, is_restart: bool) -> list[str]:
        options = [self._describe_options(case), "--elastic=true" if case.losses else ""]
        return self.command(*filter(None, options), f"--output_dir={self.output}")

    def _describe_options(self, case: Case) -> str:
        """Return the option of a case with the value that the reference does not have."""
        if not case.option:
            return ""
        start = read_starts(self.folder(REFERENCE))[-1]
        # for the value `auto` it is recorded what the reference has chosen
        used = start["settings"] | {
            "data_backend": start.get("data backend"),
            "processes_per_node": start["environment"].get("processes per node"),
        }
        is_used = str(used.get(case.option[2:])) == case.value
        return f"{case.option}={case.other if is_used else case.value}"

    def _accept_reference(self) -> None:
        """Choose the options again and repeat the reference if it was too short: a small data set has fewer
        steps in an epoch than --epoch_steps. Raises trial.Failed, BadInput."""
        before = dict(self._chosen)
        trained = _count_steps(self.folder(REFERENCE))
        if 0 < trained < self.steps and "--epochs" in before:
            self._chosen["--epochs"] = math.ceil(self.steps * before["--epochs"] / trained)
        elif trained:
            self.steps = min(self.steps, trained)
        self._every = self._settle_option("--save_every", max(1, self.steps // 6))
        if self._chosen != before:
            shutil.rmtree(self.folder(REFERENCE))
            self.run(Case(REFERENCE))

    def plan(self) -> list[Case]:
        """Return the cases. One comes after those that it needs: KILLED_ON_2 is compared with the run on 2
        processes, and DAMAGED begins with a checkpoint of the killed run."""
        killed = Case(cases.KILLED, kills=self.kills, changes=(cases.THREADS,))
        other_processes, killed_processes = self._plan_processes()
        changes = filter(self._can_have, cases.CHANGES)
        return [cases.AGAIN, killed, *other_processes, *changes, *killed_processes, cases.DAMAGED]

    def _can_have(self, case: Case) -> bool:
        """Return whether the option of a case has an effect on the job. If not, add a line to `unchecked`."""
        reason = "" if case.option in self._known else f"has no {case.option}"
        if case.option == "--data_backend" and get_option(self.options, "--custom_data") == "true":
            reason = "has generated data"
        if reason:
            self.unchecked.append(f"{case.name}: {os.path.basename(self.script)} {reason}")
        return not reason

    def _plan_processes(self) -> tuple[list[Case], list[Case]]:
        """Return (the cases with another number of processes, the cases in which several processes are
        killed)."""
        # compared with the run of 2 processes: another number of processes rounds sums differently
        killed = cases.KILLED_ON_2._replace(against=cases.OTHER_PROCESSES.name)
        if not all([self._can_have(cases.OTHER_PROCESSES), self._can_have(killed)]):
            return [], []
        others = [cases.OTHER_PROCESSES]
        if self.same_bits:
            self.processes = self._settle_option(PROCESSES, 1)
            numbers = [str(number) for number in self.same_bits if number != self.processes]
            others = [Case(f"{text} processes", option=PROCESSES, value=text, other=text) for text in numbers]
            killed = killed._replace(against="2 processes")
        is_of_one = get_option(self.options, PROCESSES) in (None, "1")
        several = [killed] if is_of_one and any(case.value == "2" for case in others) else []
        count = max(self.same_bits, default=1)
        if "--elastic" in self._known and count > 1:
            if reason := sessions.why_no_fork():
                self.unchecked.append(f"{cases.REPLACED}: {reason}")
            else:
                replaced = Case(cases.REPLACED, option=PROCESSES, losses=_LOSSES[count])
                several.append(replaced._replace(value=str(count), other=str(count)))
        return others, several

    def _plan_kills(self, case: Case) -> tuple[Callable[[], float], list[list[float]]]:
        # after the first save and before the last step: a restart has a state to load, and steps to train
        return self._progress, trial.choose_tries(case.kills, self._every + 1, self.steps - 1, self._every)

    def _progress(self) -> float:
        """Return the steps so far, or 0 if this start has no checkpoint yet: it is not killed then, because
        the restart would repeat all of it."""
        return _count_steps(self.output) if self._find_newest() > self._resumed_from else 0

    def _begin(self) -> None:
        self._resumed_from = self._find_newest()

    def _list_checkpoints(self) -> list[str]:
        """Return the paths of the checkpoints of the present run, the newest first."""
        return files.list_newest_first(os.path.join(self.output, "checkpoints"))

    def _find_newest(self) -> int:
        """Return the step of the newest checkpoint of the present run, 0 without one."""
        return max(map(files.step_of, self._list_checkpoints()), default=0)

    def _continue(self, case: Case) -> list[str]:
        if not self._snapshots():  # one is enough for the damaged checkpoint
            self._keep_snapshot(case)
        return self._command(case, is_restart=True)

    def _has_trained(self, case: Case, killed: list[float]) -> bool:
        # a restart from step 0 has lost the checkpoints, and one from the last step trains nothing
        resumed_at = [start["step"] for start in read_starts(self.output)[1:]]
        return not case.kills or any(0 < step < self.steps for step in resumed_at)

    def _describe_kills(self, case: Case, killed: list[float]) -> str:
        """Return the kills of a case in words. killed: the steps after which a SIGKILL came."""
        if not killed:
            return "no SIGKILL"
        # the first start did not continue
        resumed_at = ", ".join(f"{start['step']:.0f}" for start in read_starts(self.output)[1:])
        killed_after = ", ".join(f"{step:.0f}" for step in killed)
        return f"SIGKILL after step {killed_after}; continued from step {resumed_at}"

    def _run(self, case: Case, place: str | None) -> str:
        """Run a case. If it has losses and a SIGKILL comes too late, the run is made again, once."""
        if not case.losses:
            return super()._run(case, place)
        command = self._command(case, is_restart=False)
        self._record(case, command)
        log = self._log(case.name)
        gap = max(1, self.steps // (len(case.losses) + 1))  # a part of the run follows the last one
        for seed in (0, 1):
            shutil.rmtree(self.output, ignore_errors=True)
            steps = trial.choose_steps(len(case.losses), 1, self.steps - gap, gap, seed)
            plan = [*zip(steps, case.losses, strict=False)]
            losses = trial.Losses(log, lambda: _count_steps(self.output), plan)
            try:
                trial.run(command, log, self._start(case, place), losses.watch)
            except trial.Failed as error:
                raise losses.explain(error) from error
            if losses.is_done and losses.killed:
                break
        else:
            self.doubts.append(f"{case.name}: a SIGKILL came too late: {self._longer}")
        return losses.describe()

    def _damage(self, case: Case) -> tuple[str, list[str]]:
        for snapshot in self._snapshots():
            shutil.copytree(snapshot, self.output)
        for path in self._list_checkpoints():
            self._damaged = files.step_of(path)
            if self._damaged >= self.steps:  # a restart would have nothing to train
                files.discard(path)
                continue
            with contextlib.suppress(files.Refused):  # its write was interrupted
                state = checked_files.read(path)
                facts = checked_files.facts_of(path)
                largest = change(state["objects"], case)
                files.write(path, state, **facts)
                # without its digest: the job would refuse it, and not show that wrong weights are noticed
                cut_states(self.output, self._damaged - 1)
                return describe_damage(case, largest, [path]), []
        raise NotRun("no checkpoint could be damaged")

    def refused(self, case: Case) -> bool:
        # the restart continued from another state than the damaged one
        return bool(read_starts(self.folder(case.name))[-1]["step"] != self._damaged)

    def find_cause(self, case: Case) -> str:
        return ""  # a job of Bootfile names what differs

    def describe_coverage(self, killed: list[str]) -> tuple[str, list[str]]:
        """Return (what the reference covered, in words; lines on what was not checked), by the records of the
        runs. Raises BadInput if a record cannot be read."""
        folder = self.folder(REFERENCE)
        if find_receipt(folder) != records.FILE:
            return "", []
        run = Run(folder)
        per_epoch = whole = 0  # steps of an epoch, as the job cuts it, and not cut; 0: not known
        # the length of an epoch is not known of weighted samples, or of a loader of the user's own
        with contextlib.suppress(BadInput):
            sampler = run.sampler(run.first)
            per_epoch = len(sampler)
            sampler.epoch_steps = None
            whole = len(sampler)
        epochs = dict(zip(run.records["step"].tolist(), run.records["epoch"].tolist(), strict=True))
        last = epochs[run.last]
        ends = last if run.last == last * per_epoch else last - 1  # the epochs 1..ends are complete
        place = f"epochs 1-{last}" if last > 1 else "epoch 1"
        length = f", {per_epoch} steps each" if per_epoch else ""
        unchecked = []
        if whole > per_epoch:
            unchecked.append(f"the steps after {per_epoch} of an epoch of {whole}")
        if not ends:
            hint = f": give --max_steps {per_epoch} or more" if per_epoch else ""
            unchecked.append(f"the end of an epoch{hint}")
        resumed = [start["step"] for name in killed for start in read_starts(self.folder(name))[1:]]
        if all(epochs.get(step + 1, 0) <= 1 for step in resumed):
            unchecked.append("a restart in a later epoch than 1")
        return f"steps {run.first}-{run.last} of {place}{length}; ends of epochs: {ends or 'none'}", unchecked


def _count_steps(folder: str) -> int:
    """Return the steps so far of a run: each has a record in its receipt."""
    with contextlib.suppress(OSError):
        return os.path.getsize(os.path.join(folder, records.FILE)) // records.RECORD.itemsize
    return 0

"""A job whose runs `prove` compares: how a run is started, recorded and made again."""

import contextlib
import glob
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from typing import IO, Any

from bootfile.console.words import mask_words
from bootfile.ground.errors import BadInput
from bootfile.processes import sessions
from bootfile.prove import forks, surroundings, trial
from bootfile.prove.cases import AGAIN, KILLED, ONE_CHANGE, REFERENCE, SAME, Case, NotRun


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
        self.script = script
        self.options = options
        self.root = root
        self.kills = kills
        self.unchecked: list[str] = []
        self.doubts: list[str] = []
        self.same_bits: list[int] = []
        self.processes = 1
        self.commands: dict[str, list[str]] = {}
        self._forks = forks.Forks() if forks.are_possible() else None
        self.unchecked += surroundings.find_unchanged()

    def folder(self, name: str) -> str:
        """Return the folder of a run with this name."""
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

    def find_cause(self, case: Case) -> str:
        """Return why a run with SIGKILLs differs, in words; "" if that is not known. Raises BadInput."""
        return ""

    def find_notes(self) -> list[str]:
        """Return facts about the script that no run shows."""
        return []

    def command(self, options: tuple[str, ...] = ()) -> list[str]:
        """Return the command of a run, with these options besides those of the user."""
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
            # a script may fail in a fork only, for example if it asks for another start method
            self._run_reference_again()

    def repeat(self, case: Case) -> bool:
        """Delete a run that differs, and make the reference again, if there are forks: new processes make it
        and all later runs. Return False without forks: the difference counts. Raises trial.Failed, BadInput.
        """
        if not self._forks:
            return False
        self._run_reference_again()
        shutil.rmtree(self.folder(case.name), ignore_errors=True)
        if case.name == KILLED:  # the damaged checkpoints are then made from the new run
            for folder in self._snapshots():
                shutil.rmtree(folder, ignore_errors=True)
        return True

    def _run_reference_again(self) -> None:
        """Make the reference in new processes: close() has ended the forks."""
        self.close()
        shutil.rmtree(self.folder(REFERENCE), ignore_errors=True)
        self.run(Case(REFERENCE))

    def _start(self, case: Case, folder: str | None) -> Callable[[list[str], str, IO[Any]], Any]:
        """Return the function that starts a command of a run, for trial.run(). folder: in which it works.

        It forks if that is possible: a fork has imported torch already. The cases of other surroundings have
        new processes, and so have those whose processes are replaced.
        """
        needs_new_process = case in (AGAIN, SAME, *ONE_CHANGE) or bool(case.losses)
        starts = 0

        def start(command: list[str], mark: str, output: IO[Any]) -> Any:
            nonlocal starts
            starts += 1
            changes = case.changes
            if starts == 1 and case.kills:  # the first start has the threads of the reference
                changes = tuple(change for change in changes if change != surroundings.THREADS)
            # a fork has the hash seed and the imports of its server: cases that change them get a new process
            if self._forks and not needs_new_process:
                return self._forks.start(command, mark, output, changes)
            environment = surroundings.environment(changes)
            return sessions.start(command, mark, output, environment, folder)

        return start

    def _working_folder(self, case: Case) -> contextlib.AbstractContextManager[str | None]:
        return surroundings.working_folder(case.changes, f"{self.folder(case.name)}.surroundings")

    def _record(self, case: Case, *commands: list[str]) -> None:
        """Keep the commands of a run for the page of the proof, without credentials."""
        self.commands[case.name] = [shlex.join(mask_words(command[1:])[0]) for command in commands]

    def _log(self, name: str) -> str:
        return f"{self.folder(name)}.log"

    def _not_run(self, reason: str) -> NotRun:
        """Return the exception for a case that cannot be run, and doubt the verdict for this reason."""
        self.doubts.append(reason)
        return NotRun(reason)

    @property
    def _snapshot(self) -> str:
        """Return the folder with the files of the run KILLED, as they were at its first SIGKILL."""
        return os.path.join(self.root, "at-the-first-kill")

    def _snapshots(self) -> list[str]:
        """Return the folders with the files of the run KILLED at its SIGKILLs, in order. Later ones than the
        first are kept where there is room."""
        later = glob.glob(os.path.join(glob.escape(self.root), "at-kill-[0-9]*"))
        folders = sorted(later, key=_number_of)
        if os.path.isdir(self._snapshot):
            folders.insert(0, self._snapshot)
        return folders


def _number_of(folder: str) -> int:
    """Return the number at the end of the name of a folder."""
    return int(folder.rpartition("-")[2])

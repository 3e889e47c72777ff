"""A training on digits in the hands of a launcher, to compare with the same training without it.

All processes of a Launched have its folder in a variable: so they are found and ended, whatever groups,
sessions and daemons their launcher makes.
"""

import contextlib
import functools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from tests.conftest import LONGEST, QUICK, ROOT, environment, run, wait_until
from tests.real.test_slurm import results

_MARK = "REAL_TEST_FOLDER"
# the threads are named: accelerate sets OMP_NUM_THREADS, so that of the tests is not taken as a wish
OPTIONS = (
    *QUICK,
    "--batch_size=64",
    "--save_every=5",
    "--report_every=5",
    "--enable_gpu=false",
    "--threads=1",
)
STEPS = 12


def words(folder: Path, steps: int = STEPS) -> list[str]:
    """Return the options of the training whose results are in folder/"out"."""
    return [*OPTIONS, f"--max_steps={steps}", f"--output_dir={folder / 'out'}"]


@functools.cache
def plain(processes: int, steps: int = STEPS) -> tuple[str, dict[int, str]]:
    """Return the last receipt and the states of the training that starts its own processes."""
    with tempfile.TemporaryDirectory() as folder:
        own = f"--processes_per_node={processes}"
        run(ROOT / "jobs" / "train_ddp.py", *words(Path(folder), steps), own, fresh=True)
        return results(Path(folder) / "out")


class Launched:
    """A command in a process of its own. folder: gets its output, as log. Use it with `with`."""

    def __init__(self, folder: Path, *command: str | Path, cwd: Path = ROOT, **variables: str):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.log = folder, folder / "log"
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = environment(**{"PATH": path, _MARK: str(folder)} | variables)
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [*map(str, command)], cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        while left := self.processes():
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            self.process.poll()
            psutil.wait_procs(left, 1)

    def printed(self) -> str:
        return self.log.read_text(errors="replace")

    def processes(self, **variables: str) -> list[psutil.Process]:
        """Return the processes of this command that live and have these variables."""
        marked, found = {_MARK: str(self.folder)} | variables, []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if marked.items() <= process.environ().items():
                    found.append(process)
        return found

    def wait_for_step(self, step: int) -> None:
        wait_until(lambda: re.search(rf" step={step}/", self.printed()), self.process)

    def finish(self, *codes: int) -> str:
        """Wait for the end of all processes, check that the exit code is one of these (default: 0). Return
        what they printed."""
        found = self.process.wait(LONGEST)
        assert found in (codes or (0,)), f"exit code {found}\n{self.printed()}"
        wait_until(lambda: not self.processes(), timeout=30)
        return self.printed()


def launch(folder: Path, *command: str | Path, code: int = 0, **variables: str) -> str:
    """Run a command to its end, check the exit code, and return what it printed."""
    with Launched(folder, *command, **variables) as launched:
        return launched.finish(code)

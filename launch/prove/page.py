"""The table of a proof as a page: one file that loads nothing and runs no script."""

import os
import platform
import re
import shlex
import time
from typing import NamedTuple

import numpy
import torch

from common import __version__
from common.ground.exits import BadInput, import_optional
from common.ground.files import write_atomic
from common.platform.platforms import available_cores
from launch import confirm
from launch.prove.evidence import FAILED, NONE, Evidence
from launch.prove.jobs import Case, Job

jinja2 = import_optional("jinja2", "the page needs jinja2")

_MARK = "<!-- a page of launch prove -->"


class Row(NamedTuple):
    """One case. done: what was done to the run."""

    case: Case
    done: str
    evidence: Evidence

    @property
    def is_equal(self) -> bool:
        """Return whether the run equals the reference where it should."""
        return all(self.evidence.equal if self.case.checks_state else self.evidence.equal[:1])

    @property
    def is_right(self) -> bool:
        """Return whether the run is as it must be: equal, or different for a damaged one."""
        return self.is_equal != self.case.must_differ

    @property
    def result(self) -> str:
        """Return the word for the result."""
        if self.case.must_differ:
            return "not noticed" if self.is_equal else "noticed"
        return "equal" if self.is_equal else "differs"

    @property
    def difference(self) -> str:
        """Return the first line that shows a difference."""
        if self.evidence.data == FAILED:
            return self.done
        lines = zip(self.evidence[:3], self.evidence.equal, strict=True)
        return next((text for text, equal in lines if not equal), "")

    def lines(self) -> list[str]:
        """Return the lines for the console."""
        named = zip(("data", "state", "weights"), self.evidence[:3], strict=True)
        lines = [f"{name} {text}" for name, text in named if text not in (NONE, FAILED)]
        return [line for line in (self.done, *lines, self.result) if line]


def check(path: str, force: bool) -> None:
    """Raise BadInput if `path` is a file that is not such a page, unless `force` is set."""
    if os.path.isdir(path):
        raise BadInput(f"--to {path} is a folder: name a file")
    confirm.check_replaceable(path, re.compile(re.escape(_MARK)), force)


def write(path: str, job: Job, rows: list[Row], verdict: str) -> None:
    """Write the page. Raises BadInput."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    text = environment.get_template("prove/page.html").render(
        mark=_MARK,
        verdict=verdict,
        rows=rows,
        unchecked=job.unchecked,
        command=shlex.join(job.command()[1:]),
        made=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        facts=_facts(),
    )
    try:
        write_atomic(path, text.encode("utf-8", "replace"))
    except OSError as error:
        raise BadInput(f"cannot write --to {path}: {error.strerror}") from error


def _facts() -> dict[str, object]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    return {
        "Bootfile": __version__,
        "Python": platform.python_version(),
        "PyTorch": torch.__version__,
        "NumPy": numpy.__version__,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device": device,
        "cores": available_cores(),
    }

"""The table of a proof as a page: one file that loads nothing and runs no script."""

import shlex
import time
from typing import NamedTuple

from common.console.arguments import mask_words
from common.run import starts
from launch import confirm, page
from launch.prove.evidence import PARTS, Line
from launch.prove.jobs import REFERENCE, Case, Job

MARK = "<!-- a page of launch prove -->"


class Row(NamedTuple):
    """One case. done: what was done to the run. lines: [] if it was not run."""

    case: Case
    done: str
    lines: list[Line]

    @property
    def different(self) -> list[Line]:
        """Return the comparisons that differ, without those that need not be equal."""
        ignored = () if self.case.checks_state else ("state", "weights")
        return [line for line in self.lines if not line.equal and line.part not in ignored]

    @property
    def result(self) -> str:
        """Return the word for the result."""
        words = ("noticed", "not noticed") if self.case.must_differ else ("differs", "equal")
        return words[not self.different] if self.lines else "nothing to compare"

    def text(self, part: str) -> str:
        """Return the comparison of a part, "" if there is none."""
        return "".join(line.text for line in self.lines if line.part == part)


def write(path: str, job: Job, rows: list[Row], verdict: str) -> None:
    """Write the page, before the folders of the runs are deleted. Raises BadInput."""
    started = starts.read(job.folder(REFERENCE))
    facts = started[-1]["environment"] if started else starts.environment() | {"job": job.script}
    text = page.render(
        "prove/page.html",
        mark=MARK,
        verdict=verdict,
        rows=rows,
        parts=PARTS,
        unchecked=job.unchecked,
        command=shlex.join(mask_words(job.command()[1:])[0]),
        made=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        facts=facts,
    )
    with confirm.open_result(path) as file:
        file.write(text.encode("utf-8", "replace"))

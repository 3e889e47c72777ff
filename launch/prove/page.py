"""The table of a proof as a page: one file that loads nothing and runs no script."""

import shlex
import time

from common.console.arguments import mask_words
from common.run import environment, starts
from launch import confirm, page
from launch.compare import PARTS
from launch.prove.jobs import REFERENCE, Job
from launch.prove.verdict import Row

MARK = "a page of launch prove"


def write(path: str, job: Job, rows: list[Row], verdict: str, notes: list[str]) -> None:
    """Write the page, before the folders of the runs are deleted. Raises BadInput."""
    started = starts.read(job.folder(REFERENCE))
    facts = started[-1]["environment"] if started else environment.facts() | {"job": job.script}
    command = shlex.join(mask_words(job.command()[1:])[0])
    text = page.render(
        "prove/page.html",
        mark=MARK,
        title=f"{verdict.partition(':')[0]}: {command}",
        verdict=verdict,
        rows=[
            [row.case.name, row.result, row.done, *(row.text(part) or "none" for part in PARTS)]
            for row in rows
        ],
        parts=list(PARTS),
        notes=notes,
        command=command,
        made=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        facts=[[name, str(value)] for name, value in facts.items()],
    )
    with confirm.open_result(path) as file:
        file.write(text.encode("utf-8", "replace"))

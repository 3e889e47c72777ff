"""A proof as a page: one file that loads nothing and runs no script."""

from typing import Any

from launch import confirm, page
from launch.compare import PARTS

MARK = "a page of launch prove"


def write(path: str, facts: dict[str, Any]) -> None:
    """Write the page. facts: those of proof.describe(). Raises BadInput."""
    command = facts["runs"][0]["commands"][0]
    texts = {
        part: {line["run"]: line["text"] for line in facts["comparisons"] if line["part"] == part}
        for part in PARTS
    }
    text = page.render(
        "prove/page.html",
        mark=MARK,
        title=f"{facts['verdict'].partition(':')[0]}: {command}",
        command=command,
        texts=texts,
        facts=facts,
    )
    with confirm.open_result(path) as file:
        file.write(text.encode("utf-8", "replace"))

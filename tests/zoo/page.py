"""Write README.md of this folder, the list of the defects: python -m tests.zoo.page"""

from pathlib import Path

from tests.zoo.cases import CASES, STATES, Case, State

PAGE = Path(__file__).with_name("README.md")
_HEAD = """# Defects of released packages

`python -m tests.zoo.page` writes this page from [cases.py](cases.py). [What finds them](../../guides/zoo.md).
"""
_TABLE = "| release | what is wrong | thread | fix | found |\n|---|---|---|---|---|\n"


def write_row(case: Case | State) -> str:
    """Return the line of a defect."""
    repository, _, number = case.thread.partition("#")
    thread = f"[{case.thread}](https://github.com/{repository}/issues/{number})"
    found = "yes" if case.expected else "**no**"
    release = case.package.replace("==", " ")
    return f"| {release} | {case.text} | {thread}, {case.date} | {case.fix} | {found} |\n"


def write_page() -> str:
    """Return the page."""
    page = _HEAD
    for title, cases in (
        ("Samples, after a restart", [case for case in CASES if not case.one_run]),
        ("Samples, in each run", [case for case in CASES if case.one_run]),
        ("State", STATES),
    ):
        page += f"\n## {title}\n\n{_TABLE}"
        page += "".join(write_row(case) for case in cases if case.thread)
    return page


if __name__ == "__main__":
    PAGE.write_text(write_page(), encoding="utf-8")

"""The messages that guides/trouble.md gives to search for are those that the code prints.

In the tables whose first column is "you see", code in this column is a line of Bootfile. Figures, words in
capitals, nan and `...` stand for anything.
"""

import ast
import re

import pytest

from tests.conftest import ROOT

_VALUE = "\0"  # in a template: what an f-string puts in
_ANY = re.compile(r"\.\.\.|\bnan\b|\b[A-Z]?:?\d+|\b[A-Z]{2,}\b")


def read_templates() -> list[str]:
    """Return the strings of the packages, without docstrings."""
    templates = []
    for package in ("bootfile", "common", "datasets", "jobs", "launch"):
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            nodes = [*ast.walk(tree)]
            not_printed = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
            for node in nodes:
                parts = node.values if isinstance(node, ast.JoinedStr) else [node]
                texts = [getattr(part, "value", None) for part in parts if id(part) not in not_printed]
                if any(isinstance(text, str) for text in texts):
                    templates.append("".join(t if isinstance(t, str) else _VALUE for t in texts))
    return templates


def find_messages(page: str) -> list[str]:
    """Return the code in the first column of the tables that begin with "you see"."""
    messages = []
    for table in re.findall(r"^\| you see .*\n(?:\|.*\n)+", page, re.MULTILINE):
        for row in table.splitlines()[2:]:
            messages += re.findall(r"`([^`]+)`", re.split(r"(?<!\\)\|", row)[1])
    return messages


def find_template(message: str, templates: list[str]) -> str | None:
    """Return the string that the message is a part of."""
    pattern = ".*".join(re.escape(part) for part in _ANY.split(message))
    return next((text for text in templates if re.search(pattern, text, re.DOTALL)), None)


TEMPLATES = read_templates()
MESSAGES = find_messages((ROOT / "guides" / "trouble.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_page_is_printed(message):
    assert find_template(message, TEMPLATES)


def test_the_check_can_fail():
    assert len(MESSAGES) > 15
    assert find_template("cannot listen on port 29500", [f"cannot listen on port {_VALUE}"])
    assert not find_template("cannot listen on port 29500", [f"cannot listen at port {_VALUE}"])
    page = "| you see | do |\n|---|---|\n| `a b`, c | `d` |\n\n| code |\n|---|\n| `1` |\n"
    assert find_messages(page) == ["a b"]

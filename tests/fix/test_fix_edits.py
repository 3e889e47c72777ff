"""The edits of a file: each one changes its place, and leaves the rest byte for byte."""

import ast

import pytest

from bootfile.fix.edits import CannotEdit, Script

TEXT = '''"""A script."""
import torch

def save(model, path):  # no comma
    """Save."""
    state = {
        "model": model.state_dict(),
        "text": """a
b"""  # the last one
    }
    torch.save(state, path)  # written
    if path: print("é", path); print(1)

first = {"a": 1, "b": 2,}; second = dict(a=1)
if first: second = 2
'''


def edit(data, change):
    script = Script("script.py", data)
    change(script)
    new = script.render()
    compile(new, "script.py", "exec")
    return new


def node(script, text):
    """The statement, or else the expression, that has this text."""
    found = [one for one in ast.walk(script.tree) if hasattr(one, "lineno")]
    found = [one for one in found if script.source(one) == text]
    return next((one for one in found if isinstance(one, ast.stmt)), found[0])


def find(script, kind, number=0):
    return [one for one in ast.walk(script.tree) if isinstance(one, kind)][number]


def changed(change, text=TEXT):
    """The lines that an edit adds and removes, and the same with tabs and with CRLF."""
    new = edit(text.encode(), change).decode()
    tabs = text.replace("    ", "\t").encode()
    assert edit(tabs, change).decode().replace("\t", "    ") == new
    crlf = text.replace("\n", "\r\n").encode()
    assert edit(crlf, change) == new.replace("\n", "\r\n").encode()
    assert edit(b"\xef\xbb\xbf" + text.encode(), change) == b"\xef\xbb\xbf" + new.encode()
    old, lines = text.splitlines(), new.splitlines()
    return [line for line in old if line not in lines], [line for line in lines if line not in old]


def test_lines_before_and_after_a_statement():
    def change(script):
        statement = node(script, "torch.save(state, path)")
        script.insert_before(statement, ["if path:", "    print(2)"])
        script.insert_after(statement, ["print(3)"])
        script.insert_after(statement, ["print(4)"])

    assert changed(change) == ([], ["    if path:", "        print(2)", "    print(3)", "    print(4)"])


def test_statements_that_share_a_line():
    def change(script):
        script.insert_after(node(script, 'first = {"a": 1, "b": 2,}'), ["print(2)"])
        script.insert_before(find(script, ast.If), ["print(4)"])

    assert changed(change)[1] == ["print(2)", "print(4)"]
    for text in ("second = dict(a=1)", "print(1)", "second = 2"):
        with pytest.raises(CannotEdit):
            changed(lambda script, text=text: script.insert_before(node(script, text), ["print(2)"]))
    with pytest.raises(CannotEdit):
        changed(lambda script: script.insert_after(node(script, "second = 2"), ["print(2)"]))


def test_the_first_lines_of_a_block():
    def change(script):
        script.insert_first(find(script, ast.FunctionDef), ["print(2)"])

    assert edit(TEXT.encode(), change).decode().splitlines()[4:6] == ['    """Save."""', "    print(2)"]
    assert changed(change) == ([], ["    print(2)"])


def test_statements_below_a_test():
    def change(script):
        script.guard(find(script, ast.Assign, 2), node(script, "torch.save(state, path)"), "if path:")

    added = changed(change)[1]
    assert added[:3] == ["    if path:", "        state = {", '            "model": model.state_dict(),']
    assert added[3:6] == [
        '            "text": """a',
        "        }",
        "        torch.save(state, path)  # written",
    ]


def test_entries_arguments_and_parameters():
    def change(script):
        for name in ("one", "two"):
            script.add_entry(find(script, ast.Dict, 1), name, name)
            script.add_entry(find(script, ast.Dict), name, name)
        script.add_argument(node(script, "dict(a=1)"), "c=3")
        script.add_parameter(find(script, ast.FunctionDef), "one=None")
        script.add_parameter(find(script, ast.FunctionDef), "two=None")

    assert changed(change)[1] == [
        "def save(model, path, one=None, two=None):  # no comma", 'b""",  # the last one',
        '        "one": one,', '        "two": two,',
        'first = {"a": 1, "b": 2, "one": one, "two": two,}; second = dict(a=1, c=3)',
    ]  # fmt: skip


@pytest.mark.parametrize("end", ["b=2,  # last\n", "b=2  # last\n", "b=2,\n", "b=2\n"])
def test_an_argument_is_added_in_a_line_of_its_own(end):
    text = f"f(dict(\n    a=1,\n    {end}), x)\n"

    def change(script):
        calls = [one for one in ast.walk(script.tree) if isinstance(one, ast.Call) and one.lineno == 1]
        call = next(one for one in calls if one.keywords)
        script.add_argument(call, "c=3")

    new = edit(text.encode(), change).decode()
    assert new == text.replace("b=2,", "b=2").replace("b=2", "b=2,").replace("\n), x)", "\n    c=3,\n), x)")


def test_an_expression_is_replaced_and_wrapped():
    def change(script):
        script.replace(node(script, "model.state_dict()"), "None")
        script.wrap(node(script, '"é"'), "str(", ")")

    assert changed(change)[1] == ['        "model": None,', '    if path: print(str("é"), path); print(1)']


def test_an_import_is_added_once():
    def change(script):
        for name in ("os", "os", "torch", "warnings"):
            assert script.add_import(name) == name

    lines = edit(TEXT.encode(), change).decode().splitlines()
    assert lines[1:4] == ["import os", "import torch", "import warnings"]
    with pytest.raises(CannotEdit):
        changed(lambda script: script.add_import("first"))


@pytest.mark.parametrize(
    "text", ['"""Text."""\nx = 1', "from __future__ import annotations\nx = 1\n", "x = 1\n"]
)
def test_an_import_in_a_file_without_one(text):
    new = edit(text.encode(), lambda script: script.add_import("os")).decode()
    assert new.replace("import os\n", "", 1) == text


def test_two_edits_of_one_text():
    script = Script("script.py", TEXT.encode())
    for text in ("None", "1"):
        script.replace(node(script, "torch.save(state, path)").value, text)
    with pytest.raises(CannotEdit):
        script.render()


def test_a_file_in_another_encoding():
    data = "# -*- coding: latin-1 -*-\nx = 'é'; y = [x]\n".encode("latin-1")
    new = edit(data, lambda script: script.replace(find(script, ast.List), "1"))
    assert new == data.replace(b"[x]", b"1")

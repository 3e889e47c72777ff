"""`bootfile lint` as a user runs it: output, exit codes, comments, hostile files, time."""

import json
import os
import re
import subprocess
import sys
import time

import pytest

import bootfile

# the package that is tested, installed or not
SETTINGS = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(bootfile.__file__))}
BAD = """import os
import torch

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
start = 0
if os.path.exists("last.pt"):
    saved = torch.load("last.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["epoch"] + 1
for epoch in range(start, 10):
    for step in range(10):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
    scheduler.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, "new.pt")
    os.replace("new.pt", "last.pt")
"""
GOOD = BAD.replace('"epoch": epoch}', '"epoch": epoch, "scheduler": scheduler.state_dict()}').replace(
    "    start = saved", '    scheduler.load_state_dict(saved["scheduler"])\n    start = saved'
)


def call(folder, *words, code=0):
    command = [sys.executable, "-m", "bootfile", "lint", *words]
    result = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=SETTINGS)
    assert code in (None, result.returncode), (
        f"exit code {result.returncode}\n{result.stdout}\n{result.stderr}"
    )
    return result


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(BAD)
    (tmp_path / "good.py").write_text(GOOD)
    return tmp_path


def test_a_finding_names_line_consequence_fix_and_report(folder):
    shown = call(folder, "train.py", "--no_hints", code=1).stdout.splitlines()
    assert shown[0] == "train.py:17: R103 scheduler is stepped, but not in the checkpoint that line 19 saves"
    assert "the schedule of the learning rate begins again" in shown[1]
    assert shown[2].startswith("    fix: ") and shown[3].startswith("    report: https://")
    assert shown[4].startswith("    to see it happen: bootfile prove train.py ")
    assert shown[-1] == "1 finding and 0 hints in 1 file"


def test_a_correct_script_has_no_finding(folder):
    assert "0 findings" in call(folder, "good.py").stdout


def test_a_folder_is_read(folder):
    (folder / "inner").mkdir()
    (folder / "inner" / "old.py").write_text("print 'backward'\n")
    result = call(folder, ".", code=2)
    assert "train.py:17: R103" in result.stdout
    assert "to see it happen: bootfile prove train.py " in result.stdout
    [line] = result.stderr.splitlines()
    assert "old.py: not Python" in line


def test_json_and_annotations(folder):
    data = json.loads(call(folder, "train.py", "--json", "--no_hints", code=1).stdout)
    [finding] = data["findings"]
    assert (finding["rule"], finding["line"], finding["is_hint"]) == ("R103", 17, False)
    names = "path line rule message is_hint fix prove script consequence report"
    assert finding.keys() == set(names.split())
    [line] = call(folder, "train.py", "--format", "github", "--no_hints", code=1).stdout.splitlines()
    assert line.startswith("::error file=train.py,line=17,title=R103::scheduler is stepped")


def test_explain_shows_a_rule(folder):
    assert call(folder, "--explain", "R103").stdout.startswith("R103: the scheduler is stepped")
    [line] = call(folder, "--explain", "R000", code=2).stderr.splitlines()
    assert "unknown rule" in line
    [line] = call(folder, "--explain", "R403", code=2).stderr.splitlines()
    assert "R403: a rule of earlier releases" in line


@pytest.mark.parametrize(
    ("comment", "code"),
    [
        ("ignore R103", 0),
        ("ignore", 0),
        ("ignore R101, R103", 0),
        ("ignore R101", 1),
        ("ignore R403, R103", 0),
    ],
)
def test_a_comment_turns_a_rule_off(comment, code, folder):
    text = BAD.replace("    scheduler.step()", f"    scheduler.step()  # bootfile: {comment}")
    (folder / "train.py").write_text(text)
    call(folder, "train.py", code=code)


def test_a_state_that_an_imported_module_saves_is_followed(folder):
    body = BAD.partition("    state = {")
    (folder / "saving.py").write_text(
        "import os\nimport torch\n\n\ndef save(path, **parts):\n"
        "    torch.save({name: part.state_dict() for name, part in parts.items()}, path + '.new')\n"
        "    os.replace(path + '.new', path)\n"
    )
    called = "    save('last.pt', model=model, optimizer=optimizer{})\n"
    (folder / "train.py").write_text("from saving import save\n" + body[0] + called.format(""))
    assert "R103 scheduler" in call(folder, "train.py", code=1).stdout
    called = called.format(", scheduler=scheduler")
    (folder / "train.py").write_text("from saving import save\n" + body[0] + called)
    assert "R103" not in call(folder, "train.py", code=1).stdout, "only that it is not loaded"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"x = " + b"(" * 3000 + b")" * 3000, ""),
        (b"x = " + b"-" * 100_000 + b"1", ""),
        (b"x = 1" + b" + 1" * 100_000, ""),
        (b"x = 1\n" * 2_000_000, "larger than"),
        (b"x = '\xff\xfe'\n", ""),
        (b"x = 1\x00", ""),
        (b"def f(:\n", "line 1"),
        (b"type X[T] = list[T]; what ever new\n", "line 1"),
    ],
)
def test_a_hostile_file_ends_in_one_line(data, message, tmp_path):
    (tmp_path / "train.py").write_bytes(data)
    result = call(tmp_path, "train.py", code=None)
    if result.returncode == 2:
        [line] = result.stderr.splitlines()
        assert line.startswith("error: train.py: ") and message in line
    assert result.returncode in (0, 2) and "Traceback" not in result.stderr


def test_a_notebook_is_not_read(tmp_path):
    """Its JSON parses as a Python expression: it had no findings, whatever its cells do."""
    cells = [{"cell_type": "code", "metadata": {}, "outputs": [], "source": BAD.splitlines(True)}]
    text = json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    (tmp_path / "train.ipynb").write_text(text)
    [line] = call(tmp_path, "train.ipynb", code=2).stderr.splitlines()
    assert line.startswith("error: train.ipynb: ") and "jupyter nbconvert --to script train.ipynb" in line


def test_nothing_is_executed(tmp_path):
    (tmp_path / "train.py").write_text("import pathlib\npathlib.Path('made').touch()\nimport other\n")
    (tmp_path / "other.py").write_text("import pathlib\npathlib.Path('made').touch()\n")
    call(tmp_path, "train.py")
    assert not (tmp_path / "made").exists()


def test_a_missing_file_is_an_error(tmp_path):
    [line] = call(tmp_path, "missing.py", code=2).stderr.splitlines()
    assert "missing.py: no such file or folder" in line
    assert "expected FILE_OR_FOLDER" in call(tmp_path, code=2).stderr


def test_lint_imports_no_torch(tmp_path):
    (tmp_path / "train.py").write_text(BAD)
    code = (
        "import sys; from bootfile.lint.cli import main\n"
        "main(['train.py']); print('imported:', {'torch', 'numpy'} & set(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=SETTINGS).stdout
    assert shown.splitlines()[-1] == "imported: set()"


def test_a_thousand_lines_take_a_second_of_cpu(tmp_path):
    from bootfile.lint import engine

    functions = [
        re.sub("^", "    ", BAD.partition("start = 0")[2], flags=re.MULTILINE).join(
            (f"def train_{number}(model, optimizer, scheduler):\n    start = 0", "\n\n")
        )
        for number in range(70)
    ]
    (tmp_path / "train.py").write_text("import os\nimport torch\n\n" + "".join(functions))
    begin = time.process_time()
    engine.lint(str(tmp_path / "train.py"))
    # 10 times the usual time: other machines are slower
    assert time.process_time() - begin < 10

"""`bootfile fix` as a user calls it: the diff, the files, the exit codes and the JSON."""

import json
import shutil
import subprocess

import pytest

from bootfile.fix import cli
from bootfile.ground.errors import BadInput
from bootfile.lint import cli as lint_cli
from tests.conftest import ROOT, environment, run
from tests.lint.examples import BEST, write

BAD = {
    "setup": "scheduler = StepLR(optimizer, 3)\nbest = 9.0",
    "end": f"scheduler.step()\n{BEST}",
    "next": 'saved["epoch"]',
}  # fmt: skip


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(write(BAD))
    return path


def test_the_command_prints_a_diff(script):
    text = script.read_text()
    done = run("-m", "bootfile", "fix", script, cwd=script.parent, env=environment(PYTHONPATH=str(ROOT)))
    assert script.read_text() == text and not (script.parent / "train.py.orig").exists()
    assert "5 repaired, 0 left" in done.stdout and '+    start = saved["epoch"] + 1' in done.stdout
    if shutil.which("patch"):
        diff = done.stdout[: done.stdout.index("train.py:")]
        subprocess.run(["patch", "-p1"], input=diff, text=True, cwd=script.parent, check=True)
        assert cli.main([str(script)]) == 0 and script.read_text() != text


def test_only_some_rules_and_the_exit_codes(script, capsys):
    assert cli.main(["train.py", "--only", "R103,R301"]) == 0
    assert "best = saved" not in capsys.readouterr().out
    # what cannot be repaired has the lines of lint, and the reason
    later = "    print(scheduler.get_last_lr())\n    scheduler.step()\n"
    script.write_text(script.read_text().replace("    scheduler.step()", "    pass") + later)
    assert cli.main(["train.py"]) == cli.LEFT
    out = capsys.readouterr().out
    assert "not repaired: scheduler changes in line" in out and "fix: save scheduler.state_dict()" in out
    for arguments in (["none.py"], ["train.py", "--only", "R999"]):
        with pytest.raises(BadInput):
            cli.main(arguments)


def test_write_keeps_the_old_file(script, capsys):
    old = script.read_bytes()
    script.chmod(0o755)
    assert cli.main(["train.py", "--write"]) == 0
    assert (script.parent / "train.py.orig").read_bytes() == old != script.read_bytes()
    assert script.stat().st_mode & 0o777 == 0o755
    new = script.read_bytes()
    assert cli.main(["train.py", "--write"]) == 0
    assert script.read_bytes() == new, "nothing is left to repair"
    script.write_bytes(old)
    with pytest.raises(BadInput, match=r"train\.py\.orig"):
        cli.main(["train.py", "--write"])
    assert script.read_bytes() == old and (script.parent / "train.py.orig").read_bytes() == old


def test_write_changes_the_file_of_a_link_and_no_read_only_file(script):
    link = script.parent / "link.py"
    link.symlink_to("train.py")
    assert cli.main(["link.py", "--write"]) == 0
    assert link.is_symlink() and "os.replace" in script.read_text()
    script.write_text(write(BAD))
    script.chmod(0o444)
    with pytest.raises(BadInput, match="read-only"):
        cli.main(["train.py", "--write"])
    assert script.read_text() == write(BAD)


def test_json_has_the_edits_as_ranges(script, capsys):
    assert cli.main(["train.py", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    lines = script.read_text().splitlines(keepends=True)
    for edit in reversed(result["edits"]):
        assert edit["file"] == "train.py" and edit["start"]["column"] == edit["end"]["column"] == 0
        lines[edit["start"]["line"] - 1 : edit["end"]["line"] - 1] = [edit["text"]]
    assert cli.main(["train.py", "--write"]) == 0
    assert "".join(lines) == script.read_text()
    assert {row["rule"] for row in result["repaired"]} == {"R103", "R108", "R301", "R501", "R801"}
    assert result["left"] == []


def test_the_hook_for_pre_commit_runs_lint(script):
    yaml = pytest.importorskip("yaml")
    [hook] = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    command, *arguments = hook["entry"].split()
    assert (hook["id"], command, hook["types"]) == ("bootfile-lint", "bootfile", ["python"])
    environ = environment(PYTHONPATH=str(ROOT))
    done = run("-m", "bootfile", *arguments, "train.py", cwd=script.parent, env=environ, code=1)
    assert "R103" in done.stdout


def test_the_first_screen_of_the_readme_is_what_the_commands_print(monkeypatch, capsys):
    """README.md leaves out lines, and the ends of lines as "...": what it shows is printed, in its order."""
    monkeypatch.chdir(ROOT)
    path = "guides/first/train.py"
    for command, main in ((f"lint {path}", lint_cli.main), (f"fix {path} --only R103", cli.main)):
        shown = (ROOT / "README.md").read_text().partition(f"    $ bootfile {command}\n")[2]
        shown = shown.partition("    $ ")[0].splitlines()
        lines = [line.removeprefix("    ").removesuffix(" ...") for line in shown]
        main(command.split()[1:])
        printed = iter(capsys.readouterr().out.splitlines())
        assert lines and all(line in printed for line in lines), lines

"""The commit of a script: that of its working tree, or that from which its snapshot was made."""

import json
import subprocess

import pytest

from bootfile.ground import git


@pytest.fixture
def script(tmp_path):
    """Return jobs/train.py in a tree with one commit."""
    path = tmp_path / "tree" / "jobs" / "train.py"
    path.parent.mkdir(parents=True)
    path.write_text("print()\n")
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "a commit"]):
        command = ["git", "-C", tmp_path / "tree", "-c", "user.name=n", "-c", "user.email=e", *words]
        subprocess.run(command, check=True)
    return path


def test_the_commit_of_a_script_in_a_working_tree(script):
    command = ["git", "-C", script.parent, "rev-parse", "HEAD"]
    head = subprocess.check_output(command, text=True).strip()
    assert git.find_commit(str(script)) == head
    (script.parent / "note.txt").write_text("not tracked")
    assert git.find_commit(str(script)) == head
    script.write_text("print(1)\n")
    assert git.find_commit(str(script)) == f"{head}-dirty"


def test_the_commit_of_a_script_in_a_snapshot(script):
    """A snapshot may lie in another tree."""
    (script.parent.parent / "manifest.json").write_text(json.dumps({"git": "c0ffee-dirty"}))
    assert git.find_commit(str(script)) == "c0ffee-dirty"


@pytest.mark.parametrize("content", ["{", "[1]", '{"git": null}', '{"git": 7}'])
def test_another_manifest_says_nothing(content, tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "manifest.json").write_text(content)
    assert git.find_commit(str(tmp_path / "a" / "train.py")) is None


def test_a_git_that_does_not_answer_is_not_waited_for(script, tmp_path, monkeypatch):
    program = tmp_path / "bin" / "git"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setattr(git, "_SECONDS", 0.2)
    assert git.find_commit(str(script)) is None

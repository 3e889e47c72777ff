"""The command under a finding: the files and the options of a restart follow from the script."""

import re
import shlex
import shutil

import pytest

from bootfile.lint import cli
from bootfile.lint.engine import lint, lint_all
from tests.conftest import ROOT
from tests.support import proofs

SCRIPT = """
import argparse, glob, os, sys
from pathlib import Path
import torch

{top}
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
start = 0
if {test}:
    saved = torch.load({file})
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    start = saved["epoch"] + 1
for epoch in range(start, 10):
    for step in range(10):
        model(torch.ones(4)).sum().backward()
        optimizer.step()
    scheduler.step()
    state = {{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}}
    {write}
"""
PARTS = {
    "top": "",
    "test": 'os.path.exists("out/last.pt")',
    "file": '"out/last.pt"',
    "write": 'torch.save(state, "out/new.pt"); os.replace("out/new.pt", "out/last.pt")',
}


def declare(*options):
    lines = [f"parser.add_argument({option})" for option in options]
    return "\n".join(["parser = argparse.ArgumentParser()", *lines, "args = parser.parse_args()"])


def write(parts):
    return SCRIPT.format(**{**PARTS, **parts})


def advise(text, folder):
    """Return the command under the finding about the scheduler, without its notes, and the notes."""
    compile(text, "script.py", "exec")
    (folder / "script.py").write_text(text, encoding="utf-8")
    [command] = {one.prove for one in lint(str(folder / "script.py")) if one.rule == "R103"}
    command, _, notes = command.partition(" (")
    words = shlex.split(command)
    assert words[:2] == ["bootfile", "prove"] and words[3] == "--compare" and words[5] == "--resume_with"
    return words[4], words[6], words[7:], notes.removesuffix(")")


# how the script writes its path -> the pattern that prove can compare
FILES = {
    'os.path.join("out", "last.pt")': "out/*.pt",
    'f"./out/epoch_{epoch}.pth"': "out/*.pth",
    'f"{folder}/{epoch:03d}.pt"': "results/a/*.pt",
    '"{}/epoch_{}.pt".format(folder, epoch)': "results/a/*.pt",
    '"%s/epoch_%d.pt" % (folder, epoch)': "results/a/*.pt",
    'folder + "/last.pt"': "results/a/*.pt",
    'Path(folder) / "last.pt"': "results/a/*.pt",
    'str(Path("out", "last.pt"))': "out/*.pt",
    'Path("out").joinpath("last.pt")': "out/*.pt",
    'os.path.join("out", str(optimizer), "last.pt")': "out/*/*.pt",
    'open(folder + "/last.pt", "wb")': "results/a/*.pt",
}


@pytest.mark.parametrize("path", FILES)
def test_the_folder_and_the_ending_follow_from_constants(path, tmp_path):
    parts = {"top": 'folder = "results/a"', "write": f"torch.save(state, {path})"}
    compare, _, words, notes = advise(write(parts), tmp_path)
    assert (compare, words, notes) == (FILES[path], [], "")


def test_files_in_two_folders_have_the_one_above(tmp_path):
    parts = {"write": 'torch.save(state, "out/a/last.pt"); torch.save(model.state_dict(), "out/b/best.pt")'}
    assert advise(write(parts), tmp_path)[0] == "out/**/*.pt"


@pytest.mark.parametrize(
    ("path", "note"),
    [
        ('"last.pt"', "line 22 write below a folder"),
        ("os.environ['FILE']", "FILES: the files that line 22 writes"),
        ('f"out/{time.time()}/last.pt"', "line 22 writes a name with the time"),
        ('f"run_{epoch}/last.pt"', "line 22 write below a folder"),
    ],
)
def test_files_that_are_not_known_are_a_word_to_replace(path, note, tmp_path):
    parts = {"top": "import time", "write": f"torch.save(state, {path})"}
    compare, _, _, notes = advise(write(parts), tmp_path)
    assert compare == "FILES" and notes.startswith("FILES: ") and note in notes


RESUME = "'--resume'"
# the options, the test around the load and its file -> the options of a restart
RESTARTS = [
    ("", PARTS["test"], PARTS["file"], ""),
    ("", '"--resume" in sys.argv and os.path.exists("out/last.pt")', PARTS["file"], "--resume"),
    (declare(f"{RESUME}, action='store_true'"), "args.resume", PARTS["file"], "--resume"),
    (declare("'-r', '--go-on', dest='resume', action='store_true'"), "args.resume", PARTS["file"], "--go-on"),
    (declare("'--from_scratch', action='store_true'"), "not args.from_scratch", PARTS["file"], ""),
    (declare("'--no_resume', action='store_false', dest='resume'"), "args.resume", PARTS["file"], ""),
    (declare(RESUME), "args.resume", "args.resume", "--resume out/last.pt"),
    (declare(RESUME), "args.resume is not None", "args.resume", "--resume out/last.pt"),
    (declare(f"{RESUME}, default=''"), "os.path.isfile(args.resume)", "args.resume", "--resume out/last.pt"),
    (declare(f"{RESUME}, nargs='?', const='x'"), "args.resume", PARTS["file"], "--resume"),
    (declare(f"{RESUME}, type=bool, default=False"), "args.resume", PARTS["file"], "--resume 1"),
    (declare("'--mode', default='train'"), "args.mode == 'resume'", PARTS["file"], "--mode resume"),
    (declare("'--out', default='out'"), "os.path.exists(args.out)", "args.out + '/last.pt'", ""),
    (
        declare(f"{RESUME}, action='store_true'", "'--file'"),
        "args.resume",
        "args.file",
        "--resume --file out/last.pt",
    ),
]


@pytest.mark.parametrize(("top", "test", "file", "words"), RESTARTS)
def test_the_options_of_a_restart_follow_from_the_load(top, test, file, words, tmp_path):
    compare, resume_with, others, notes = advise(write({"top": top, "test": test, "file": file}), tmp_path)
    assert (compare, resume_with, others, notes) == ("out/*.pt", words, [], "")


@pytest.mark.parametrize(
    ("top", "test", "file", "note"),
    [
        ("RESUME = False", "RESUME", PARTS["file"], "line 14 loads if RESUME, not an option"),
        ("", "len(sys.argv) > 1", PARTS["file"], "line 14 loads if len(sys.argv) > 1"),
        (declare("'--begin', type=int, default=0"), "args.begin > 0", "f'out/{args.begin}.pt'", "--begin"),
        (declare("'--start', type=int, default=0"), "args.start > 0", PARTS["file"], "if args.start > 0"),
    ],
)
def test_options_that_are_not_known_are_a_word_to_replace(top, test, file, note, tmp_path):
    text = write({"top": top, "test": test, "file": file})
    _, resume_with, _, notes = advise(text, tmp_path)
    lines = text.splitlines()
    place = next(number for number, line in enumerate(lines, 1) if "torch.load(" in line)
    assert resume_with == "RESTART" and notes.startswith("RESTART: ")
    assert note.replace("line 14", f"line {place}") in notes


def test_a_folder_without_a_default_is_given(tmp_path):
    parts = {
        "top": declare("'--out', required=True", f"{RESUME}"),
        "test": "args.resume",
        "file": "args.resume",
        "write": 'torch.save(state, os.path.join(args.out, "last.pt"))',
    }
    expected = ("OUT/*.pt", "--resume OUT/last.pt", ["--", "--out", "OUT"], "")
    assert advise(write(parts), tmp_path) == expected
    parts["top"] = declare("'--out', required=True", f"{RESUME}", "'data'")
    *_, words, notes = advise(write(parts), tmp_path)
    assert words == ["--", "--out", "OUT", "OPTIONS"]
    assert notes == "OPTIONS: those of the script, which needs data"


@pytest.mark.thorough
def test_the_command_for_the_first_script_runs_as_it_stands(tmp_path, monkeypatch):
    shutil.copy(ROOT / "guides" / "first" / "train.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    shown = "\n".join(cli.as_text(lint_all(["train.py"])[0]))
    [command] = re.findall("to see it happen: bootfile prove (.*)", shown)
    result = proofs.prove(*shlex.split(command), cwd=tmp_path, code=20)
    assert "differs: killed and restarted" in result and "is the scheduler" in result

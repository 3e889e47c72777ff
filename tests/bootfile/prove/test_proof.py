"""`prove --to` writes a proof, and --check shows what has changed since."""

import html
import json
import subprocess

import pytest

import launch.prove
from bootfile.ground.errors import BadInput
from bootfile.ground.files import sha256_file
from bootfile.prove import proof
from tests.conftest import ROOT, names, run
from tests.support import proofs

SCRIPT = """
import os, sys, time, torch
from steps import STEPS
os.makedirs("OUT", exist_ok=True)
state = {"step": 0, "weight": torch.ones(4)}
if "--resume" in sys.argv:
    state = torch.load("OUT/last.pt")
for step in range(state["step"] + 1, STEPS + 1):
    time.sleep(0.03)
    state = {"step": step, "weight": state["weight"] * 0.9 + step}
    if step % 4 == 0:
        torch.save(state, "OUT/new")
        os.replace("OUT/new", "OUT/last.pt")
"""
OPTIONS = ("--compare", "OUT/*.pt", "--resume_with=--resume", "--kills=1")


def git(folder, *words):
    subprocess.run(["git", "-C", folder, "-c", "user.name=n", "-c", "user.email=e", *words], check=True)


def commit(folder):
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "a commit", "--allow-empty")


@pytest.fixture(scope="module")
def proven(tmp_path_factory):
    """A folder with git, own.py, steps.py, and a proof of the script."""
    folder = tmp_path_factory.mktemp("proven")
    (folder / "own.py").write_text(SCRIPT)
    (folder / "steps.py").write_text("STEPS = 40\n")
    (folder / ".gitignore").write_text("proof.*\nkept/\n__pycache__/\n")
    git(folder, "init", "-q")
    commit(folder)
    shown = proofs.prove("own.py", *OPTIONS, "--to", "proof.html", "--keep", "kept", cwd=folder)
    assert "page: proof.html\nproof: proof.json\n" in shown
    assert "<h1>exact" in (folder / "proof.html").read_text()
    return folder


@pytest.fixture
def folder(proven, tmp_path):
    """A clone of that folder, with the proof."""
    git(proven, "clone", "-q", proven, tmp_path / "clone")
    (tmp_path / "clone" / "proof.json").write_bytes((proven / "proof.json").read_bytes())
    return tmp_path / "clone"


def check(folder, code, *words):
    """Return the lines of --check, which writes nothing."""
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    words = (ROOT / "launch" / "__main__.py", "prove", "--check", *(words or ("proof.json",)))
    result = run(*words, cwd=folder, code=code)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    return (result.stderr if code == 2 else result.stdout).splitlines()


def edit(folder, *names, **values):
    """Change values in a group of the proof."""
    content = json.loads((folder / "proof.json").read_text())
    group = content
    for name in names:
        group = group[name]
    group.update(values)
    (folder / "proof.json").write_text(json.dumps(content))


def test_a_proof_has_what_was_run_and_compared(proven):
    content = json.loads((proven / "proof.json").read_text())
    assert content["proof"] == 1 and content["job"] == "own.py" and content["exit_code"] == 0
    assert content["verdict"].startswith("exact: 2 runs")
    assert len(content["tree"]["commit"]) == 40 and content["tree"]["clean"] is True
    assert content["versions"].keys() == {"bootfile", "python", "torch", "numpy"}
    assert content["hardware"]["cores"] >= 1 and content["hardware"]["processor"].startswith("CPU, ")
    assert content["files"] == {name: sha256_file(str(proven / name)) for name in ("own.py", "steps.py")}
    reference, again, killed, damaged = content["runs"]
    assert reference["run"] == "reference" and reference["commands"] == ["own.py"] == again["commands"]
    assert killed["commands"] == ["own.py", "own.py --resume"] and killed["result"] == "equal"
    assert damaged["commands"] == ["own.py --resume"] and damaged["result"] == "noticed"
    weights = proven / "kept" / "reference" / "last.pt"
    assert reference["files"] == {"last.pt": sha256_file(str(weights))}
    assert [each["equal"] for each in content["comparisons"]] == [True, True, False]
    assert {each["part"] for each in content["comparisons"]} == {"weights"}


def test_the_page_has_a_block_for_each_run_with_all_that_the_file_has(proven):
    content, page = json.loads((proven / "proof.json").read_text()), (proven / "proof.html").read_text()
    assert f"Commit <code>{content['tree']['commit']}</code></p>" in page
    assert "<table" not in page.split("Versions")[0]
    blocks = [html.unescape(each) for each in page.split("<article>")[1:]]
    for facts, block in zip(content["runs"], blocks, strict=True):
        assert f"<h3><bdi>{facts['run']}</bdi>" in block and facts["done"] in block
        texts = [each["text"] for each in content["comparisons"] if each["run"] == facts["run"]]
        assert all(each in block for each in (*texts, *facts["commands"], *facts["files"].values()))


def test_a_proof_holds_until_something_changes(folder):
    line, *notes = check(folder, 0)
    assert line.startswith("still holds: exact: ") and notes[0].startswith("not checked: ")
    before = subprocess.check_output(["git", "-C", folder, "rev-parse", "HEAD"], text=True)
    (folder / "steps.py").write_text("STEPS = 41\n")
    (folder / "new.py").touch()
    (folder / "notes.txt").touch()
    assert check(folder, 20) == ["clean yes -> no", "new.py added", "steps.py changed"]
    (folder / "steps.py").write_text("STEPS = 40\n")
    (folder / "new.py").unlink()
    check(folder, 0)  # untracked files that are not modules do not count
    commit(folder)
    after = subprocess.check_output(["git", "-C", folder, "rev-parse", "HEAD"], text=True)
    assert check(folder, 20) == [f"commit {before[:12]} -> {after[:12]}"]


def test_a_proof_of_another_tree_without_git(folder, tmp_path):
    (tmp_path / "plain").mkdir()
    for name in ("own.py", "proof.json"):
        (tmp_path / "plain" / name).write_bytes((folder / name).read_bytes())
    tree, commit, *modules = check(tmp_path / "plain", 20)
    assert tree == "clean yes -> none" and commit.endswith(" -> none") and modules == ["steps.py removed"]
    other = check(tmp_path / "plain", 0, folder / "proof.json", folder / "own.py")
    assert other[0].startswith("still holds")
    assert "own.py: no such file" in check(tmp_path, 2, folder / "proof.json")[0]


@pytest.mark.parametrize(
    ("names", "values", "line"),
    [
        (["tree"], {"commit": "a" * 40}, f"commit {'a' * 12} -> "),
        (["versions"], {"torch": "1.0"}, "torch 1.0 -> "),
        (["versions"], {"bootfile": "0.1"}, "bootfile 0.1 -> "),
        (["hardware"], {"cores": 999}, "cores 999 -> "),
        (["hardware"], {"accelerators": "8 x NVIDIA H100"}, "accelerators 8 x NVIDIA H100 -> none"),
        (["files"], {"own.py": "0" * 64}, "own.py changed"),
        (["files"], {"gone.py": "0" * 64}, "gone.py removed"),
        ([], {"exit_code": 20, "verdict": "differs: x"}, "the verdict was not exact: differs: x"),
        ([], {"exit_code": 21, "verdict": "unverified: x"}, "the verdict was not exact: unverified: x"),
        ([], {"verdict": "differs: x"}, "the verdict was not exact: differs: x"),
    ],
)  # fmt: skip
def test_a_change_is_named(names, values, line, folder, monkeypatch):
    edit(folder, *names, **values)
    monkeypatch.chdir(folder)
    [change] = proof.find_changes(proof.read("proof.json"), "own.py")
    assert change.startswith(line)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "proof.json is not a proof"),  # as half a file
        ("[]", "proof.json is not a proof"),
        ('{"format": 1, "id": "x"}', "proof Field required"),
        (b"\xff\x00", "proof.json is not a proof"),
        ("[" * 10**5, "proof.json is not a proof"),
        ({"proof": 2}, "proof Input should be 1"),
        ({"files": []}, "files Input should be "),
        ({"files": {"own.py": 1}}, "files.own.py Input should be "),
        (None, "proof.json: No such file"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_a_proof_is_bad_input(content, message, folder):
    path = folder / "proof.json"
    if content is None:
        path.unlink()
    elif isinstance(content, dict):
        edit(folder, **content)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    [line] = check(folder, 2)
    assert message in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["proof.json", "--to", "proof.html"], "expected no other option"),
        (["proof.json", "own.py", "--", "--lr=1"], "expected no other option"),
        (["own.py"], "own.py is not a proof"),
        (["."], ": Is a directory"),
    ],
)
def test_check_refuses_other_words(words, message, folder):
    [line] = check(folder, 2, *words)
    assert message in line


def test_a_file_that_is_not_a_proof_is_not_replaced(folder):
    (folder / "proof.json").write_text('{"precious": 1}')
    words = (ROOT / "launch" / "__main__.py", "prove", "own.py", *OPTIONS, "--to")
    assert "proof.json exists" in run(*words, "proof.html", cwd=folder, code=2).stderr
    assert names(run(*words, "other.json", cwd=folder, code=2).stderr, "--to other.json", "expected", "page")
    assert (folder / "proof.json").read_text() == '{"precious": 1}' and not (folder / "proof.html").exists()


def test_what_a_proof_does_not_cover_is_named(folder, tmp_path):
    assert proof.describe_code(str(folder / "own.py"))[1] == []
    (folder / "images").symlink_to(ROOT)
    code, [limit] = proof.describe_code(str(folder / "own.py"), launch.prove.find_modules)
    assert list(code["files"]) == ["own.py"] and "images is a symbolic link" in limit
    code, limits = proof.describe_code(str(folder / "own.py"))
    assert list(code["files"]) == ["own.py", "steps.py"] and limits == []
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "own.py").touch()
    code, [limit] = proof.describe_code(str(tmp_path / "plain" / "own.py"))
    assert code["tree"] == {"commit": None, "clean": None} and "compares modules only" in limit


def test_the_modules_of_a_script_are_those_below_its_folder(tmp_path, monkeypatch):
    kept = {"own.py", "net.py", "parts/blocks.py", "parts/deep/heads.py"}
    skipped = {".git/hook.py", "venv/lib/torch.py", "parts/__pycache__/blocks.py", "notes.txt"}
    for name in kept | skipped:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    (tmp_path / "linked").symlink_to(ROOT / "bootfile")
    found = proof.find_modules(str(tmp_path / "own.py"))
    assert found == {name: str(tmp_path / name) for name in sorted(kept)}
    monkeypatch.setattr(proof, "_MOST_MODULES", 3)
    with pytest.raises(BadInput, match="has more than 3 modules"):
        proof.find_modules(str(tmp_path / "own.py"))
    code, [limit, _] = proof.describe_code(str(tmp_path / "own.py"))
    assert list(code["files"]) == ["own.py"] and "more than 3 modules" in limit

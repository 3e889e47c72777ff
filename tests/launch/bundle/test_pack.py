"""`python -m launch pack` keeps the files of a job, refuses unsuitable files, and writes all or nothing."""

import os
import random
import re
import resource
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from bootfile.ground.errors import BadInput
from launch import manifests
from launch.bundle import imports
from launch.bundle.cli import pack
from launch.bundle.code_folder import CodeFolder
from tests.conftest import ROOT, names, run, start
from tests.support.packed import listed, paths, refused, tree
from tests.support.simulated import simulate


@pytest.fixture
def repository(tmp_path):
    """A small repository with Bootfile's folders."""
    files = {
        "common/__init__.py": "", "datasets/__init__.py": "", "README.md": "read me",
        "tests/test_job.py": "from common import a\n", "tests/other.py": "",
        "jobs/job.py": "import json\nfrom common import a\n", "jobs/other.py": "", "jobs/settings.json": "{}",
        "common/a.py": "A = 1\n", "common/distributed/entry.py": "", "common/tests/test_a.py": "",
        "common/__pycache__/a.pyc": "x", "common/README.md": "read me", "jobs/options.md": "read me",
        "requirements.txt": "torch>=2.1\nnumpy\n", "output_dir/best.pth": "x", ".env": "PASSWORD=hunter22",
    }  # fmt: skip
    return tree(tmp_path / "repository", files)


def test_the_repository_is_packed_as_the_user_does_it(tmp_path):
    result = run("-m", "launch", "pack", "jobs/train_ddp.py", "--to", tmp_path / "to")
    (folder,) = (tmp_path / "to").iterdir()
    manifest = manifests.parse((folder / "manifest.json").read_bytes())
    assert manifest["name"] == "train_ddp" and manifest["job"] == "jobs/train_ddp.py"
    assert folder.name == f"train_ddp-{manifest['digest'][:12]}"
    assert f"\npacked={folder} job=jobs/train_ddp.py digest={manifest['digest']} " in result.stdout
    rooms = ("bootfile", "common", "datasets", "jobs")
    kept = [file["path"] for file in manifest["files"]]
    assert kept == sorted(kept) and sorted([*kept, "manifest.json"]) == listed(folder)
    assert {path.split("/")[0] for path in kept} == {*rooms, "LICENSE", "pip-requirements.txt"}
    modules = {path for room in rooms for path in listed(ROOT / room)}
    expected = {path for path in modules if path.endswith((".py", ".html", "py.typed"))}
    assert {path.partition("/")[2] for path in kept if "/" in path} == expected
    for file in manifest["files"]:
        assert (folder / file["path"]).stat().st_size == file["size"]
        if file["path"] != "pip-requirements.txt":
            assert (folder / file["path"]).read_bytes() == (ROOT / file["path"]).read_bytes()
    needs = (folder / "pip-requirements.txt").read_text().splitlines()
    own = (ROOT / "requirements.txt").read_text().splitlines()
    own = [line for line in own if not line.startswith(("#", "torch", "nvidia"))]
    parts = [line.partition("  # for: ") for line in own]
    assert needs == [f"# {line}  (for: {reason})" if reason else line for line, _, reason in parts]
    assert "# scikit-learn>=1.3  (for: --dataset digits)" in needs
    assert len([line for line in needs if line[0] != "#"]) < len(needs) / 2
    assert "without torch, torchvision, nvidia-dali-cuda120\n" in result.stdout
    assert ": not needed by the job\n" in result.stdout and "jobs/quickstart.ipynb" in result.stdout
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True)
    assert (manifest["git"] or "").removesuffix("-dirty") == commit.stdout.strip()


def test_the_same_content_has_the_same_name(repository, tmp_path, capsys):
    first = pack(str(repository / "jobs/job.py"), str(tmp_path / "to"))
    assert "git=none" in capsys.readouterr().out
    copy = shutil.copytree(repository, tmp_path / "elsewhere" / "copy")
    for path in copy.rglob("*.py"):
        path.chmod(0o755)
        os.utime(path, (0, 0))
    git = ["git", "-C", copy, "-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *command], check=True)

    def again() -> tuple[bool, str, bool]:
        packed = pack(str(copy / "jobs/job.py"), str(tmp_path / "to"))
        shown = capsys.readouterr().out.splitlines()[-1]
        return packed == first, shown.partition("=")[0], shown.endswith("-dirty")

    assert again() == (True, "unchanged", False)
    tree(copy, {"requirements.txt": "torch>=2.2\nnumpy\n"})
    assert again() == (True, "unchanged", True)
    (copy / "common/a.py").unlink()
    assert again() == (False, "packed", True)


def test_a_snapshot_that_was_changed_is_not_called_unchanged(mine, tmp_path):
    packed = Path(pack(str(mine / "job.py"), str(tmp_path / "to")))
    tree(packed, {"__pycache__/base.pyc": "x", "results.txt": "the user's"})
    assert pack(str(mine / "job.py"), str(tmp_path / "to")) == str(packed)
    tree(packed, {"base.py": "ZERO = 1\n"})
    with pytest.raises(BadInput, match=r"base\.py .*not what was packed"):
        pack(str(mine / "job.py"), str(tmp_path / "to"))
    assert (packed / "results.txt").exists()


def test_what_a_job_needs_is_kept(repository):
    open(os.path.join(os.fsencode(repository), b"common/bad\xff.log"), "w").close()
    (repository / "LICENSE").write_text("Apache-2.0")  # it goes with the code
    code = CodeFolder(str(repository / "jobs/job.py"))
    assert [*code.files] == [
        "LICENSE",
        "common/__init__.py", "common/a.py", "common/distributed/entry.py", "datasets/__init__.py",
        "jobs/job.py", "jobs/other.py", "jobs/settings.json",
    ]  # fmt: skip
    skipped = code.skipped
    assert skipped["common/__pycache__/"] == "__pycache__/" and skipped["common/tests/"] == "tests/"
    assert skipped["common/README.md"] == skipped["jobs/options.md"] == "*.md"
    assert {"README.md", "tests/", "output_dir/", ".env", "common/bad\udcff.log"} <= {*skipped}


def test_a_script_among_tests_comes_without_the_others(repository):
    """tests/real/report.py is the boot file of a platform. What the user leaves out stays an error."""
    script = str(repository / "tests/test_job.py")
    code = CodeFolder(script)
    assert [path for path in code.files if path.startswith("tests/")] == ["tests/test_job.py"]
    assert "common/a.py" in code.files and code.skipped["tests/"] == "tests/"
    tree(repository, {"model.py": "", "tests/test_job.py": "from common import a\nimport model\n"})
    assert {"tests/test_job.py", "model.py"} <= {*CodeFolder(script).files}
    tree(repository, {"tests/test_job.py": "from common import a\nfrom tests import other\n"})
    with pytest.raises(BadInput, match=r"tests/other.py is not uploaded \(rule: tests/\)"):
        CodeFolder(script)
    tree(repository, {".jobignore": "tests/\n"})
    with pytest.raises(BadInput, match=r"tests/test_job.py is not uploaded \(rule: .jobignore:1  tests/\)"):
        CodeFolder(script)


def test_what_a_job_imports_goes_along(repository, tmp_path, capsys):
    """Modules and packages outside the job's folder, as `launch new` leaves them: by any kind of import."""
    tree(repository, {
        "jobs/job.py": "import importlib\nfrom common import a\nimport model\n"
        "def main():\n    from mine.nets import Net\n    importlib.import_module('late')\n"
        "    import deep.down.one\n"
        "try:\n    import wandb\nexcept ImportError:\n    wandb = None\n",
        "model.py": "import parts, numpy\nfrom helper import f\n", "parts.py": "", "late.py": "",
        "unused.py": "", "jobs/helper.py": "", "helper.py": "", "mine/__init__.py": "",
        "mine/nets/__init__.py": "from . import net\n",
        "mine/nets/net.py": "from ...mine import other\nfrom ..third import x\n", "mine/third.py": "",
        "mine/words.txt": "w", "mine/tests/test_it.py": "", "deep/down/one.py": "", "wandb/run.log": "",
        "data.csv": "1",
    })  # fmt: skip
    packed = pack(str(repository / "jobs/job.py"), str(tmp_path / "to"))
    added = {path for path in paths(packed) if path.split("/")[0] not in ("common", "datasets", "jobs")}
    assert added - {"pip-requirements.txt"} == {
        "model.py", "parts.py", "late.py", "helper.py", "mine/__init__.py", "mine/nets/__init__.py",
        "mine/nets/net.py", "mine/third.py", "mine/words.txt", "deep/down/one.py",
    }  # fmt: skip
    skipped = "skipped  .env README.md data.csv output_dir/ tests/ unused.py wandb/: not needed by the job\n"
    assert skipped in capsys.readouterr().out


def test_a_module_that_is_imported_and_skipped_is_refused_by_name(repository, tmp_path):
    job, to = str(repository / "jobs/job.py"), str(tmp_path / "to")
    tree(repository, {"jobs/job.py": "import json\nfrom tests.support import x\n", "tests/support/x.py": ""})
    message = refused(job, to)
    assert re.match(
        r"jobs/job\.py:2 .*tests\.support\.x, .*tests/support/x\.py .*not uploaded \(rule: tests/\)", message
    )
    tree(repository, {".jobignore": "model.py\n", "model.py": "", "jobs/job.py": "import model\n"})
    assert re.search(
        r"model, .*model\.py .*not uploaded \(rule: \.jobignore:1  model\.py\)", refused(job, to)
    )
    for allowed in (
        "try:\n    import model\nexcept ImportError:\n    pass\n",
        "def f():\n    import model\n",
    ):
        tree(repository, {"jobs/job.py": allowed})
        assert "model.py" not in CodeFolder(job).files


@pytest.mark.parametrize("module", ["model.py", "src/model/__init__.py", "../model.py"])
def test_a_module_above_the_folder_of_a_script_is_refused_by_name(module, tmp_path):
    """A script in a folder of its own finds it by sys.path or PYTHONPATH; --code_dir takes it along."""
    root, to = tmp_path / "all" / "own", str(tmp_path / "to")
    job = str(root / "scripts" / "job.py")
    program = "import json, numpy\ntry:\n    import other\nexcept ImportError:\n    pass\n"
    tree(
        root,
        {"scripts/job.py": f"{program}from model import Net\n", "other.py": "", "json.py": "", module: ""},
    )
    name = module.removeprefix("../")
    message = refused(job, to)
    assert re.search(rf"job\.py:6 .*model\.Net, .*{re.escape(name)} .*above .*--code_dir", message)
    if module == name:
        packed = pack(job, to, code_dir=str(root))
        assert {name, "scripts/job.py"} <= {*paths(packed)}
    tree(root, {"pyproject.toml": "", "scripts/model.py": ""})  # its own comes first
    assert "model.py" in paths(pack(job, to))


def test_a_script_below_a_repository_that_does_not_use_it(repository, tmp_path, capsys):
    """It has its own list of packages, and a name without the folder, as elsewhere."""
    tree(
        repository, {"mine/main.py": "from datasets import load_dataset\n", "mine/requirements.txt": "einops"}
    )
    code = CodeFolder(str(repository / "mine/main.py"))
    assert (code.job_path, [*code.files], code.is_repository) == ("main.py", ["main.py"], False)
    packed = Path(pack(str(repository / "mine/main.py"), str(tmp_path / "to")))
    assert (packed / "pip-requirements.txt").read_text() == "einops\n"
    tree(repository, {"mine/main.py": "import util\n", "mine/util.py": "from common import a\n"})
    capsys.readouterr()
    packed = Path(pack(str(repository / "mine/main.py"), str(tmp_path / "to")))
    assert {"common/a.py", "mine/main.py"} <= {*paths(packed)}
    assert f"not used: {repository}/mine/requirements.txt; the list " in capsys.readouterr().out


def test_the_users_own_rules(mine, tmp_path, capsys):
    tree(mine, {
        "notes.txt": "n", "big/a.bin": "b" * 2000, "big/b.bin": "b", "data/x.csv": "1", "keep.pth": "w",
        "other.pth": "w", ".hidden": "h", ".jobignore": "# mine\n\nnotes.txt\nbig/\n!keep.pth\n",
    })  # fmt: skip
    tree(mine, {"runs/model.py": "code", "runs/deep/run.log": "x"})
    packed = pack(str(mine / "job.py"), str(tmp_path / "to"))
    assert paths(packed) == ["base.py", "job.py", "keep.pth", "runs/model.py", "words/list.txt"]
    lines = capsys.readouterr().out.splitlines()
    assert "skipped  big/: .jobignore:4  big/" in lines and "skipped  other.pth: *.pth" in lines
    assert "skipped  notes.txt: .jobignore:3  notes.txt" in lines
    tree(mine, {".jobignore": b"\xff\xfe"})
    with pytest.raises(BadInput, match=r"\.jobignore cannot be read"):
        pack(str(mine / "job.py"), str(tmp_path / "to"))
    for wrong in ("!", "[z-a]"):
        tree(mine, {".jobignore": f"*.csv\n{wrong}\n"})
        with pytest.raises(
            BadInput, match=rf"\.jobignore:2: not a pattern of gitignore, '{re.escape(wrong)}'"
        ):
            pack(str(mine / "job.py"), str(tmp_path / "to"))


def test_the_rules_are_gits(tmp_path):
    """With random trees and patterns, `pack` keeps the same files as git. `!folder` also includes the content
    of the folder, unlike in git, so the patterns with ! name files."""
    draw = random.Random(0)
    folders = ["a", "b", "c", "d1", "#h", "a b"]
    patterns = [
        "a", "a/", "/a", "b/c", "*.x", "!k.x", "**/b", "a/**", "c/**/d1", "*", "!*/", "!*.y", "/b/*",
        "b/", "!/b/k.x", "d?", "[ab].x", "[^a].x", "[!k]?x", "# c", "\\#h", "a b", "a b ", "\\?.x",
        "**/c/**", "/**/a", "a/**/b/", "**", "*/*/a", "",
    ]  # fmt: skip
    for number in range(30):
        folder = tmp_path / str(number)
        for _ in range(25):
            above = draw.choices(folders, k=draw.randint(0, 3))
            path = folder.joinpath(*above, draw.choice([*folders, "k.x", "z.x", "q.y"]))
            if not any(above.is_file() for above in path.parents) and not path.exists():
                tree(folder, {str(path.relative_to(folder)): ""})
        lines = "\n".join(draw.choices(patterns, k=draw.randint(1, 5)))
        tree(folder, {".jobignore": lines, ".gitignore": lines, "job.py": ""})
        subprocess.run(["git", "init", "-q", folder], check=True)
        command = ["git", "-C", folder, "ls-files", "-z", "--others", "--exclude-standard"]
        git = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
        expected = {path for path in git if not path.startswith(".")}
        if "job.py" in expected:
            assert {*CodeFolder(str(folder / "job.py")).files} == expected, lines
        else:
            with pytest.raises(BadInput, match="is not uploaded"):
                CodeFolder(str(folder / "job.py"))


def test_simulate_runs_what_pack_would_make(mine, tmp_path):
    tree(mine, {".jobignore": "notes*\n", "notes.txt": "n", "outputs/a.txt": "", "requirements.txt": "torch"})
    kept = tmp_path / "kept"
    simulate("--keep", kept, mine / "job.py")
    packed = pack(str(mine / "job.py"), str(tmp_path / "to"))
    code = [path for path in listed(kept / "node-0/user-job-dir/mine") if "__pycache__" not in path]
    assert code == paths(packed) == ["base.py", "job.py", "words/list.txt"]


def test_the_dependency_list(tmp_path):
    """Markers and options are kept; packages of the image and local files are omitted."""
    tree(tmp_path, {
        "requirements.txt": "# a comment\nnumpy>=1.26  # why\n"
        "redis[hiredis]>=5; python_version < '4'\nTorch[opt] >= 2 ; python_version > '3'\n"
        "torch==2.1+cu118 \\\n  --hash=sha256:aa\nnvidia_cublas_cu12\n"
        "torch @ https://host/torch-2.1.whl\n-e .\n./a.whl\n-c pins.txt\ntorchaudio\nnvidia.dali==1\n"
        "torch_npu\n--extra-index-url https://host/simple\ntorchmetrics\nnumpy>=1.26\n"
        "Pillow>=10 # for: files\ntqdm  # for: bars\n",
    })  # fmt: skip
    path = str(tmp_path / "requirements.txt")
    text, left_out = imports.adapt_list(path, {"tqdm"})
    assert text.splitlines() == [
        "numpy>=1.26", "redis[hiredis]>=5; python_version < '4'", "--extra-index-url https://host/simple",
        "torchmetrics", "# Pillow>=10  (for: files)", "tqdm",
    ]  # fmt: skip
    assert imports.list_names(text) == ["numpy", "redis", "torchmetrics", "tqdm"]
    assert left_out == [
        "torch", "torch", "nvidia-cublas-cu12", "torch", "-e", "./a.whl", "-c", "torchaudio", "nvidia-dali",
        "torch-npu",
    ]  # fmt: skip


def test_no_list_outside_of_the_code_is_written_out(mine, tmp_path):
    tree(tmp_path, {"private.txt": "secret-name==1\n"})
    tree(mine, {"requirements.txt": "numpy\n-r ../private.txt\n"})
    message = refused(str(mine / "job.py"), tmp_path / "to")
    assert "includes another list, -r ../private.txt" in message
    (mine / "requirements.txt").unlink()
    (mine / "requirements.txt").symlink_to(tmp_path / "private.txt")
    assert names(refused(str(mine / "job.py"), tmp_path / "to"), "requirements.txt", "not in the code folder")


def test_limits(mine, tmp_path):
    job, to = str(mine / "job.py"), str(tmp_path / "to")
    for number in range(1000):
        (mine / "words" / f"{number}.txt").touch()
    limit = r"\b1000 .*\b5\.00GB;"
    message = refused(job, to)
    assert re.match(f"1006 files and folders .*{limit} 1001 .*words/: ", message)
    shutil.rmtree(mine / "words")
    with open(mine / "large.bin", "wb") as file:
        file.truncate(6 * 10**9)
    assert re.search(rf" 6\.00GB, .*{limit} ", refused(job, to))


@pytest.mark.parametrize("name", [b"bad\xff.txt", b"a\nb.txt", b"a\\b.txt"])
def test_names_that_an_object_store_breaks(name, mine, tmp_path):
    open(os.path.join(os.fsencode(mine), name), "w").close()
    assert "not a valid path" in refused(str(mine / "job.py"), str(tmp_path / "to"))


def test_links_and_special_files(mine, tmp_path):
    job, to = str(mine / "job.py"), str(tmp_path / "to")
    (mine / "also").symlink_to("words")
    (mine / "copy.py").symlink_to(mine / "base.py")
    packed = pack(job, to)
    assert {"also/list.txt", "copy.py"} <= {*paths(packed)}
    assert not any(path.is_symlink() for path in Path(packed).rglob("*"))
    shutil.rmtree(to)
    (mine / "common").symlink_to(tmp_path)  # allowed only for a link to Bootfile's folder
    assert "common is a symbolic link to" in refused(job, to)
    (mine / "common").unlink()
    tree(tmp_path / "outside", {"x.txt": ""})
    (mine / "data").symlink_to(tmp_path / "outside")  # skipped by its name, so its target does not matter
    for target in ("../outside", "/etc/passwd", "nothing", "."):
        (mine / "link").symlink_to(target)
        assert f"link is a symbolic link to {target}: " in refused(job, to)
        (mine / "link").unlink()
    os.mkfifo(mine / "pipe")
    assert "pipe is not a regular file" in refused(job, to)


def test_a_folder_in_the_code_does_not_pack_itself(mine, capsys):
    to = str(mine / "packed")
    first = pack(str(mine / "job.py"), to)
    tree(mine, {"base.py": "ZERO = 1\n"})
    second = pack(str(mine / "job.py"), to)
    assert second != first and len(paths(second)) == 3 and "the output of pack" in capsys.readouterr().out
    assert pack(os.path.join(first, "job.py"), to) == first, "that of a snapshot is equal"
    with pytest.raises(BadInput, match="folder that is packed"):
        pack(str(mine / "job.py"), str(mine))


@pytest.mark.parametrize("job, to, message", [
    ("words/list.txt", "to", "expected a .py file"),
    ("none.py", "to", "expected a .py file"),
    ("job.py", "base.py/to", "cannot be written: Not a directory"),
])  # fmt: skip
def test_bad_input(job, to, message, mine):
    assert message in refused(str(mine / job), str(mine / to))


def test_an_interrupted_pack_leaves_nothing_half(mine, tmp_path):
    with open(mine / "zeros.bin", "wb") as file:
        file.truncate(150 * 10**6)
    to = tmp_path / "to"
    packing = start("-m", "launch", "pack", mine / "job.py", "--to", to)
    while not any(files for _, _, files in os.walk(to)):
        assert packing.poll() is None, packing.communicate()
        time.sleep(0.002)
    packing.kill()
    packing.communicate()
    assert [name[:9] for name in os.listdir(to)] == [".partial-"]
    pack(str(mine / "job.py"), str(to))
    assert [name[:4] for name in os.listdir(to)] == ["job-"], "the partial folder was deleted"


def test_a_full_disk_is_one_line(mine, tmp_path):
    tree(mine, {"large.bin": "x" * 10**6})
    result = run(
        "-m", "launch", "pack", mine / "job.py", "--to", tmp_path / "to", code=2,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000)),
    )  # fmt: skip
    assert result.stderr == f"error: {tmp_path / 'to'} cannot be written: File too large\n"
    assert os.listdir(tmp_path / "to") == []

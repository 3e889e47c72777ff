"""The wheel of the package `bootfile` works alone: in an environment without the rest of the repository.

The environment is a new one of `python -m venv`, into which pip installs the wheel. Its torch, NumPy and
pydantic, with all that they require, are links to those of the tests' environment: a folder that a .pth file
names has one link for each file or folder that these distributions have installed. Nothing else can be
imported in it, neither other packages of the tests nor `common`, `datasets`, `jobs` and `launch`.
"""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from bootfile import __version__
from tests.conftest import LONGEST, ROOT, environment

pytest.importorskip("setuptools", reason="it builds the wheel")
pytest.importorskip("wheel", reason="setuptools before 70.1 needs it")
PIP = ("-m", "pip", "--disable-pip-version-check")
OTHERS = ("common", "datasets", "jobs", "launch", "tests")
DATA = {"py.typed", "console/base.html", "console/style.html", "prove/page.html"}
PLAIN = """
import os, sys, time, torch
state = {"step": 0, "weight": torch.ones(4)}
os.makedirs("OUT", exist_ok=True)
if "--resume" in sys.argv and os.path.exists("OUT/last.pt"):
    state = torch.load("OUT/last.pt")
for step in range(state["step"] + 1, 21):
    time.sleep(0.02)
    state = {"step": step, "weight": state["weight"] * 0.9 + step}
    if step % 4 == 0:
        torch.save(state, "OUT/new")
        os.replace("OUT/new", "OUT/last.pt")
"""
EXACT = re.compile("^exact: 2 runs equal the reference", re.MULTILINE)


def call(*words, code=0, **options):
    """Run a program to its end, and return it. Its output has what it printed."""
    options = {"env": environment(), "text": True, "timeout": LONGEST, **options}
    result = subprocess.run([*map(str, words)], capture_output=True, **options)
    assert result.returncode == code, f"exit code {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Return a copy of the repository: a build writes into its folder."""
    folder = tmp_path_factory.mktemp("source")
    for name in ("bootfile", *OTHERS):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.png"))
    for name in ("pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder)
    call(sys.executable, *PIP, "wheel", *options, source)
    [wheel] = folder.iterdir()
    return wheel


def find_required(*names):
    """Return the installed distributions with these names, and all that they require."""
    required, todo = {}, list(names)
    while todo:
        name = re.sub(r"[-_.]+", "-", todo.pop()).lower()
        if name in required:
            continue
        required[name] = importlib.metadata.distribution(name)
        for line in required[name].requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                todo.append(requirement.name)
    return required.values()


def link(folder, *names):
    """Make a folder from which these distributions, and all that they require, can be imported."""
    folder.mkdir()
    for distribution in find_required(*names):
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (folder / top).is_symlink():
                (folder / top).symlink_to(distribution.locate_file(top))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Return the folder of the programs of a new environment: bootfile, python."""
    folder = tmp_path_factory.mktemp("environment")
    call(sys.executable, "-m", "venv", "--without-pip", folder / "venv")  # with its own pip it takes seconds
    programs = folder / "venv" / "bin"
    link(folder / "links", "torch", "numpy", "pydantic")
    show = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = call(programs / "python", "-c", show).stdout.strip()
    Path(site, "of_the_tests.pth").write_text(f"{folder / 'links'}\n")
    here = ("--python", programs / "python", "install")
    call(sys.executable, *PIP, *here, "--quiet", "--no-deps", "--no-index", wheel)
    return programs


@pytest.mark.thorough
def test_the_wheel_has_the_package_only(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0] for name in names} == {"bootfile", f"bootfile-{__version__}.dist-info"}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "bootfile").rglob("*.py")}
    assert {name for name in names if name.startswith("bootfile/")} == modules | {
        f"bootfile/{name}" for name in DATA
    }
    metadata = zipfile.ZipFile(wheel).read(f"bootfile-{__version__}.dist-info/METADATA").decode()
    required = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", metadata, re.MULTILINE)
    assert sorted(required) == ["numpy", "pydantic", "torch"]


def test_the_source_distribution_has_the_package_only(source, tmp_path):
    build = "import sys, setuptools.build_meta; print(setuptools.build_meta.build_sdist(sys.argv[1]))"
    call(sys.executable, "-c", build, tmp_path, cwd=source)
    [archive] = tmp_path.iterdir()
    with tarfile.open(archive) as file:
        folders = {name.split("/")[1] for name in file.getnames() if name.count("/") > 1}
    assert folders == {"bootfile", "bootfile.egg-info"}


@pytest.mark.thorough
def test_help_and_the_names_import_no_torch(installed, tmp_path):
    shown = call(installed / "bootfile", "--help", cwd=tmp_path).stdout
    assert re.findall(r"^  (\w+) ", shown, re.MULTILINE) == ["lint", "fix", "prove", "receipt"]
    assert call(installed / "bootfile", "--version", cwd=tmp_path).stdout == f"bootfile {__version__}\n"
    code = (
        "import importlib.util, sys, bootfile, bootfile.cli\n"
        "sys.argv = ['bootfile', '--help']; bootfile.cli.main()\n"
        f"print('others:', *filter(importlib.util.find_spec, {(*OTHERS, 'psutil', 'tqdm')!r}))\n"
        "print('imported:', {'torch', 'numpy'} & sys.modules.keys())\n"
        "print(bootfile.Exact.__module__, bootfile.__file__)"
    )
    [*_, others, imported, used] = call(installed / "python", "-c", code, cwd=tmp_path).stdout.splitlines()
    assert (others, imported) == ("others:", "imported: set()")
    assert used.startswith("bootfile.exact.loop ") and str(ROOT) not in used


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "unknown command 'nothing'"),
        (["prove", "missing.py"], "missing.py: no such file"),
        (["prove", "--no_such_option"], "--no_such_option"),
        (["receipt", "missing", "missing"], "missing"),
    ],
)
def test_an_error_is_one_line(words, message, installed, tmp_path):
    [line] = call(installed / "bootfile", *words, cwd=tmp_path, code=2).stderr.splitlines()
    assert line.startswith("error: ") and message in line


@pytest.mark.thorough
def test_the_loop_of_the_guide_is_proven(installed, tmp_path):
    loops = tmp_path
    for path in (ROOT / "guides" / "own_loop").glob("*.py"):
        shutil.copy(path, loops)
    words = ("two.py", "--kills=1", "--compare=OUT/*.pt", "--resume_with=", "--keep=runs", "--to=proof.html")
    shown = call(installed / "bootfile", "prove", *words, "--", "any_number.py", "OUT", cwd=loops).stdout
    assert EXACT.search(shown) and "data equal for 93 steps" in shown, shown
    assert "<h1>exact" in (loops / "proof.html").read_text(encoding="utf-8")
    names = ("before.py", "after.py", "any_number.py", "two.py")
    assert all(f'"{name}": "' in (loops / "proof.json").read_text(encoding="utf-8") for name in names)
    call(installed / "bootfile", "prove", "--check", "proof.json", cwd=loops)
    runs = ("runs/reference", "runs/killed-and-restarted")
    shown = call(installed / "bootfile", "receipt", *runs, cwd=loops).stdout
    assert "data equal for 93 steps" in shown and "state equal at steps 10, 20" in shown


@pytest.mark.thorough
def test_a_plain_script_is_proven(installed, tmp_path):
    (tmp_path / "plain.py").write_text(PLAIN)
    words = ("plain.py", "--kills=1", "--compare=OUT/*.pt", "--resume_with=--resume")
    shown = call(installed / "bootfile", "prove", *words, cwd=tmp_path).stdout
    assert EXACT.search(shown), shown
    assert [path.name for path in tmp_path.iterdir()] == ["plain.py"]


# A test that starts jobs, reads guides or compares with other rooms needs the repository.
NEEDS_REPOSITORY = re.compile(
    r"\b(common|datasets|launch|jobs)[./]|\bguides\b|ROOT /|checkpointers|[\"']launch[\"']"
)


@pytest.mark.thorough
def test_the_tests_of_the_package_pass_alone(installed, tmp_path):
    """pytest and what some tests use come on top. Those that start no process show what cannot be imported;
    the tests above start the package's own programs, and all of them run in this repository, too."""
    shutil.copytree(ROOT / "tests" / "bootfile", tmp_path / "tests" / "bootfile")
    shutil.copytree(ROOT / "tests" / "support", tmp_path / "tests" / "support")
    for name in ("__init__.py", "conftest.py"):
        shutil.copy(ROOT / "tests" / name, tmp_path / "tests")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    link(tmp_path / "links", "pytest", "psutil", "threadpoolctl", "torchvision")
    files = [
        str(path.relative_to(tmp_path))
        for path in sorted((tmp_path / "tests" / "bootfile").rglob("test_*.py"))
        if path.name != Path(__file__).name and not NEEDS_REPOSITORY.search(path.read_text(encoding="utf-8"))
    ]
    assert len(files) >= 12
    words = ("--quick", "-p", "no:cacheprovider", "-m", "not gpu and not thorough and not real", *files)
    variables = environment(PYTHONPATH=str(tmp_path / "links"))
    del variables["PYTEST_CURRENT_TEST"]  # this test: its own tests begin later
    shown = call(installed / "python", "-m", "pytest", *words, cwd=tmp_path, env=variables).stdout
    assert int(re.search(r"(\d+) passed", shown)[1]) >= 150, shown

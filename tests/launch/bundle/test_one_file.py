"""`python -m launch pack JOB --to FILE.py` writes one file, which Python and torchrun start as the job."""

import importlib.util
import json
import re
import subprocess
import sys
import zipfile

import pytest

from bootfile.ground.errors import BadInput
from launch.bundle.cli import pack
from tests.conftest import QUICK, ROOT, environment, finish, names, run, start
from tests.support.packed import refused, tree
from tests.support.simulated import simulate

SHORT = (*QUICK, "--max_steps=4")


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Return train_ddp.py as one file, in a folder that cannot be written, with other people's modules."""
    folder = tmp_path_factory.mktemp("boot")
    pack(str(ROOT / "jobs" / "train_ddp.py"), str(folder / "boot.py"))
    for name in ("bootfile", "common", "datasets", "jobs"):
        tree(folder / name, {"__init__.py": "raise SystemExit('another module')\n"})
    folder.chmod(0o555)
    yield folder / "boot.py"
    folder.chmod(0o755)


def receipt_of(result):
    return re.search(r"^test_accuracy.* receipt=(\w+)", result.stdout, re.MULTILINE)[1]


@pytest.mark.thorough
def test_it_is_the_job(packed, tmp_path):
    """It has less than 1 MB, starts its processes, and writes below the current folder."""
    assert packed.stat().st_size < 1.2e6
    result = run(packed, *SHORT, "--processes_per_node=2", cwd=tmp_path, fresh=True)
    [folder] = (tmp_path / "output_dir").glob("boot-*")
    assert {"metrics.jsonl", "receipt.bin"} <= {each.name for each in folder.iterdir()}
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", packed, *SHORT)
    by_torchrun = run(*words, "--train_url=out", cwd=tmp_path, fresh=True)
    of_the_job = run(ROOT / "jobs" / "train_ddp.py", *SHORT, "--output_dir", tmp_path / "job")
    assert receipt_of(result) == receipt_of(by_torchrun) == receipt_of(of_the_job)


@pytest.mark.thorough
def test_it_restarts_on_the_nodes_of_a_platform(packed, tmp_path):
    words = ("--nodes=2", "--fault=restart:node=1,step=3", "--keep", str(tmp_path / "kept"), str(packed))
    shown = simulate(*words, "--", *QUICK, "--max_steps=6", "--save_every=1").stdout
    assert re.search(r"resumed from \S*step_\d", shown), shown


@pytest.mark.thorough
def test_the_packages_are_named(packed, tmp_path):
    """By --help, and in one line if one is missing."""
    needs = "pip install numpy opencv-python-headless psutil tensorboard tqdm"
    assert run(packed, "--help", cwd=tmp_path, fresh=True).stdout.endswith(f": {needs}\n")
    bare = subprocess.run([sys.executable, "-S", packed], capture_output=True, text=True, cwd=tmp_path)
    assert bare.returncode == 2 and not bare.stdout
    assert re.fullmatch(f"error: No module named 'torch' .*{sys.executable}; .*: {needs}\n", bare.stderr)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.thorough
def test_workers_of_ray_get_its_modules(tmp_path):
    pack(str(ROOT / "jobs" / "train_ray.py"), str(tmp_path / "one.py"))
    words = (*SHORT, "--distribute_mode=true", "--workers=1", "--train_url=out")
    assert run(tmp_path / "one.py", *words, cwd=tmp_path, fresh=True).stdout.count("test_accuracy") == 1


OWN = """import multiprocessing
import helper
class Own:
    pass
def work(own):
    print(type(own).__name__, helper.NAME)
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=work, args=(Own(),))
    process.start(); process.join(); raise SystemExit(process.exitcode)
"""


def test_new_processes_find_the_job(tmp_path):
    """Also modules of its own folder, below the one that is packed."""
    tree(tmp_path / "mine", {"sub/job.py": OWN, "sub/helper.py": "import tqdm\nNAME = 'helper'\n"})
    tree(tmp_path / "mine", {"requirements.txt": "tqdm  # for: bars\nredis  # for: caches\n"})
    pack(str(tmp_path / "mine" / "sub" / "job.py"), str(tmp_path / "one.py"), code_dir=str(tmp_path / "mine"))
    needs = zipfile.ZipFile(tmp_path / "one.py").read("pip-requirements.txt").decode()
    assert needs.splitlines() == ["tqdm", "# redis  (for: caches)"]
    assert run(tmp_path / "one.py", cwd=tmp_path, fresh=True).stdout == "Own helper\n"


@pytest.mark.thorough
@pytest.mark.parametrize("variant", ["exact", "fsdp", "text"])
def test_a_project_of_ones_own_is_one_file(variant, tmp_path):
    if variant == "fsdp":
        pytest.importorskip("torch.distributed.fsdp", reason="no FSDP2").fully_shard  # noqa: B018
    run("-m", "launch", "new", tmp_path / "mine", f"--{variant}", cwd=ROOT)
    job = tmp_path / "mine" / "jobs" / "train.py"
    pack(str(job), str(tmp_path / "one.py"))
    words = ("--max_steps=3", "--save_every=1")
    if variant != "text":
        words += ("--processes_per_node=2",)
    run(tmp_path / "one.py", *words, "--output_dir=a", cwd=tmp_path, fresh=True)
    finish(start(job, *words, "--output_dir", tmp_path / "b", cwd=tmp_path, env=environment(), fresh=True))
    states = [(tmp_path / name / "state.jsonl").read_text().splitlines() for name in "ab"]
    # the other lines are about files of weights
    a, b = ([line for line in map(json.loads, each) if "step" in line] for each in states)
    a, b = ([(line["step"], line["digest"]) for line in lines] for lines in (a, b))
    assert a == b and len(a) == 3


def test_the_same_content_is_the_same_file(tmp_path, capsys):
    tree(tmp_path, {"job.py": "print(1)\n"})
    pack(str(tmp_path / "job.py"), str(tmp_path / "one.py"))
    before = (tmp_path / "one.py").read_bytes()
    pack(str(tmp_path / "job.py"), str(tmp_path / "one.py"))
    assert (tmp_path / "one.py").read_bytes() == before and "unchanged=" in capsys.readouterr().out
    assert {"job.py", "__main__.py", "manifest.json"} == {*zipfile.ZipFile(tmp_path / "one.py").namelist()}
    tree(tmp_path, {"job.py": "print(2)\n"})
    pack(str(tmp_path / "job.py"), str(tmp_path / "one.py"))
    assert run(tmp_path / "one.py", cwd=tmp_path, fresh=True).stdout == "2\n"


def test_bad_input(tmp_path):
    tree(tmp_path, {"job.py": "print(1)\n", "mine.py": "my work\n", "v1.2.py": "print(1)\n"})
    with pytest.raises(BadInput, match=r"mine\.py .*not written by pack"):
        pack(str(tmp_path / "job.py"), str(tmp_path / "mine.py"))
    assert (tmp_path / "mine.py").read_text() == "my work\n"
    assert names(refused(str(tmp_path / "v1.2.py"), tmp_path / "one.py"), "dot", "path")
    pack(str(tmp_path / "job.py"), str(tmp_path / "one.py"))
    assert "one.py was written by pack" in refused(str(tmp_path / "one.py"), tmp_path / "to")

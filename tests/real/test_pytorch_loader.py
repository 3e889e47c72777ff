"""PyTorch's own tests of its DataLoader, with DpexDataLoader in its place.

    make real PYTORCH=FOLDER    FOLDER: PyTorch's source, of the installed version

Their file is copied with a DataLoader of its own after the import of that name. A test that fails also with
torch's own loader on this machine does not count.
"""

import ast
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.conftest import ROOT, environment

pytestmark = pytest.mark.real
FILE = "test_dataloader.py"
# what fails with distribute_mode, and why: the test's name without its class
DIFFERENCES = {
    "test_get_worker_info": "it reads the iterator's processes, `_workers`: actors may be on other machines",
    "test_ind_worker_queue": "Ray's actors do not start within its time-out of 5 s",
    "test_partial_workers": "it joins the iterator's processes, `_workers`",
    "test_segfault": "Ray restarts the actor 20 times before the error, longer than the test waits",
    "test_worker_init_fn": "it seeds torch; ours is seeded for each batch, so a lost actor changes nothing",
    "test_worker_seed": "it shares a lock with the workers, which other machines cannot",
    "test_worker_seed_reproducibility": "it shares a lock with the workers, which other machines cannot",
}
LINES = """

from typing import TypeVar

from datasets.loaders.ray.engine import RayDataLoader

_Batch = TypeVar("_Batch")


class DataLoader(RayDataLoader[_Batch]):
    def __init__(self, dataset, *arguments, **options):
        super().__init__(dataset, {mode}, "auto", *arguments, **options)

"""


def outcomes(folder: Path, *names: str) -> dict[str, str]:
    """Run the file of a folder, or these tests of it. Return CLASS::TEST -> "passed", ..."""
    words = [f"{FILE}::{name}" for name in names] or [FILE]
    report = folder / "report.xml"
    path = f"{ROOT}{os.pathsep}{folder}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *words]
    printed = subprocess.run(
        command, cwd=folder, env=environment(PYTHONPATH=path), capture_output=True, text=True
    )
    assert report.exists(), printed.stdout[-3000:]
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        kind = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"] = kind
    return found


@pytest.mark.parametrize("mode", [False, True])
def test_the_same_as_with_torchs_loader(mode, tmp_path):
    source = os.environ.get("PYTORCH")
    if not source:
        pytest.skip("PyTorch's tests are not in its package: make real PYTORCH=FOLDER")
    pytest.importorskip("expecttest", reason="pip install expecttest")
    text = Path(source, "test", FILE).read_text()
    imports = [node for node in ast.parse(text).body if isinstance(node, ast.ImportFrom)]
    [line] = [node.end_lineno for node in imports if "DataLoader" in [alias.name for alias in node.names]]
    lines = text.splitlines(keepends=True)
    for name, inserted in (("torch", ""), ("ours", LINES.format(mode=mode))):
        (tmp_path / name).mkdir()
        (tmp_path / name / FILE).write_text("".join([*lines[:line], inserted, *lines[line:]]))
    found = outcomes(tmp_path / "ours")
    assert list(found.values()).count("passed") > 100
    failed = {name for name, outcome in found.items() if outcome == "failed"}
    if failed:
        theirs = outcomes(tmp_path / "torch", *failed)
        failed = {name for name in failed if theirs[name] != "failed"}
    differences = {name.partition("::")[2] for name in failed}
    assert differences == (set(DIFFERENCES) if mode else set()), sorted(failed)

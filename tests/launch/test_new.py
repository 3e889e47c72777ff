"""The test of a project of `python -m launch new FOLDER` passes, and the verbs accept the project."""

import json
import os
import re

import pytest

from bootfile.ground.errors import BadInput
from launch.new.cli import main, make_job
from tests.conftest import ROOT, environment, run
from tests.support.packed import listed
from tests.support.simulated import rows

MORE = [
    ("--copy",), ("--text", "--fsdp"), ("--ddp", "--amp", "--copy"), ("--exact",), ("--fsdp",),
    ("--text", "--ddp"),
]  # fmt: skip


@pytest.mark.parametrize(
    "options", [(), *(pytest.param(each, marks=pytest.mark.thorough) for each in MORE)], ids=" ".join
)
def test_a_new_project_works_at_once(options, tmp_path):
    folder = tmp_path / "my project"
    run("-m", "launch", "new", folder, *options)
    assert (folder / "common").is_symlink() == ("--copy" not in options)
    here = {"cwd": folder, "env": environment(OMP_NUM_THREADS="1")}
    if options:
        assert "1 passed" in run("-m", "pytest", "tests", timeout=1200, **here).stdout
    result = run("-m", "ruff", "check", "--isolated", "--select=F,E9", "jobs", "tests", **here)
    assert "All checks passed" in result.stdout
    if "--amp" in options:
        job = ("jobs/train.py", "--", "--max_steps=2", "--batch_size=32")
        simulated = rows(run("-m", "launch", "simulate", "--nodes=2", *job, **here).stdout)
        assert {row.meaning for row in simulated.values()} == {"done"} and len(simulated) == 2

    run("-m", "launch", "pack", "jobs/train.py", "--to", "packed", **here)
    (packed,) = [path for path in (folder / "packed").iterdir() if path.is_dir()]
    kept = {path for path in listed(packed) if not path.startswith("packed/")}
    packages = ("bootfile", "common", "datasets")
    modules = {f"{room}/{path}" for room in packages for path in listed(ROOT / room)}
    modules = {path for path in modules if path.endswith((".py", ".html", "py.typed"))}
    assert {path for path in kept if path.partition("/")[0] in packages} == modules
    assert {path for path in kept if path.partition("/")[0] not in packages} == {
        "jobs/train.py", "manifest.json", "pip-requirements.txt",
    }  # fmt: skip
    assert not any(path.is_symlink() for path in packed.rglob("*"))
    if not options:
        output = tmp_path / "output"
        run("jobs/train.py", "--max_steps=1", "--batch_size=32", "--output_dir", output, cwd=packed)

    submit = ("jobs/train.py", "--config", "job.toml", "--dry_run")
    body = json.loads(run("-m", "launch", "submit", *submit, **here).stdout.split("\n\n")[0])
    assert body["metadata"]["name"] == "my-project"
    assert body["algorithm"]["boot_file"].endswith("/jobs/train.py")


@pytest.mark.parametrize("ddp, amp, exact, fsdp", [
    (False, False, False, False),
    (True, False, False, False),
    (False, True, False, False),
    (True, True, False, False),
    (True, False, True, False),
    (True, False, False, True),
])  # fmt: skip
def test_the_blocks_are_numbered_and_the_job_explains_itself(ddp, amp, exact, fsdp):
    job = make_job(ddp, amp, exact, fsdp)
    marks = re.findall(r"^ *### (\S+) \(.*\) (\d+)/(\d+), ", job, re.MULTILINE)
    for tag, blocks in (("新增", 5 + 3 * amp + 11 * exact + 3 * fsdp), ("分布式改造", 6 * ddp)):
        numbers = [(int(k), int(n)) for own, k, n in marks if own == tag]
        assert numbers == [(k, blocks) for k in range(1, blocks + 1) for _ in range(2)]
    assert not re.search(r"--(width|dataset|custom_data)|image_set|logits", job)
    assert "# - " not in job and ("train_ddp.py" in job) == ddp and ("train_amp.py" in job) == amp


def test_a_language_model_for_several_processes():
    job = make_job(ddp=True, amp=False, text=True)
    marks = re.findall(r"^ *### (\S+) \(.*\) (\d+)/(\d+), ", job, re.MULTILINE)
    numbers = [(tag, int(k), int(n)) for tag, k, n in marks[::2]]
    assert {("新增", k, 8) for k in range(1, 9)} | {("分布式改造", k, 6) for k in range(1, 7)} == {*numbers}
    assert not re.search(r"image|--(dataset|custom_data)|# - ", job)


def test_a_job_of_one_process_names_the_option(tmp_path):
    main([str(tmp_path / "project")])
    given = environment(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="29999")
    job = tmp_path / "project" / "jobs" / "train.py"
    result = run(job, "--max_steps=1", "--output_dir", tmp_path / "out", code=2, env=given)
    assert "python -m launch new PROJECT --ddp" in result.stderr


@pytest.mark.parametrize("options", ["--exact --amp", "--fsdp --amp", "--fsdp --exact", "--text --amp"])
def test_variants_that_exclude_each_other_are_refused(options, tmp_path):
    with pytest.raises(BadInput, match=r"--exact, --amp, .* exclude each other"):
        main([str(tmp_path / "project"), *options.split()])


def test_a_folder_that_is_not_empty_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for folder, reason in ((tmp_path, "is not empty"), (tmp_path / "file", "File exists")):
        with pytest.raises(BadInput, match=reason):
            main([str(folder)])
    assert os.listdir(tmp_path) == ["file"]

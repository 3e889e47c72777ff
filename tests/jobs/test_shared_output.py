"""Two runs never share an output folder, and a start that is refused changes no file."""

import os
import re
import shutil
import signal
import threading
from pathlib import Path

import pytest

from tests.conftest import (
    QUICK,
    ROOT,
    finish,
    is_stopped,
    names,
    read_until,
    records,
    refused,
    run,
    run_ranks,
    start,
    wait_until,
)

# 5 steps an epoch
DIGITS = (*QUICK, "--batch_size=240", "--report_every=1")
THREE = ("jobs/train.py", *DIGITS, "--max_steps=3", "--save_every=1")


def snapshot(folder) -> dict[str, bytes | None]:
    """Return path -> content of every file, None for folders, without Python's caches."""
    paths = sorted(path for path in Path(folder).rglob("*") if "__pycache__" not in path.parts)
    return {str(path): None if path.is_dir() else path.read_bytes() for path in paths}


@pytest.mark.thorough
def test_a_run_whose_checkpoints_failed_begins_anew(tmp_path):
    """A quota, or a limit of the size of files, permits the weights (0.7 MB), but no checkpoint."""
    limit = (
        "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6));"
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    output = run("-c", limit, *THREE, f"--output_dir={tmp_path}", code=6).stdout
    assert names(output, "warning: step_1.pt was not saved: File too large", "quota")
    assert "there is no checkpoint yet" in output and (tmp_path / "epoch_1.pth").exists()
    run(*THREE, f"--output_dir={tmp_path}")
    shutil.rmtree(tmp_path / "checkpoints")
    assert "holds results" in refused(*THREE, f"--output_dir={tmp_path}")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the output folder of a run of three steps."""
    output = tmp_path_factory.mktemp("finished") / "out"
    run(*THREE, f"--output_dir={output}")
    return output


@pytest.fixture
def used(finished, tmp_path):
    """Return a copy of the output folder of `finished`."""
    return shutil.copytree(finished, tmp_path / "out")


def test_a_second_job_is_refused_while_the_first_one_lives(tmp_path):
    output = tmp_path / "out"
    option = f"--output_dir={output}"
    long = ("jobs/train.py", *DIGITS, "--epochs=500")
    first = start(*long, option)
    try:
        read_until(first, "^epoch=1 step=5/.*loss")
        read_until(first, "val_loss")
        wait_until(lambda: list(output.glob("checkpoints/step_*.pt")), first)
        first.send_signal(signal.SIGSTOP)
        wait_until(lambda: is_stopped(first.pid), first)
        before = snapshot(output)
        # two processes, of which only rank 0 may open the folder
        for result in run_ranks("jobs/train_ddp.py", *DIGITS, "--seed=2", option, code=2):
            assert result.stderr.startswith(f"error: {output} belongs to another job")
        assert snapshot(output) == before
        # a restart waits until the previous job has ended
        threading.Timer(8.0, first.kill).start()
        patient = "import runpy, sys; sys.path.insert(0, ''); from bootfile.ground import folder_lock\n" + (
            "folder_lock._BUSY = 400\ndel sys.argv[0]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
        )
        assert "resumed from " in run("-c", patient, *long, option, "--max_steps=7").stdout
    finally:
        first.kill()
        first.communicate()
    assert records(output)[-1]["step"] == 7 and not (output / ".lock").exists()


@pytest.mark.parametrize(("arguments", "named"), [
    (["--resume=never"], ["checkpoints/step_1.pt", "use another --output_dir"]),
    (["--resume=never", "--seed=5", "--max_steps=1"], ["checkpoints/step_3.pt", "best.pth"]),
    (["--resume=OTHER"], ["checkpoints/step_3.pt", "leave out --resume"]),
    (["--resume=nowhere"], ["leave out --resume nowhere"]),
    (["--batch_size=120"], ["its --batch_size is 240, this run's is 120"]),
    (["--max_steps=2"], ["step_3.pt", "of step 3", "ends at step 2"]),
])  # fmt: skip
def test_results_are_not_replaced(finished, used, arguments, named):
    before = snapshot(used)
    other = str(finished / "checkpoints" / "step_2.pt")
    line = refused(*THREE, *(each.replace("OTHER", other) for each in arguments), f"--output_dir={used}")
    assert names(line, *named), line
    assert snapshot(used) == before


def test_results_without_a_checkpoint_are_not_replaced(used, tmp_path):
    shutil.rmtree(used / "checkpoints")
    before = snapshot(used)
    for command in (THREE, ("jobs/loader.py", "--custom_data=true", f"--cache_dir={tmp_path / 'index'}")):
        line = refused(*command, f"--output_dir={used}")
        assert "best.pth, epoch_1.pth" in line and "or remove the folder" in line
        assert snapshot(used) == before
    (used / "state.jsonl").unlink()  # then it is not known whether the weights were saved before a kill
    assert "holds results" in refused(*THREE, f"--output_dir={used}")


def test_the_same_command_is_idempotent(finished, used, tmp_path):
    """This also holds for a command that begins at a checkpoint of another run."""
    run(*THREE, f"--output_dir={used}")
    assert "step 3 of 3" in run(*THREE, f"--output_dir={used}").stdout
    other = (*THREE, f"--resume={finished / 'checkpoints' / 'step_2.pt'}", f"--output_dir={tmp_path / 'new'}")
    assert "step 2 of 3" in run(*other).stdout
    assert "step 3 of 3" in run(*other).stdout
    for output in (used, tmp_path / "new"):
        assert (output / "epoch_1.pth").read_bytes() == (finished / "epoch_1.pth").read_bytes()
    assert (used / "receipt.bin").read_bytes() == (finished / "receipt.bin").read_bytes()


@pytest.mark.thorough
def test_a_run_that_was_killed_before_its_first_save_begins_anew(tmp_path):
    command = ("jobs/train.py", *DIGITS, "--save_every=3epochs", f"--output_dir={tmp_path}")
    job = start(*command, "--epochs=100")
    read_until(job, "val_loss")
    read_until(job, "^epoch=2 step=6/")
    wait_until((tmp_path / "epoch_1.pth").exists, job)
    job.kill()
    job.communicate()
    assert not (tmp_path / "checkpoints").exists()
    assert "holds results" in refused(*command, "--seed=2")
    shown = run(*command, "--max_steps=7").stdout
    line = r"warning: .* step \d+ without a save: .* step 1\. .* 5 minutes: --save_every 300s"
    assert re.search(line, shown)
    assert [line["step"] for line in records(tmp_path)] == [1, 2, 3, 4, 5, 5, 6, 7, 7]
    assert "without a save" not in run(*command, "--max_steps=8").stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Return a copy of the code with an empty output_dir/."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("bootfile", "common", "datasets", "jobs", "launch"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.mark.thorough
def test_runs_without_an_output_folder_get_their_own(project):
    """Two runs start in the same second, one of them with two processes."""
    kept = project / "output_dir"
    jobs = [
        start("jobs/train.py", *DIGITS, "--max_steps=1", cwd=project),
        start("jobs/train.py", *DIGITS, "--max_steps=1", cwd=project),
        start("jobs/train_ddp.py", *DIGITS, "--max_steps=1", "--processes_per_node=2", cwd=project),
    ]
    said = [finish(job).stdout for job in jobs]
    folders = [Path(re.search("^output_dir (.*)$", text, re.MULTILINE)[1]) for text in said]
    names = sorted(path.name for path in kept.iterdir() if not path.is_symlink())
    assert names == sorted(folder.name for folder in folders) and len({*names}) == 3
    assert all(re.fullmatch(r"train(_ddp)?-\d{8}T\d{6}Z(-\d)?", name) for name in names)
    assert all(text.count("output_dir ") == 1 for text in said)
    for folder in folders:
        assert {"best.pth", "checkpoints", "metrics.jsonl"} <= {*os.listdir(folder)}
    latest = os.readlink(kept / "latest")
    assert latest in names
    for runs, count in (("", "3 runs"), ("latest", "1 run")):
        page = ("-m", "launch", "report", kept / runs, "--to", project / "page.html")
        assert f": {count}, " in run(*page, cwd=project).stdout

    # `latest` is resumed as the folder that it points to
    job = "jobs/train_ddp.py" if latest.startswith("train_ddp") else "jobs/train.py"
    again = run(job, *DIGITS, "--max_steps=2", "--output_dir=output_dir/latest", cwd=project).stdout
    assert f"resumed from {kept / latest}/checkpoints/step_1.pt" in again


@pytest.mark.thorough
def test_starts_that_are_refused_or_only_measure_leave_no_folder(project):
    before = snapshot(project)
    for arguments in (
        ["jobs/train.py", "--data_url=/does/not/exist"],
        ["jobs/train.py", *DIGITS, "--resume=nowhere"],
        ["jobs/train.py", *DIGITS, "--resume=auto"],
    ):
        line = refused(*arguments, cwd=project)
        assert "--resume auto without --output_dir" in line or "--resume=auto" not in arguments
        assert "--resume nowhere: no such file" in line or "--resume=nowhere" not in arguments
    measured = run(
        "jobs/imagenet.py", "--data_backend=synthetic", "--prof=1", "--image_size=32",
        "--arch=shufflenet_v2_x0_5", "--batch_size=4", cwd=project,
    ).stdout  # fmt: skip
    assert "replace" not in measured
    assert snapshot(project) == before

"""A single file runs as the boot file in an otherwise empty folder."""

import json
import os
import re
import resource
import shutil
import signal
import stat
from pathlib import Path

import pytest

from launch.bundle import single_file
from launch.bundle.cli import pack
from tests.conftest import QUICK, environment, finish, records, start
from tests.support.simulated import rows, simulate

RUN = (*QUICK, "--max_steps=1", "--batch_size=64", "--report_every=1")


@pytest.fixture
def single(mine, tmp_path):
    """Return (a function that starts the file with arguments, its path, the folder into which it unpacks)."""
    packed = pack(str(mine / "job.py"), str(tmp_path / "to"), single_file=True)
    assert packed.path.endswith(f"job-{packed.manifest['digest'][:12]}.py")
    (tmp_path / "tmp").mkdir()
    shutil.rmtree(mine)

    def launch(*arguments, **options):
        return start(packed.path, *arguments, env=environment(TMPDIR=str(tmp_path / "tmp")), **options)

    return launch, Path(packed.path), tmp_path / "tmp"


def test_a_single_file_runs_anywhere_and_cleans_up(single, tmp_path):
    launch, path, folder = single
    path.parent.chmod(0o555)
    (tmp_path / "empty").mkdir()
    for options in ((), ("--leave",)):
        running = launch("--lr=1", *options, cwd=tmp_path / "empty")
        result = finish(running, code=7 if options else 0)
        squares, words, arguments, cwd, code, mode = json.loads(result.stdout)
        assert (squares, words, arguments) == ([1, 4, 9], "words", ["--lr=1", *options])
        assert cwd == str(tmp_path / "empty") and os.path.dirname(code) == str(folder)
        assert stat.S_IMODE(mode) == 0o700
        assert os.listdir(folder) == [] and (options or result.stderr == "")
    path.parent.chmod(0o755)
    text = path.read_text()
    assert text.startswith("# job.py and the code that it needs, in one file")
    assert max(map(len, text.split("\n"))) < 120


def test_a_single_file_is_the_same_each_time(mine, tmp_path):
    contents = []
    for _ in range(2):
        path = Path(pack(str(mine / "job.py"), str(tmp_path / "to"), single_file=True).path)
        contents.append(path.read_bytes())
        path.write_text("half")
    assert contents[0] == contents[1] and os.listdir(tmp_path / "to") == [path.name]


def test_single_files_do_not_disturb_each_other(single):
    launch, _, folder = single
    running = launch("--sleep")
    running.stdout.readline()
    finish(launch())
    assert len(os.listdir(folder)) == 1
    running.send_signal(signal.SIGINT)
    finish(running, code=-signal.SIGINT)
    assert os.listdir(folder) == []


def test_results_beside_the_code_are_not_taken_away(single):
    launch, _, folder = single
    result = finish(launch("--write"))
    (left,) = folder.iterdir()
    assert (left / "results.txt").exists() and f"{left} is kept" in result.stderr


def test_a_damaged_single_file_does_not_run(single):
    launch, path, folder = single
    text = path.read_text()
    middle = text.index("_ARCHIVE = ") + 200
    path.write_text(text[:middle] + ("A" if text[middle] != "A" else "B") + text[middle + 1 :])
    result = finish(launch(), code=2)
    assert result.stderr == "error: this file was changed after it was packed: copy it again, completely\n"
    assert os.listdir(folder) == [] and not result.stdout


def test_a_full_disk_is_one_line(single):
    launch, _, folder = single
    result = finish(launch(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))), code=2)
    assert re.fullmatch(r"error: cannot unpack this file: .*too large; TMPDIR .*\n", result.stderr)
    assert os.listdir(folder) == []


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Return jobs/train_ddp.py as a single file in an otherwise empty folder."""
    return pack("jobs/train_ddp.py", str(tmp_path_factory.mktemp("packed")), single_file=True).path


def test_a_single_file_tells_whether_it_takes_the_options_of_a_job(packed, single):
    """`simulate` passes --train_url to a single file only if it contains a Bootfile job."""
    assert single_file.holds_bootfile(packed)
    assert not single_file.holds_bootfile("jobs/train_ddp.py")
    assert not single_file.holds_bootfile(str(single[1]))


@pytest.mark.parametrize("platform", ["modelarts", "torchrun"])
def test_what_is_packed_trains(platform, packed, tmp_path):
    """The processes delete the folders into which they unpack."""
    (tmp_path / "tmp").mkdir()
    result = simulate(
        "--processes=2", f"--platform={platform}", f"--keep={tmp_path / 'kept'}", "--limit=200",
        packed, "--", *RUN,
        env=environment(TMPDIR=str(tmp_path / "tmp"), OMP_NUM_THREADS="1"), timeout=240,
    )  # fmt: skip
    assert {row.code for row in rows(result.stdout).values()} == {0}
    assert [name for name in os.listdir(tmp_path / "tmp") if "bootfile" in name] == []
    assert records(tmp_path / "kept/node-0/outputs/train_url_0")[0]["step"] == 1

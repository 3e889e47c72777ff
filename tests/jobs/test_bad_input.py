"""Bad input ends the job with one line that names the value and exit code 2, and nothing is written."""

import os

import pytest

from tests.conftest import QUICK, environment, names, refused, run


def _refused(output_dir, *command, **options):
    line = refused(*command, "--output_dir", output_dir, **options)
    assert not output_dir.exists()
    return line


@pytest.mark.parametrize("command, message", [
    ("train.py --batch_size=5000", "batch size 5000 ... larger ... 1438 samples ... at most 1438"),
    ("train.py --seed=-1", "--seed ... '-1' is not ... 0..2^63-1"),
    ("train.py --enable_gpu=true", "--enable_gpu=true, but torch"),
    ("train.py --data_url=/does/not/exist", "data_url /does/not/exist does not exist"),
    ("train.py --data_url=s3://me:secret@bucket/data", "s3:// ... user name ... password"),
    ("train_ddp.py --batch_size=101 --processes_per_node=2", "101 is not divisible by 2 processes"),
])  # fmt: skip
def test_arguments(command, message, tmp_path):
    job, *words = command.split()
    line = _refused(tmp_path / "out", f"jobs/{job}", "--dataset=digits", *words)
    assert names(line, *message.split(" ... "))


def test_a_batch_of_one_that_batchnorm_cannot_take(tmp_path):
    """It is refused: with 8x8 pixels the last layers have one value per channel."""
    arguments = ("--dataset=digits", "--batch_size=1", "--max_steps=2", f"--output_dir={tmp_path / 'out'}")
    line = refused("jobs/train.py", *arguments)
    assert line.startswith("error: Expected more than 1 value") and "raise --batch_size" in line


def test_no_data_and_no_network_names_the_three_ways(tmp_path):
    (tmp_path / "data").mkdir()
    env = environment(
        https_proxy="http://127.0.0.1:9", HTTPS_PROXY="http://127.0.0.1:9", no_proxy="", NO_PROXY=""
    )
    line = _refused(tmp_path / "out", "jobs/train.py", "--data_url", tmp_path / "data", env=env)
    ways = ("cannot download https://www.cs.toronto.edu", "--custom_data=true", "cifar-10-batches-py")
    assert all(part in line for part in ways)
    assert list((tmp_path / "data").iterdir()) == []


def test_output_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "below", tmp_path / "file", "/proc/nowhere", tmp_path / ("x" * 300)):
        result = run("jobs/train.py", "--dataset=digits", "--train_url", path, code=2, timeout=60)
        assert (
            f"output_dir {path} cannot be written" in result.stderr and len(result.stderr.splitlines()) == 1
        )
        assert "data train" not in result.stdout, "found at the start"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_output_folder_that_is_a_dangling_link(tmp_path):
    link = tmp_path / "out"
    link.symlink_to("unmounted/runs")
    for path in (link, link / "7"):
        line = refused("jobs/train.py", "--dataset=digits", f"--output_dir={path}")
        assert names(line, f"{link} is a link", "unmounted/runs", "does not exist")


def test_output_that_is_a_url():
    for url, parts in (
        ("gs://bucket/out", ("output_dir gs://bucket/out", "URL", "expected", "folder", "s3://", "obs://")),
        ("s3://me:secret@bucket/out", ("s3://", "user name", "password")),
    ):
        line = refused("jobs/train.py", "--dataset=digits", f"--train_url={url}")
        assert names(line, *parts) and "secret@" not in line


@pytest.mark.parametrize("kind", ["fifo", "endless", "sparse"])
def test_files_without_an_end(kind, tmp_path):
    """A FIFO, an endless file and one of 1 TB are refused at once, and are not read into memory."""
    special = tmp_path / "special"
    if kind == "fifo":
        os.mkfifo(special)
    elif kind == "endless":
        special.symlink_to("/dev/zero")
    else:
        special.touch()
        os.truncate(special, 10**12)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "receipt.bin").symlink_to(special)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".lock").symlink_to(special)
    job = ["jobs/train.py", "--dataset=digits", "--width=8"]
    commands = [
        [*job, f"--config={special}"],
        ["-m", "launch", "submit", f"--config={special}"],
        ["-m", "launch", "receipt", tmp_path / "run", tmp_path / "run"],
    ]
    commands += [[*job, f"--output_dir={tmp_path / 'out'}"]] if kind != "sparse" else []
    for command in commands:
        refused(*command, timeout=60)


@pytest.mark.parametrize("name, value, text", [
    ("BOOTFILE_ERROR_PIPE", "abc", "x"),
    ("SM_HOSTS", "[" * 100_000, "SM_HOSTS"),
])  # fmt: skip
def test_values_of_the_environment(name, value, text, tmp_path):
    job = ("jobs/train.py", "--dataset=digits", *(["--lr=x"] if text == "x" else []))
    assert text in _refused(tmp_path / "out", *job, env=environment(**{name: value}))


def test_printed_values_of_the_environment_cannot_control_a_terminal(tmp_path):
    env = environment(RANK="0", WORLD_SIZE="1", MASTER_ADDR="a b\n\x1b[31m")
    result = run("jobs/train_ddp.py", *QUICK, "--max_steps=1", f"--output_dir={tmp_path}", env=env)
    assert "\x1b" not in result.stdout + result.stderr
    line, = (line for line in result.stdout.splitlines() if line.startswith("topology "))  # fmt: skip
    assert line.endswith("master=a b\\n\\x1b[31m:29500")


def test_a_file_system_without_rename_is_refused_before_the_first_step(tmp_path):
    """Some mounts of buckets have no rename. Without it no checkpoint can be saved."""
    code = (
        "import os, runpy, sys\n"
        "def fail(*args, **options): raise OSError(38, os.strerror(38))\n"
        "os.replace = os.rename = fail\n"
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    result = run("-c", code, "jobs/train.py", *QUICK, "--max_steps=3", f"--output_dir={tmp_path}", code=2)
    assert names(result.stderr, tmp_path, "cannot", "rename", "(Function not implemented)")
    assert "step=" not in result.stdout and not list(tmp_path.iterdir())

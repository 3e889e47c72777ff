"""jobs/loader.py and loader_dali.py work in one process and in several, and refuse bad input."""

import re

import pytest
import torch
from PIL import Image

from bootfile.receipt import reading, receipt
from datasets.folders import paired_images, random_folder
from datasets.loaders import backends
from tests.conftest import environment, records, refused, run, run_ranks

MISSING = backends.reasons(torch.device("cpu"))["dali"]
EPOCHS, STEPS, PAIRS = 2, 3, 26


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Return (arguments for generated pairs; their folder)."""
    cache = tmp_path_factory.mktemp("cache")
    folder = random_folder.make_pairs(str(cache / "pairs"))
    for split in ("train", "test"):
        paired_images.load(folder, split, str(cache))
    return f"--data_source={folder}", f"--cache_dir={cache}"


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory):
    """Return the output of loader.py in one process, and its folder."""
    output = tmp_path_factory.mktemp("alone")
    return run("jobs/loader.py", *data, f"--epochs={EPOCHS}", f"--result_dir={output}").stdout, output


def reported(text: str) -> list[tuple[int, int]]:
    """Return (step, pairs) of each line of a step. Check that steps, epochs and the job have a time."""
    progress = r"^epoch=\d step=(\d+)/\d+ time=\S+ eta=\S+ pairs=(\d+) seconds=\S+"
    steps = re.findall(rf"{progress}$", text, re.MULTILINE)
    epochs = re.findall(rf"{progress} images_per_s=\d\S* receipt=([0-9a-f]{{16}})$", text, re.MULTILINE)
    total = re.findall(
        r"^total_seconds=\d+\.\d{4} epochs=\d steps=\d+ receipt=([0-9a-f]{16})$", text, re.MULTILINE
    )
    assert len(total) == 1 and epochs[-1][-1] == total[0]
    return [(int(step), int(pairs)) for step, pairs in steps]


@pytest.mark.thorough
def test_times_receipt_and_contact_sheet(alone):
    printed, output = alone
    assert reported(printed) == [(1, 12), (2, 12), (3, 2), (4, 12), (5, 12), (6, 2)]
    lines = records(output)
    assert [(line["epoch"], line["step"], line["pairs"]) for line in lines] == [(1, 3, PAIRS), (2, 6, PAIRS)]
    assert len(reading.read_records(str(output))) == EPOCHS * STEPS
    with Image.open(output / "preview.png") as sheet:  # 12 pairs, four in a row, two pixels between images
        assert sheet.size == (8 * 258 + 2, 3 * 258 + 2)


@pytest.mark.parametrize("job, processes", [("loader.py", 3), ("loader_dali.py", 1)])
def test_the_same_receipt_in_any_number_of_processes_from_both_jobs(job, processes, alone, data, tmp_path):
    if job == "loader_dali.py" and MISSING:
        pytest.skip(MISSING)
    command = (f"jobs/{job}", *data, f"--epochs={EPOCHS}", f"--result_dir={tmp_path}")
    printed = run_ranks(*command, ranks=processes)[0].stdout
    assert len(reported(printed)) == EPOCHS * STEPS, "only rank 0 reports"
    assert (tmp_path / receipt.FILE).read_bytes() == (alone[1] / receipt.FILE).read_bytes()
    assert [line["pairs"] for line in records(tmp_path)] == [PAIRS, PAIRS]


def test_without_data_the_test_split_resized(tmp_path):
    """The job uses eight generated pairs in batches of six, in two processes."""
    printed = run_ranks(
        "jobs/loader.py", "--split=test", "--batch_size=6", "--resize=360", "--crop=64",
        f"--train_url={tmp_path}", f"--preview={tmp_path / 'sheet.png'}",
    )[0].stdout  # fmt: skip
    assert re.search(r"^data test=8 pairs, steps_per_epoch=2 source=\S+/generated_pairs/test$", printed, re.M)
    assert reported(printed) == [(1, 3), (2, 1)] and records(tmp_path)[0]["pairs"] == 8
    assert (tmp_path / "sheet.png").exists() and not (tmp_path / "preview.png").exists()


@pytest.mark.parametrize("arguments, message", [
    (["--crop=400"], "52 of 52 images are smaller than --crop 400: "),
    (["--preview=sheet.gltf"], "cannot write --preview sheet.gltf: unknown file extension"),
])  # fmt: skip
def test_bad_input_is_one_line(arguments, message, data, tmp_path):
    assert message in refused("jobs/loader.py", *data, f"--result_dir={tmp_path}", *arguments)


@pytest.mark.thorough
def test_dali_that_is_not_installed(data, tmp_path):
    """Another package called nvidia, without DALI, hides the installed one."""
    (tmp_path / "site" / "nvidia").mkdir(parents=True)
    (tmp_path / "site" / "nvidia" / "__init__.py").touch()
    env = environment(PYTHONPATH=str(tmp_path / "site"))
    line = refused("jobs/loader_dali.py", *data, f"--result_dir={tmp_path / 'out'}", env=env)
    assert "DALI cannot be imported" in line and "pip install nvidia-dali-cuda120" in line


@pytest.mark.gpu
def test_jobs_on_a_gpu_have_the_receipt_of_the_cpu(alone, data, tmp_path):
    pytest.importorskip("nvidia.dali")
    env = environment()
    env.pop("CUDA_VISIBLE_DEVICES", None)
    for name, *command in (
        ("plain", "jobs/loader.py"),
        ("cpu", "jobs/loader_dali.py", "--dali_device=cpu"),
        ("gpu", "jobs/loader_dali.py", "--dali_device=gpu"),
    ):
        output = tmp_path / name
        run(
            *command, *data, f"--epochs={EPOCHS}", "--processes_per_node=1", f"--result_dir={output}", env=env
        )
        assert (output / receipt.FILE).read_bytes() == (alone[1] / receipt.FILE).read_bytes()

"""imagenet.py --exact_shards has the same bits on any number of processes, with each engine."""

import pytest

from tests.conftest import run, run_ranks
from tests.support.exact import facts

ALL = (
    "jobs/imagenet.py", "--custom_data=true", "--arch=resnet18", "--image_size=32", "--batch_size=32",
    "--exact_shards=8", "--accumulate=2", "--trivial_augment", "--mixup=0.4", "--clip_grad=0.5", "--ema=0.9",
    "--epochs=1", "--warmup=0", "--max_steps=3", "--report_every=1", "--save_every=1", "--workers=1",
)  # fmt: skip
ENGINES = {
    "threads": ("--optimizer=adamw", "--lr=0.001"),
    "pytorch": ("--lr=0.02",),
    "pack": ("--data_backend=threads", "--lr=0.02"),
    "ray": ("--lr=0.02",),
}


def trained(output, processes, *options) -> dict:
    run_ranks(*ALL, *options, f"--output_dir={output / str(processes)}", ranks=processes)
    return facts(output / str(processes))


@pytest.mark.parametrize("engine", [*list(ENGINES)[:3], pytest.param("ray", marks=pytest.mark.faults)])
def test_bits_are_equal(engine, tmp_path):
    """With augmentation, mixup, a clipped norm, micro-batches and an average of the weights."""
    backend = (f"--pack={tmp_path / 'pack'}",) if engine == "pack" else (f"--data_backend={engine}",)
    options = (*ENGINES[engine], *backend, f"--cache_dir={tmp_path / 'cache'}")
    several = (1, 2, 8) if engine == "threads" else (1, 2)
    runs = {processes: trained(tmp_path, processes, *options) for processes in several}
    assert any(name.startswith("ema.") for name in runs[1]["state"][3])
    assert any("val_top5" in line for line in runs[1]["figures"])
    for processes in several[1:]:
        assert runs[processes] == runs[1], processes


BAD = {
    ("--accumulate=3",): "shards x 3 of --accumulate",
    ("--gradient_compression=bf16",): "--exact_shards and --gradient_compression exclude each other",
    ("--batch_size=24",): "expected an even number of samples",
    ("--batch_size=36",): "batch size 36 is not divisible by 8 shards",
}


@pytest.mark.parametrize("options", BAD, ids=" ".join)
def test_bad_input_is_one_line(options, tmp_path):
    result = run(*ALL, "--accumulate=1", *options, f"--output_dir={tmp_path}", code=2)
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert BAD[options] in line

"""imagenet.py --exact_shards has the same bits on any number of processes, with each engine."""

import pytest

from tests.conftest import environment, names, refused, run, run_ranks
from tests.support.exact import facts

ALL = (
    "jobs/imagenet.py", "--custom_data=true", "--arch=shufflenet_v2_x0_5", "--image_size=32",
    "--batch_size=32", "--exact_shards=8", "--accumulate=2", "--trivial_augment", "--mixup=0.4",
    "--clip_grad=0.5", "--ema=0.9", "--epochs=1", "--warmup=0", "--max_steps=3",
    "--report_every=1", "--save_every=1", "--workers=1",
)  # fmt: skip
ENGINES = {
    "threads": ("--optimizer=adamw", "--lr=0.001"),
    "pytorch": ("--lr=0.02",),
    "pack": ("--data_backend=threads", "--lr=0.02"),
    "ray": ("--lr=0.02",),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Return the option of a folder for the generated images, which are made once."""
    return f"--cache_dir={tmp_path_factory.mktemp('cache')}"


def trained(output, processes, *options) -> dict:
    run_ranks(*ALL, *options, f"--output_dir={output / str(processes)}", ranks=processes)
    return facts(output / str(processes))


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ENGINES)
def test_bits_are_equal(engine, cache, tmp_path):
    """With augmentation, mixup, a clipped norm, micro-batches and an average of the weights."""
    backend = (f"--pack={tmp_path / 'pack'}",) if engine == "pack" else (f"--data_backend={engine}",)
    options = (*ENGINES[engine], *backend, cache)
    processes = 4 if engine == "threads" else 2
    one, other = (trained(tmp_path, number, *options) for number in (1, processes))
    assert other == one and any(name.startswith("ema.") for name in one["state"][3])
    assert any("val_top5" in line for line in one["figures"])


BAD = {
    ("--accumulate=3",): ("shards x 3 of --accumulate",),
    ("--batch_size=24",): ("--mixup", "expected an even number"),
    ("--batch_size=36",): ("batch size 36", "not divisible", "8 shards"),
}


@pytest.mark.parametrize("options", BAD, ids=" ".join)
def test_bad_input_is_one_line(options, tmp_path):
    assert names(refused(*ALL, "--accumulate=1", *options, f"--output_dir={tmp_path}"), *BAD[options])


# a compiler that takes seconds, in place of Inductor
TRACED = """
import runpy, sys, torch
compile = torch.compile
torch.compile = lambda module, **options: compile(module, backend="eager", dynamic=False)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.thorough
@pytest.mark.parametrize("processes, options", [
    (1, ("--exact_shards=4",)),
    (1, ("--exact_shards=4", "--accumulate=2", "--ema=0.9")),
    (2, ("--exact_shards=4",)),
    (2, ("--accumulate=2",)),
    (1, ()),
])  # fmt: skip
def test_a_network_is_compiled_once(processes, options, cache, tmp_path):
    """What watches the losses between two forward passes of a step is not there within them."""
    job = (
        "jobs/imagenet.py", "--custom_data=true", "--arch=shufflenet_v2_x0_5", "--image_size=32",
        "--batch_size=16", "--warmup=0", "--max_steps=2", "--training_only", "--compile=true", "--workers=1",
    )  # fmt: skip
    printed = run(
        "-c", TRACED, *job, *options, f"--processes_per_node={processes}", cache, f"--output_dir={tmp_path}",
        fresh=True, env=environment(TORCH_LOGS="recompiles"),
    )  # fmt: skip
    assert "not compiled" not in printed.stdout
    assert "Recompiling function" not in printed.stderr
    assert "training_seconds" in printed.stdout

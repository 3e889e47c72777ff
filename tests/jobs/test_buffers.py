"""BatchNorm's statistics stay out of the forward pass of DistributedDataParallel."""

import textwrap

import pytest

from tests.conftest import QUICK, ROOT, run

NO_BROADCAST = textwrap.dedent(f"""
    import runpy, sys, torch
    sys.path.insert(0, {str(ROOT)!r})

    def refuse(*_):
        raise AssertionError("buffers were sent before a forward pass")

    torch.nn.parallel.DistributedDataParallel._sync_buffers = refuse
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
""")


@pytest.mark.parametrize(
    "job",
    [
        ["train_ddp.py", *QUICK],
        ["imagenet.py", "--custom_data=true", "--arch=resnet18", "--image_size=32", "--training_only"],
    ],
)
def test_no_broadcast_before_a_forward_pass(job, tmp_path):
    result = run(
        "-c", NO_BROADCAST, f"jobs/{job[0]}", *job[1:], "--processes_per_node=2", "--batch_size=8",
        "--max_steps=2", f"--output_dir={tmp_path}",
    )  # fmt: skip
    assert "FutureWarning" not in result.stderr
    assert "2 processes" in result.stdout

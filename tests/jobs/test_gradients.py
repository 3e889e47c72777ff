"""What DistributedDataParallel sends in the jobs: gradients in buckets, bfloat16 with a hook; no buffers."""

import re
import textwrap

import pytest

from tests.conftest import QUICK, records, run_ranks

# Runs a job, with a hook that sends bfloat16 if the first argument is "bf16". Before every optimizer step it
# prints the number of gradients, the number of their storages, and whether each is exact in bfloat16.
# BatchNorm's statistics must not be sent before a forward pass.
WATCHED = textwrap.dedent("""
    import runpy, sys
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def look(optimizer, *_):
        gradients = [each.grad for group in optimizer.param_groups for each in group["params"]]
        pieces = {each.untyped_storage().data_ptr() for each in gradients}
        rounded = all(torch.equal(each, each.bfloat16().to(each.dtype)) for each in gradients)
        sys.stdout.write(f"gradients={len(gradients)} pieces={len(pieces)} bfloat16={rounded}\\n")

    def refuse(*_):
        raise AssertionError("buffers were sent before a forward pass")

    class Compressed(torch.nn.parallel.DistributedDataParallel):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.register_comm_hook(None, default_hooks.bf16_compress_hook)

    torch.nn.parallel.DistributedDataParallel._sync_buffers = refuse
    register_optimizer_step_pre_hook(look)
    if sys.argv[1] == "bf16":
        torch.nn.parallel.DistributedDataParallel = Compressed
    sys.argv = sys.argv[2:]
    runpy.run_path(sys.argv[0], run_name="__main__")
""")
IMAGENET = (
    "jobs/imagenet.py", "--custom_data=true", "--arch=resnet18", "--image_size=32", "--data_backend=threads",
    "--training_only",
)  # fmt: skip
SMALL = ("--batch_size=64", "--report_every=1")


def watched(tmp_path, kind, *job) -> tuple[set, list[float]]:
    """Return ({(gradients, storages, "True" or "False") of every step of every process}, losses)."""
    script = tmp_path / "watched.py"
    script.write_text(WATCHED)
    results = run_ranks(script, kind, *job, *SMALL, f"--output_dir={tmp_path / 'output'}")
    printed = "".join(result.stdout for result in results)
    assert "FutureWarning" not in results[0].stderr and "2 processes" in printed
    seen = re.findall(r"^gradients=(\d+) pieces=(\d+) bfloat16=(\w+)$", printed, re.MULTILINE)
    losses = [line["loss"] for line in records(tmp_path / "output") if "loss" in line]
    assert len(seen) == 2 * len(losses)
    return {(int(gradients), int(pieces), rounded) for gradients, pieces, rounded in seen}, losses


def in_buckets(seen) -> bool:
    """Return whether the gradients are views of the buckets. Copies would take twice the memory."""
    return all(gradients == 62 and pieces <= 4 for gradients, pieces, _ in seen)


@pytest.mark.thorough
def test_bfloat16_is_sent_and_training_is_nearly_the_same(tmp_path):
    """The first loss is equal, later ones differ by less than 0.02. The loss changes by more than 0.15."""
    job = (*IMAGENET, "--lr=0.001", "--max_steps=6")
    losses = {}
    for kind, rounded in (("none", "False"), ("bf16", "True")):
        (tmp_path / kind).mkdir()
        seen, losses[kind] = watched(tmp_path / kind, kind, *job)
        assert in_buckets(seen) and {each for *_, each in seen} == {rounded}
    plain, compressed = losses["none"], losses["bf16"]
    assert len(plain) == 6 and plain[0] == compressed[0] and plain[2:] != compressed[2:]
    assert compressed == pytest.approx(plain, abs=0.02)
    assert max(plain) - min(plain) > 0.15


def test_train_ddp_sends_no_buffers(tmp_path):
    _, losses = watched(tmp_path, "none", "jobs/train_ddp.py", *QUICK, "--max_steps=2")
    assert len(losses) == 2


@pytest.mark.thorough
def test_parts_of_a_batch_are_sent_once(tmp_path):
    """The sum of the micro-batches is sent with the last one, as bfloat16."""
    job = (*IMAGENET, "--accumulate=2", "--lr=0.001", "--max_steps=3")
    seen, losses = watched(tmp_path, "bf16", *job)
    assert in_buckets(seen) and {each for *_, each in seen} == {"True"} and len(losses) == 3

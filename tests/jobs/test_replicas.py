"""Habits with DistributedDataParallel that train wrongly end with a tensor's name, or are one warning."""

import pytest

from tests.conftest import names, run_ranks
from tests.jobs.test_train_own import write_job

OPTIONS = (
    "--report_every=1",
    "--epochs=3",
    "--batch_size=96",
    "--lr=0.01",
    "--workers=1",
    "--save_every=100",
)
LAYERS = "    model = torch.nn.Sequential(*layers)\n"
WRAPPED = "    forward.broadcast_buffers = False"
EPOCH = "        model.train()\n"
STEP = "outputs = forward(inputs)\n"
FREEZE = LAYERS + "    model[0].requires_grad_(False)\n"
UNFREEZE = EPOCH + "        model[0].requires_grad_(epoch > 1)\n"
WRAP_AGAIN = """
        if epoch > 1 and not model[0].weight.requires_grad:
            model[0].requires_grad_(True)
            forward = torch.nn.parallel.DistributedDataParallel(model)
"""
ON_RANK_1 = """
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.extra = torch.nn.Sequential(*layers), torch.nn.Linear(1, 1)
            self.register_buffer("queue", torch.zeros(64))

        def forward(self, x):
            z = self.body(x)
            return z + self.extra(z[:, None])[:, 0] if torch.distributed.get_rank() else z

    model = Net()
"""
QUEUE = ON_RANK_1.replace("if torch.distributed.get_rank() else z", "- self.queue.mean()").replace(
    "z = self.body(x)", "z = self.body(x); self.queue = z.detach().mean().expand(64).clone()"
)
NORMED = LAYERS.replace("*layers", "torch.nn.BatchNorm1d(10), *layers")
RECALIBRATED = """\
                optimizer.step()
                model[0].running_mean.copy_(inputs.mean(0))
"""
ALONE = "                if not torch.distributed.get_rank(): optimizer.step()\n"


def job_of(folder, *changes):
    job = write_job(folder, None, distributed=True)
    text = job.read_text(encoding="utf-8")
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    job.write_text(text, encoding="utf-8")
    return job


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            [(LAYERS, FREEZE), (EPOCH, UNFREEZE)],
            "model.0.weight of rank 1 is not ... rank 0 after step 4",
        ),
        (
            [(STEP, "outputs = model(inputs)\n")],
            "model.0.weight of rank 1 is not ... rank 0 after step 1",
        ),
        (
            [(WRAPPED, f"{WRAPPED}\n    model[2] = torch.nn.Linear(64, 1)")],
            "rank 0: a layer ... replaced ... no gradient",
        ),
        (
            [("                optimizer.step()\n", ALONE)],
            "not all ranks ... optimizer step of step 1 (rank 0: True)",
        ),
        ([(LAYERS, ON_RANK_1)], "rank 0: extra.weight, extra.bias ... no gradient"),
    ],
    ids=["unfrozen later", "model called", "layer replaced", "step of one rank", "used by one rank"],
)
def test_ranks_that_train_apart_end_with_the_name_of_the_first_tensor(changes, message, tmp_path):
    job = job_of(tmp_path / "job", *changes)
    results = run_ranks(job, *OPTIONS, f"--output_dir={tmp_path / 'output'}", code=None)
    assert 2 in {result.returncode for result in results}
    parts = f"error: {message}".split(" ... ")
    assert any(names(result.stderr, *parts) for result in results), results
    assert not any("Traceback" in result.stderr for result in results)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ([], None),
        ([(LAYERS, FREEZE), (EPOCH, EPOCH + WRAP_AGAIN)], None),
        ([(LAYERS, QUEUE)], "warning: model.queue of rank 1 is not ... rank 0"),
        ([(LAYERS, NORMED)], None),
        (
            [(LAYERS, NORMED), ("                optimizer.step()\n", RECALIBRATED)],
            "warning: model.0.running_mean of rank 1 is not ... rank 0 after step 1",
        ),
    ],
    ids=[
        "nothing",
        "wrapped again",
        "buffer of a rank",
        "synchronised statistics",
        "statistics of a rank",
    ],
)
def test_what_is_right_has_no_warning_and_what_may_be_wrong_has_one(changes, warning, tmp_path):
    job = job_of(tmp_path / "job", *changes)
    printed = run_ranks(job, *OPTIONS, f"--output_dir={tmp_path / 'output'}")[0].stdout
    assert printed.count("warning") == bool(warning) and names(printed, *(warning or "").split(" ... "))

"""train_exact.py has the same bits on any number of processes."""

import signal

import pytest

from bootfile.histories import read_states
from launch.new.cli import make_job
from tests.conftest import QUICK, losses, names, refused, run_ranks
from tests.support.exact import changed, facts

SMALL = (*QUICK, "--batch_size=32", "--max_steps=6", "--save_every=2", "--report_every=1", "--lr=0.02")
SGD = "optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, **recipe)"
MODEL = "    model = model.to(device).to(memory_format=torch.channels_last)\n"
LOSS = "            loss = criterion(logits, targets)\n"
DROPOUT = (MODEL, "    model.conv5.append(torch.nn.Dropout(0.5))\n" + MODEL)
NOT_FINITE = (
    LOSS,
    f"{LOSS}            if (train_loader.step, shards.index) == (3, 5): loss = loss * torch.nan\n",
)
ADAMW = (SGD, "optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)")
KILLED = (
    "            due = checkpoint.end_step()\n",
    "            if train_loader.step == int(os.environ.get('KILL_AT', 0)):\n"
    "                os.kill(os.getpid(), 9)\n"
    "            due = checkpoint.end_step()\n",
)


def trained(tmp_path, job, processes, *options, usual=SMALL) -> dict:
    output = tmp_path / str(processes)
    run_ranks(job, *usual, *options, f"--output_dir={output}", ranks=processes)
    return facts(output)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the output folder of a run on one process."""
    folder = tmp_path_factory.mktemp("alone")
    trained(folder, "jobs/train_exact.py", 1)
    return folder / "1"


@pytest.mark.parametrize(
    "processes", [3, 8, *[pytest.param(each, marks=pytest.mark.thorough) for each in (2, 5, 7)]]
)
def test_sgd_is_equal_on_1_to_8_processes(processes, alone, tmp_path):
    """8 shards, which 3, 5 and 7 do not divide."""
    one = facts(alone)
    assert len(one["state"]) == 3 and len(one["figures"]) == 7 and len(one["weights"]) == 2
    parts = one["state"][6]
    assert any("momentum_buffer" in name for name in parts) and "model.conv1.0.weight" in parts
    assert any("running_var" in name for name in parts)
    assert trained(tmp_path, "jobs/train_exact.py", processes) == one
    reported = losses(alone)
    assert max(reported) - min(reported) > 0.02, "the loss does not change"


@pytest.mark.thorough
def test_without_the_tree_the_bits_differ(tmp_path):
    """all_reduce in place of the tree: so the test above can fail."""
    attach = "    shards.attach(forward)"
    add = "    shards._sum_over_ranks = lambda rows: torch.distributed.all_reduce(rows) or rows[0]\n"
    job = changed("train_exact.py", tmp_path / "job.py", (attach, add + attach))
    assert trained(tmp_path, job, 8) != trained(tmp_path, job, 1)


@pytest.mark.thorough
@pytest.mark.parametrize("shards", [8, 2])
def test_adamw_dropout_and_a_step_that_is_not_finite(shards, tmp_path):
    """One shard of step 3 has no finite loss: all processes skip the step."""
    changes = (ADAMW, DROPOUT, NOT_FINITE) if shards == 8 else (ADAMW, DROPOUT)
    job = changed("train_exact.py", tmp_path / "job.py", *changes)
    option = f"--exact_shards={shards}"
    runs = {processes: trained(tmp_path, job, processes, option) for processes in (1, 2, shards)}
    assert runs[2] == runs[1] and runs[shards] == runs[1]
    skipped = [line["step"] for line in runs[1]["figures"] if line.get("loss") == "NaN"]
    assert skipped == ([3] if shards == 8 else [])


@pytest.mark.thorough
def test_a_table_with_dropout_and_the_users_metrics(tmp_path):
    """The job of `launch new --exact`, of train_own.py's data."""
    changes = ("torch.nn.ReLU(), ", "torch.nn.ReLU(), torch.nn.Dropout(0.3), ")
    job = changed(make_job(ddp=True, amp=False, exact=True), tmp_path / "job.py", changes)
    options = ("--batch_size=32", "--max_steps=24", "--save_every=8", "--report_every=1", "--lr=0.01")
    one, two, eight = (trained(tmp_path, job, processes, usual=options) for processes in (1, 2, 8))
    assert two == one and eight == one and "val_r2" in one["figures"][-1]


RARE = """

    class Rare(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = torch.nn.Linear(10, 64), torch.nn.Linear(32, 1)
            self.rare = torch.nn.Linear(64, 64)
            self.strided = torch.nn.Parameter(torch.randn(64, 64)[:, ::2] / 8)

        def forward(self, inputs):
            inputs = self.first(inputs).relu()
            if self.training and torch.rand(()) < 0.3:  # of this shard
                inputs = inputs + self.rare(inputs)
            return self.last(inputs @ self.strided).flatten()

    class Relative(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("level", torch.tensor(1.0))
            self.scale = torch.nn.Parameter(torch.tensor(1.0))

        def forward(self, outputs, targets):
            loss = (outputs * self.scale - targets).square().mean()
            if torch.is_grad_enabled():
                self.level = self.level.lerp(loss.detach(), 0.1)
            return loss / self.level

    model, criterion = Rare(), Relative()
"""
UNUSUAL = (
    ("    model = torch.nn.Sequential(*layers)\n", RARE),
    ("    criterion = torch.nn.MSELoss()\n", ""),
    (
        "torch.optim.SGD(model.parameters(),",
        "torch.optim.SGD([*model.parameters(), *criterion.parameters()],",
    ),
    (
        "OneCycleLR(\n        optimizer, args.lr, total_steps=total_steps, cycle_momentum=False\n",
        "ReduceLROnPlateau(\n        optimizer, patience=1, threshold=0.05\n",
    ),
    ("            scheduler.step()", "            scheduler.step(loss)"),
    (
        "            optimizer.zero_grad()\n",
        "            if train_loader.step % 3 == 1:\n                optimizer.zero_grad()\n",
    ),
    (
        "                optimizer.step()\n",
        "                if not train_loader.step % 3 and loss < 2:\n                    optimizer.step()\n",
    ),
)


@pytest.mark.thorough
def test_unusual_parts_have_the_same_bits(tmp_path):
    """A rare layer, a strided parameter, a criterion with a parameter and a level, gradients of three steps,
    a schedule and a step that depend on the loss."""
    job = changed(make_job(ddp=True, amp=False, exact=True), tmp_path / "job.py", *UNUSUAL)
    options = ("--batch_size=32", "--max_steps=24", "--save_every=3", "--report_every=1", "--lr=0.01")
    one, four = (trained(tmp_path, job, processes, usual=options) for processes in (1, 4))
    assert four == one and "criterion.level" in one["state"][24]
    assert len({line["lr"] for line in one["figures"] if "lr" in line}) > 1


@pytest.mark.thorough
def test_a_run_that_is_killed_on_2_and_8_processes_ends_on_1_as_the_undisturbed_run(tmp_path, monkeypatch):
    job = changed("train_exact.py", tmp_path / "job.py", DROPOUT, KILLED)
    options = (job, *SMALL, "--max_steps=12")
    run_ranks(*options, f"--output_dir={tmp_path / 'whole'}", ranks=4)
    for processes, kill_at in ((2, 5), (8, 9), (1, 0)):
        code = -signal.SIGKILL if kill_at else 0
        monkeypatch.setenv("KILL_AT", str(kill_at))
        run_ranks(*options, f"--output_dir={tmp_path / 'killed'}", ranks=processes, code=code)
    assert facts(tmp_path / "killed") == facts(tmp_path / "whole")
    assert read_states(str(tmp_path / "killed")).keys() == {2, 4, 6, 8, 10, 12}


def test_a_checkpoint_of_another_number_of_shards_is_refused(alone):
    line = refused("jobs/train_exact.py", *SMALL, "--exact_shards=4", f"--output_dir={alone}")
    assert "its --exact_shards is 8, this run's is 4" in line


BAD = {
    "6": ("--exact_shards 6", "power of two", "1 processes"),
    "0": ("at least 1",),
    "64": ("batch size 32", "not divisible", "64 shards"),
}


@pytest.mark.parametrize("shards", BAD)
def test_a_bad_number_of_shards_is_one_line(shards, tmp_path):
    line = refused("jobs/train_exact.py", *SMALL, f"--exact_shards={shards}", f"--output_dir={tmp_path}")
    assert names(line, *BAD[shards])


def test_more_processes_than_shards_are_one_line(tmp_path):
    for result in run_ranks("jobs/train_exact.py", *SMALL, "--exact_shards=2", ranks=4, code=2):
        (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert names(line, "--exact_shards 2", "power of two", "4 processes")


# on one process it would be the value of shard 0
LAZY = """
    class Scaled(torch.nn.Module):
        scale = None

        def forward(self, logits):
            self.scale = logits.detach().std() if self.scale is None else self.scale
            return logits / self.scale

    model = torch.nn.Sequential(model, Scaled())
"""
CHANGES = {
    "--exact_shards: the model: output 0 changes": (MODEL, LAZY + MODEL),
    "cudnn.benchmark is True": (MODEL, MODEL + "    torch.backends.cudnn.benchmark = True\n"),
    "the criterion communicates": (
        LOSS, LOSS + "            torch.distributed.all_reduce(loss.detach())\n",
    ),
    "expected a DistributedDataParallel (not FSDP), got _ResNet": (
        "    shards.attach(forward)", "    shards.attach(model)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", CHANGES)
def test_a_change_that_breaks_the_promise_is_one_line_before_the_first_step(reason, tmp_path):
    job = changed("train_exact.py", tmp_path / "job.py", CHANGES[reason])
    for result in run_ranks(job, *SMALL, f"--output_dir={tmp_path / 'output'}", code=2):
        (line,) = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
        assert reason in line
    assert not (tmp_path / "output" / "state.jsonl").exists()

"""--sample_losses keeps the loss of each sample, and `launch data RUN --around STEP` names the largest."""

import re
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bootfile.ground.errors import BadInput
from common.run.sample_losses import SampleLosses, path_of, read
from launch.data import cli
from tests.conftest import QUICK, interrupt, losses, records, refused, run, run_ranks
from tests.support.exact import changed

KEPT = (
    *QUICK, "--batch_size=100", "--max_steps=6", "--report_every=1", "--save_every=2", "--sample_losses=true",
)  # fmt: skip
PLANTED = 17  # an id


def read_all(folder, rank: int) -> dict:
    return read(str(folder), rank, range(1, 1000))


def run_planted(folder, line, *options) -> list[tuple[int, np.ndarray]]:
    """Run train.py with a line after the forward pass; `own` is where the batch has the planted sample.
    Return (step, losses of the planted sample)."""
    place = "            logits = forward(inputs)\n"
    own = f"            own = torch.from_numpy(train_loader.batch.ids == {PLANTED})\n"
    job = changed("train.py", folder / "job.py", (place, f"{place}{own}            {line}\n"))
    output = folder / "run"
    words = (*QUICK, "--batch_size=100", "--report_every=1", "--sample_losses=true", *options)
    run(job, *words, f"--output_dir={output}")
    return [(step, found[ids == PLANTED]) for step, (ids, found) in read_all(output, 0).items()]


def first_row(capsys, folder, step: int) -> dict[str, str]:
    assert cli.main([str(folder), f"--around={step}"]) == 0
    head, first, *_ = capsys.readouterr().out.partition("\n\n")[2].splitlines()
    return dict(zip(head.split(), first.split(), strict=True))


def test_the_mean_is_the_loss_of_the_report_and_training_does_not_change(tmp_path):
    run("jobs/train.py", *KEPT, f"--output_dir={tmp_path / 'kept'}")
    run("jobs/train.py", *KEPT[:-1], f"--output_dir={tmp_path / 'plain'}")
    kept, plain = losses(tmp_path / "kept"), losses(tmp_path / "plain")
    assert kept == plain
    means = [each.mean() for _, each in read_all(tmp_path / "kept", 0).values()]
    assert np.allclose(means, kept, rtol=1e-5) and len(means) == 6
    weights = [torch.load(tmp_path / name / "epoch_1.pth", weights_only=True) for name in ("kept", "plain")]
    assert all(torch.equal(each, weights[1][name]) for name, each in weights[0].items())
    assert not (tmp_path / "plain/losses-0.bin").exists()


JOBS = {
    "train_exact": (*KEPT, "--exact_shards=4"),
    "imagenet": (
        "--custom_data=true", "--arch=resnet18", "--image_size=32", "--batch_size=32", "--epochs=1",
        "--warmup=0", "--accumulate=2", "--mixup=0.2", "--loss=bce", "--exact_shards=2", "--training_only",
        *KEPT[len(QUICK) + 1 :],
    ),
    "train_own": ("--batch_size=32", "--lr=0.01", *KEPT[len(QUICK) + 1 :]),
}  # fmt: skip


@pytest.mark.parametrize(
    "job", [pytest.param(name, marks=[pytest.mark.thorough] * (name == "imagenet")) for name in JOBS]
)
def test_the_losses_of_shards_and_micro_batches_are_those_of_the_step(job, tmp_path, capsys):
    run(f"jobs/{job}.py", *JOBS[job], f"--output_dir={tmp_path}")
    means = [each.mean() for _, each in read_all(tmp_path, 0).values()]
    assert np.allclose(means, losses(tmp_path), rtol=1e-5) and len(means) == 6
    assert first_row(capsys, tmp_path, 6)["rank"] == "0"


@pytest.mark.thorough
def test_two_processes_write_their_own_parts(tmp_path, capsys):
    run_ranks("jobs/train_ddp.py", *KEPT, f"--output_dir={tmp_path}")
    own = [read_all(tmp_path, rank) for rank in range(2)]
    steps = [line for line in records(tmp_path) if "loss" in line]
    for line in steps:
        found = np.concatenate([each[line["step"]][1] for each in own])
        assert len(found) == 100 and np.isclose(found.mean(), line["loss"], rtol=1e-5)
    row = first_row(capsys, tmp_path, 6)
    ids, found = own[int(row["rank"])][int(row["step"])]
    assert float(row["loss"]) == pytest.approx(found.max(), rel=1e-5)
    assert int(row["id"]) == ids[found.argmax()]


@pytest.mark.thorough
def test_a_restart_with_another_number_of_processes_has_each_step_once(tmp_path, capsys):
    words = ("jobs/train_ddp.py", *KEPT, "--epochs=40", "--max_steps=60", f"--output_dir={tmp_path}")
    interrupt(*words, "--processes_per_node=2", at=r"step=5/")
    run(*words)
    parts = [read_all(tmp_path, rank) for rank in range(2)]
    assert list(parts[0]) == [*range(1, 61)]
    kept = {}
    for step, (_, first) in parts[0].items():
        kept[step] = first if len(first) == 100 else np.concatenate([first, parts[1][step][1]])
    assert len(parts[0][5][1]) == 50 and len(parts[0][60][1]) == 100
    reported = {line["step"]: line["loss"] for line in records(tmp_path) if "loss" in line}
    assert np.allclose([kept[step].mean() for step in reported], [*reported.values()], rtol=1e-5)
    start = next(step for step, (_, own) in parts[0].items() if len(own) == 100)
    assert cli.main([str(tmp_path), f"--around={start + 1}"]) == 0  # ids are those of the receipt


@pytest.mark.thorough
@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_a_restart_gives_the_same_file(tmp_path, by):
    for name in ("whole", "killed"):
        words = ("jobs/train.py", *KEPT, f"--output_dir={tmp_path / name}")
        if name == "killed":
            interrupt(*words, at=r"step=3/", by=by)
            assert read_all(tmp_path / name, 0).keys() >= {1, 2, 3}
        run(*words)
    whole, killed = (Path(path_of(str(tmp_path / name), 0)).read_bytes() for name in ("whole", "killed"))
    assert whole == killed and len(whole) == 6 * (16 + 100 * 12)


@pytest.mark.thorough
def test_losses_that_are_kept_from_a_restart_on_are_found(tmp_path, capsys):
    words = (*KEPT[:-1], f"--output_dir={tmp_path}")
    run("jobs/train.py", *words, "--max_steps=3")
    run("jobs/train.py", *words, "--sample_losses=true")
    assert list(read_all(tmp_path, 0)) == [4, 5, 6]
    assert first_row(capsys, tmp_path, 5)["step"] in ("4", "5")
    assert "step 3" in refused("-m", "launch", "data", str(tmp_path), "--around=3")


def test_a_loss_that_is_not_a_number_is_kept_and_named(tmp_path, capsys):
    steps = run_planted(tmp_path, "logits = logits.masked_fill(own[:, None], torch.nan)", "--epochs=1")
    spike, = (step for step, found in steps if len(found))  # fmt: skip
    row = first_row(capsys, tmp_path / "run", spike)
    assert (row["step"], row["loss"], row["id"], row["rank"]) == (str(spike), "nan", str(PLANTED), "0")


@pytest.mark.thorough
def test_a_wrong_label_is_named(tmp_path, capsys):
    """The network is sure of the right label of the sample, so that its loss is the largest on any CPU."""
    is_sure = "logits = logits + 50 * own[:, None] * torch.nn.functional.one_hot(targets, 10)"
    is_wrong = "targets = torch.where(own, (targets + 5) % 10, targets)"
    steps = run_planted(tmp_path, f"{is_sure}; {is_wrong}", "--epochs=2")
    spike = [step for step, found in steps if len(found)][-1]
    assert cli.main([str(tmp_path / "run"), f"--around={spike}"]) == 0
    table = capsys.readouterr().out.split("\n\n")[1]
    head, *rows = (line.split() for line in table.splitlines())
    named = [(row[head.index("step")], row[head.index("id")]) for row in rows]
    assert len(named) == 10 and named[0] == (str(spike), str(PLANTED))


def test_a_criterion_of_means_is_refused(tmp_path):
    line = refused("jobs/train_text.py", "--sample_losses=true", f"--output_dir={tmp_path / 'run'}")
    assert re.search(r"--sample_losses.*reduction", line) and not (tmp_path / "run/metrics.jsonl").exists()


def test_a_run_without_losses_is_refused(tmp_path):
    run("jobs/train.py", *KEPT[:-1], f"--output_dir={tmp_path}")
    assert "--sample_losses true" in refused("-m", "launch", "data", str(tmp_path), "--around=3")


class Steps:
    """A SampleLosses without a job: the k-th batch has the ids 8 k to 8 k + 7."""

    def __init__(self, criterion, folder, first=0):
        self.criterion, self.step, self.batch, self.folder = criterion, first, None, folder
        self.kept = SampleLosses(criterion, self, str(folder), 0, print)
        self.kept.begin(SimpleNamespace(shards=None), first)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Begin a step, and return its outputs [8, 10] and targets [8]."""
        self.batch, self.step = SimpleNamespace(ids=np.arange(8) + 8 * self.step), self.step + 1
        generator = torch.Generator().manual_seed(self.step)
        return torch.randn(8, 10, generator=generator, requires_grad=True), torch.arange(8)

    def read(self) -> dict:
        self.kept.write()
        return read_all(self.folder, 0)

    def means(self) -> list[float]:
        return [float(each.mean()) for _, each in self.read().values()]


class Changing(torch.nn.CrossEntropyLoss):
    """A criterion with state: a buffer that counts, a number that the loop changes, and random numbers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.scale = 1.0

    def forward(self, outputs, targets):
        self.calls += 1
        noise = torch.rand(())
        return super().forward(outputs, targets) * self.scale * self.calls + 0 * noise


class Fixed(torch.nn.Module):
    """A criterion that ignores `reduction`, or refuses another one."""

    def __init__(self, allowed=("mean", "none")):
        super().__init__()
        self.reduction, self.allowed = "mean", allowed

    def forward(self, outputs, targets):
        if self.reduction not in self.allowed:
            raise ValueError(f"unknown reduction {self.reduction}")
        return torch.nn.functional.cross_entropy(outputs, targets)


def test_a_criterion_of_your_own_without_reduction_is_refused(tmp_path):
    with pytest.raises(BadInput, match=r"--sample_losses.*reduction.*Module"):
        Steps(torch.nn.Module(), tmp_path)


def test_the_copy_has_the_state_of_the_criterion_and_changes_nothing(tmp_path):
    criterion, plain = Changing(), Changing()
    steps = Steps(criterion, tmp_path)
    criterion.load_state_dict({"calls": torch.tensor(5.0)})  # as after a restart
    plain.load_state_dict(criterion.state_dict())
    results = []
    for scale in (1.0, 0.5, 0.25):
        outputs, targets = steps.next()
        criterion.scale = plain.scale = scale
        torch.manual_seed(0)
        results.append(criterion(outputs, targets))
        draw = torch.rand(())
        torch.manual_seed(0)
        assert torch.equal(results[-1], plain(outputs, targets)) and torch.equal(draw, torch.rand(()))
    assert np.allclose(steps.means(), torch.stack(results).detach(), rtol=1e-6)
    assert criterion.calls == 8


def test_only_calls_of_a_step_are_kept_also_those_with_named_arguments(tmp_path):
    criterion = torch.nn.CrossEntropyLoss()
    steps = Steps(criterion, tmp_path)
    criterion(torch.randn(3, 10, requires_grad=True), torch.arange(3))  # before the first step
    outputs, targets = steps.next()
    loss = criterion(input=outputs, target=targets)
    with torch.no_grad():  # as in an evaluation
        criterion(outputs[:5], targets[:5])
    assert steps.means() == [pytest.approx(loss.item())]


def test_a_last_batch_of_another_size_is_kept(tmp_path):
    criterion = torch.nn.CrossEntropyLoss()
    steps = Steps(criterion, tmp_path)
    for count in (8, 3):
        outputs, targets = steps.next()
        steps.batch.ids = steps.batch.ids[:count]
        criterion(outputs[:count], targets[:count])
    assert [len(ids) for ids, _ in steps.read().values()] == [8, 3]


@pytest.mark.parametrize(("criterion", "samples"), [
    (Fixed(), [8]),  # a mean
    (Fixed(("mean",)), [8]),
    (torch.nn.CrossEntropyLoss(), [8, 8]),  # twice for a sample
    (torch.nn.CrossEntropyLoss(), [4, 8]),
    (torch.nn.CrossEntropyLoss(), [4, "next", 8]),  # the other samples of the first step have no loss
    (torch.nn.MSELoss(), [4, "next", 8]),  # 40 losses, which 8 divides
])  # fmt: skip
def test_calls_that_do_not_give_one_loss_for_each_sample_are_refused_at_once(criterion, samples, tmp_path):
    steps = Steps(criterion, tmp_path)
    outputs, targets = steps.next()
    if isinstance(criterion, torch.nn.MSELoss):
        targets = torch.zeros(8, 10)
    *first, last = samples
    for count in first:
        if count == "next":
            steps.next()
        else:
            criterion(outputs[:count], targets[:count])
    with pytest.raises(BadInput, match=r"^--sample_losses: the criterion"):
        criterion(outputs[:last], targets[:last])
    assert not any(tmp_path.iterdir())


def test_a_part_of_a_write_that_failed_is_deleted(tmp_path):
    criterion = torch.nn.CrossEntropyLoss()
    steps = Steps(criterion, tmp_path)
    for _ in range(3):
        criterion(*steps.next())
        steps.kept.write()
        with open(path_of(str(tmp_path), 0), "ab") as file:
            file.write(b"x" * 17)
    assert list(steps.read()) == [1, 2, 3]


@pytest.mark.parametrize("first", [0, 2, 3])
def test_a_restart_writes_the_steps_after_its_checkpoint_again(tmp_path, first):
    """The losses of several columns are a mean for each sample."""
    whole = {}
    for begin, end in ((0, 4), (first, 5)):
        criterion = torch.nn.MSELoss()
        steps = Steps(criterion, tmp_path, begin)
        while steps.step < end:
            outputs, _ = steps.next()
            criterion(outputs, torch.zeros(8, 10))
            if steps.step == 2:  # two steps in a report
                steps.kept.write()
            whole[steps.step] = outputs.detach().square().mean(1)
        steps.kept.write()
        with open(path_of(str(tmp_path), 0), "ab") as file:
            file.write(b"x" * 17)  # a kill has cut a step
    found = steps.read()
    assert list(found) == [1, 2, 3, 4, 5]
    for step, (ids, losses_of_step) in found.items():
        assert ids.tolist() == list(range(8 * step - 8, 8 * step))
        assert np.allclose(losses_of_step, whole[step])


def test_a_file_that_was_deleted_begins_again(tmp_path):
    criterion = torch.nn.CrossEntropyLoss()
    steps = Steps(criterion, tmp_path)
    for step in (1, 2, 3):
        outputs, targets = steps.next()
        steps.batch.ids = steps.batch.ids[:3]
        criterion(outputs[:3], targets[:3])
        if step == 3:
            Path(path_of(str(tmp_path), 0)).unlink()
        steps.kept.write()
    assert list(steps.read()) == [3]

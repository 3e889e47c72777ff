"""A Checkpointer saves the right state at the right steps. These tests start no job."""

import argparse
import os
import re
import shutil
import sys
import types

import pytest
import torch

from bootfile.exact import checked_files, nonfinite
from bootfile.exact import files as checkpoint
from bootfile.exact.due import Interval
from bootfile.exact.loop import Exact
from bootfile.exact.plugins import Plugin
from bootfile.exact.restore import load
from bootfile.ground import again
from bootfile.ground.errors import BadInput
from common.checkpoint.checkpointer import Checkpointer
from common.checkpoint.scores import Scores
from common.run.metrics import Metrics, absolute_error
from tests.support.checkpointers import make
from tests.support.failing_files import failing

_FUSED = "fused" in torch.optim.SGD([torch.zeros(1)], lr=0.1).defaults
_needs_fused = pytest.mark.skipif(not _FUSED, reason="this torch has no fused SGD")


@pytest.fixture(params=[None, True], ids=["unfused", "fused"])
def recovery(request, tmp_path, monkeypatch):
    """Return a function that makes (Checkpointer, model) of a job with a secret among its arguments.

    The Checkpointer is at step 0 of 20. With a fused optimizer the verdict on a step comes one step later."""
    if request.param and not _FUSED:
        pytest.skip("this torch has no fused SGD")
    monkeypatch.setattr("bootfile.processes.signals.watch", lambda *arguments: None)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    fused = {"fused": True} if request.param else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **fused)

    def build(**values):
        given = dict(
            output_dir=str(tmp_path), resume="auto", save_every=Interval(4, "step"), keep=2, grace=25.0,
            max_bad_steps=3, batch_size=8, seed=0, dataset="digits", secret_key="hunter2",
            data_url="https://user:hunter2@host/data",
        )  # fmt: skip
        args = argparse.Namespace(**given | values)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20, cycle_momentum=False)
        built = make(args, 5, total_steps=20, model=model, optimizer=optimizer, scheduler=schedule)
        built.resume()
        return built, model

    return build


def _step(recovery, model, poison=False):
    """Take a step, and return what is due."""
    loss = model(torch.full((4, 3), float("nan")) if poison else torch.randn(4, 3)).square().mean()
    recovery.state.objects["optimizer"].zero_grad()
    loss.backward()
    if recovery.accepts(loss):
        recovery.state.objects["optimizer"].step()
    recovery.state.objects["scheduler"].step()
    recovery.loader.step += 1
    return recovery.end_step()


def _train(recovery, model, steps=4):
    """Take these steps, with a save after each if it is due, and finish."""
    for _ in range(steps):
        if _step(recovery, model).save:
            recovery.save()
    recovery.finish()


def _evaluate(recovery, model, epoch, *sums):
    """Save the weights of an epoch, whose bias is its number. sums: of the loss, correct samples, metrics."""
    with torch.no_grad():
        model[0].bias.fill_(epoch)
    recovery.loader.step = epoch
    recovery.save_weights(epoch, torch.tensor([*sums[:2], 10.0, *sums[2:]]))


def _read_best(folder):
    """Return the numbers of the epoch in best.pth, one for each output."""
    return torch.load(folder / "best.pth", weights_only=True)["0.bias"].tolist()


def _copy(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def _is(model, state):
    return all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_scores_of_another_validation_set_do_not_count(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("bootfile.processes.signals.watch", lambda *arguments: None)
    args = argparse.Namespace(output_dir=str(tmp_path), resume="auto", batch_size=8, seed=0, dataset="digits",
                              data_url=None, save_every=Interval(1, "step"))  # fmt: skip
    for digest, of_lists, is_other in (
        ("a", "1", False),
        ("a", "1", False),
        ("a", "2", True),
        ("b", "2", True),
    ):
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        receipt = types.SimpleNamespace(fingerprint=digest, further={"lists": of_lists})
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        objects = {"model": model, "optimizer": optimizer, "scheduler": schedule}
        built = make(args, 5, total_steps=20, **objects, val_loader=types.SimpleNamespace(receipt=receipt))
        is_first = built.resume() == 0
        assert ("warning: the validation set is another one" in capsys.readouterr().out) == is_other
        assert (built.scores.highest == 0.9) == (not is_other and not is_first)
        built.scores.note(0.9, "")
        _train(built, model, steps=1)


def test_a_save_is_due_after_a_function_was_compiled(recovery, tmp_path):
    """torch before 2.3 calls no hooks of optimizers then."""
    torch.compile(torch.nn.Linear(3, 2))
    _train(*recovery(), steps=9)
    assert {int(path.stem[5:]) for path in (tmp_path / "checkpoints").glob("step_*.pt")} == {4, 8}


def test_a_checkpoint_holds_no_secret_and_everything_else(recovery, tmp_path):
    keeper, model = recovery()
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".partial-left").touch()  # by a writer that was killed
    _train(keeper, model)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["step_4.pt", "step_4.pt.json"]
    path = str(tmp_path / "checkpoints" / "step_4.pt")
    state = checked_files.read(path)
    assert b"hunter2" not in open(path, "rb").read()  # noqa: SIM115
    assert state["arguments"]["data_url"] == "https://host/data" and "secret_key" not in state["arguments"]
    assert state["step"] == 4

    rate = keeper.state.objects["optimizer"].param_groups[0]["lr"]
    weights = _copy(model)
    for tensor in model.state_dict().values():
        tensor.zero_()
    again, model = recovery()
    assert again.state.objects["optimizer"].param_groups[0]["lr"] == rate
    assert _is(model, weights)


@pytest.mark.parametrize("first_is_bad", [False, True])
def test_a_step_that_is_not_finite_changes_nothing(recovery, capsys, first_is_bad):
    keeper, model = recovery()
    if not first_is_bad:
        _step(keeper, model)
    before = _copy(model)
    _step(keeper, model, poison=True)
    assert _is(model, before)
    _step(keeper, model)
    assert not torch.equal(model[0].weight, before["0.weight"])
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())
    assert "skipped a step: loss nan" in capsys.readouterr().out
    _step(keeper, model)
    assert (keeper.state.bad_steps, keeper.state.bad_in_a_row) == (1, 0)
    with pytest.raises(BadInput, match=r"\b3 steps .*no checkpoint") as error:
        for _ in range(4):
            _step(keeper, model, poison=True)
    assert error.value.code == 7


def test_a_first_step_after_a_restart_that_is_skipped_keeps_the_statistics(recovery):
    keeper, model = recovery()
    _train(keeper, model)
    again, model = recovery()
    before = _copy(model)
    assert before["1.num_batches_tracked"] == 4
    _step(again, model, poison=True)
    assert _is(model, before)


def test_steps_that_were_skipped_before_a_stop_count_after_the_restart(recovery, monkeypatch):
    monkeypatch.setattr("bootfile.ground.errors.leave", sys.exit)
    keeper, model = recovery()
    for poison in (False, True, True):
        _step(keeper, model, poison)
    keeper.position.is_stopping = True  # as after SIGTERM
    with pytest.raises(SystemExit):
        keeper.save()
    again, model = recovery()
    assert (again.state.bad_steps, again.state.bad_in_a_row) == (2, 2)
    with pytest.raises(BadInput, match=r"\b3 steps "):
        for _ in range(2):  # the verdict of a fused optimizer comes one step later
            _step(again, model, poison=True)


@pytest.mark.parametrize("others", [0.0, 1.0])
def test_a_signal_at_another_rank_stops_an_evaluation_at_all(recovery, monkeypatch, others):
    keeper, _ = recovery()
    monkeypatch.setattr("bootfile.processes.ranks.maximum", lambda value, device: max(value, others))
    assert keeper.end_evaluation() == keeper.position.is_stopping == bool(others)


@_needs_fused
def test_a_scaler_does_not_overrule_the_other_ranks():
    """GradScaler.step() sets found_inf by the gradients of this rank only."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=True)
    guard, before = nonfinite.Guard(model, optimizer), model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    guard.vote(torch.tensor(float("inf")))
    optimizer.found_inf = torch.zeros(())  # as a scaler does
    optimizer.step()
    assert torch.equal(model.weight, before)
    guard.end_step()
    guard.vote(torch.tensor(1.0))
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert torch.equal(model.weight, before)
    guard.end_step()
    guard.vote(torch.tensor(1.0))
    optimizer.step()
    assert not torch.equal(model.weight, before)


class _Question(Plugin):
    """Answers yes in the third step, and notes how many verdicts there are when all ranks know it."""

    def __init__(self, verdicts):
        self._answers = iter([0.0, 0.0, 1.0, *[0.0] * 5])
        self._verdicts = verdicts
        self.asked = []

    def numbers(self):
        return [next(self._answers)]

    def judge(self, maxima):
        if maxima == [1.0]:
            self.asked.append(len(self._verdicts))


@_needs_fused
@pytest.mark.parametrize("options", [{"nesterov": True, "weight_decay": 0.01}, {"dampening": 0.5}])
def test_weights_of_both_kinds_of_optimizer_agree(options):
    """The weights are equal after skipped steps. The first step is one of them: it has no momentum yet."""
    found = []
    for fused in (None, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused, **options)
        verdicts = []
        question = _Question(verdicts)
        guard = nonfinite.Guard(model, optimizer, watchers=[question])
        for step in range(8):
            optimizer.zero_grad()
            torch.full((64, 64), float("nan"))  # unset memory may hold these values
            images = torch.full((4, 64), float("nan")) if step in (0, 5) else torch.randn(4, 64)
            loss = (model(images) - 1).square().mean()
            loss.backward()
            if guard.vote(loss):
                optimizer.step()
            verdicts.append(guard.end_step())
        verdicts = [*verdicts[guard.ahead :], *filter(None, [guard.settle()])]
        assert [verdict.bad for verdict in verdicts] == [step in (0, 5) for step in range(8)]
        assert question.asked == [3 if guard.ahead else 2]  # the host learns of step 2 one step later
        found.append(model.state_dict())
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop"])
def test_a_resumed_optimizer_may_become_fused(kind):
    """Adam's step counts move from the host to the GPU."""
    found = []
    for fused in (False, None):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2).cuda()
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
        for step in range(6):
            if step == 3 and fused is None:
                optimizer.load_state_dict(optimizer.state_dict())
                guard = nonfinite.Guard(model, optimizer)
            optimizer.zero_grad()
            poisoned = step == 4
            if poisoned and fused is False:
                continue
            generator = torch.Generator().manual_seed(step)
            images = torch.full((4, 3), float("nan")) if poisoned else torch.randn(4, 3, generator=generator)
            loss = model(images.cuda()).square().mean()
            loss.backward()
            if step < 3 or fused is False:
                optimizer.step()
                continue
            if guard.vote(loss):
                optimizer.step()
            guard.end_step()
        found.append(model.weight.detach())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_nothing_is_saved_while_steps_are_skipped(recovery, tmp_path):
    """The steps before the skipped ones must not replace good checkpoints."""
    keeper, model = recovery(max_bad_steps=100)
    for step in range(1, 21):
        if _step(keeper, model, poison=step > 9).save:
            keeper.save()
    keeper.finish()
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("*.pt"))
    assert kept == ["step_4.pt", "step_8.pt"]


@pytest.mark.parametrize(
    "damage",
    [
        {"step": "4"}, {"schedule": {}}, {"objects": {"model": {}}}, {"identity": []},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_whole_but_not_a_state_is_refused_and_the_one_before_is_taken(recovery, capsys, damage):
    keeper, model = recovery(keep=3)
    _train(keeper, model, steps=8)
    path = checkpoint.list_newest_first(keeper.saver.checkpoints)[0]
    state = checked_files.read(path)
    checkpoint.write(path, state | damage, step=8, run=keeper.state.run)
    again, _ = recovery(keep=3)
    said = capsys.readouterr().out
    assert f"checkpoint refused: {path}: " in said and again.saver.submitted == 4
    assert "step_4.pt: epoch 1, step 4" in said
    for keys in (["objects", "optimizer"], ["schedule"], ["objects", "model", "0.weight"]):
        part = state
        for key in keys[:-1]:
            part = part[key]
        left = part.pop(keys[-1])
        checkpoint.write(path, state, step=8, run=keeper.state.run)
        part[keys[-1]] = left
        again, _ = recovery(keep=3)
        assert again.saver.submitted == 4, keys


def test_another_run_is_refused_with_both_values(recovery):
    keeper, model = recovery()
    _train(keeper, model)
    for name, value, here in (("seed", 7, 0), ("dataset", "cifar10", "digits"), ("batch_size", 16, 8)):
        with pytest.raises(BadInput, match=rf"its --{name} is {here}, this run's is {value}"):
            recovery(**{name: value})
    state, run = keeper.state.capture(4), keeper.state
    with pytest.raises(BadInput, match=r"\bstep 4\b.* ends .*step 3\b"):
        load(run, state, 3)
    with pytest.raises(checkpoint.Refused, match=r"format .*\b1\b.* reads 3\b"):
        load(run, state | {"format": 1}, 20)
    state["objects"]["model"] |= {"0.weight": torch.zeros(2, 4)}
    with pytest.raises(checkpoint.Refused, match=r"0.weight is \[2, 4\], this run's is \[2, 3\]"):
        load(run, state, 20)


def test_weights_that_are_not_finite_are_not_written(recovery, tmp_path, capsys):
    keeper, model = recovery()
    _step(keeper, model)
    keeper.save_weights(1, torch.tensor([1.0, 5.0, 10.0]))
    keeper.finish()
    kept = (tmp_path / "best.pth").read_bytes()
    with torch.no_grad():
        model[0].bias[0] = float("inf")
    keeper.save_weights(2, torch.tensor([1.0, 9.0, 10.0]))
    with pytest.raises(BadInput, match=r"epoch_2\.pth .*not saved.* not finite") as error:
        keeper.finish()
    assert error.value.code == 6 and (tmp_path / "best.pth").read_bytes() == kept
    assert not (tmp_path / "epoch_2.pth").exists()


@pytest.mark.parametrize(
    ("correct", "best"), [((5.0, 8.0, 7.0), 2), ((torch.nan,) * 3, 3)], ids=["accuracy", "loss"]
)
def test_best_is_the_highest_accuracy_or_the_lowest_loss(recovery, tmp_path, correct, best):
    keeper, model = recovery()
    for epoch, loss, count in zip((1, 2, 3), (4.0, 5.0, 3.0), correct, strict=True):
        _evaluate(keeper, model, epoch, loss, count)
    keeper.finish()
    assert _read_best(tmp_path) == [best, best]


def test_a_score_that_is_not_a_number_is_named_once(recovery, tmp_path, capsys):
    keeper, model = recovery()
    for epoch, loss in ((1, torch.nan), (2, torch.nan), (3, 5.0)):
        _evaluate(keeper, model, epoch, loss, torch.nan)
    keeper.finish()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "best.pth" in line]
    assert line.startswith("warning: ") and " is nan after step 1" in line
    assert (tmp_path / "best.pth").exists()


def test_best_is_by_the_metric_that_the_job_names_also_after_a_restart(recovery, tmp_path):
    errors = {1: 5.0, 2: 3.0, 3: 4.0}
    for epochs in ((1, 2), (3,)):
        keeper, model = recovery()
        keeper.log.use(Metrics(mae=absolute_error, best="mae", lowest=True))
        for epoch in epochs:
            _evaluate(keeper, model, epoch, 0.0, epoch, 10 * errors[epoch])
            keeper.saver.collect(wait=True)
            keeper.save()
        keeper.finish()
        assert keeper.scores.best == -3 and _read_best(tmp_path) == [2, 2]


@pytest.mark.parametrize("kind", ["another folder", "only checkpoints", "whole"])
def test_a_folder_without_best_gets_one_from_the_next_evaluation(recovery, tmp_path, capsys, kind):
    """It was not written as long as no score was better than that of the file which was left behind."""
    old, new = tmp_path / "old", tmp_path / "new"
    keeper, model = recovery(output_dir=str(old))
    keeper.save_weights(1, torch.tensor([1.0, 9.0, 10.0]))
    keeper.saver.collect(wait=True)
    _train(keeper, model)
    options = {"output_dir": str(new)}
    if kind == "another folder":
        options["resume"] = str(old / "checkpoints")
    elif kind == "whole":
        options["output_dir"] = str(old)
    else:
        shutil.copytree(old / "checkpoints", new / "checkpoints")
    capsys.readouterr()
    keeper, model = recovery(**options)
    is_lost = kind != "whole"
    printed = capsys.readouterr().out
    assert bool(re.search(rf"{new} .*no best\.pth .*val_acc 0\.9 ", printed)) == is_lost
    for epoch, correct in ((2, 3.0), (3, 2.0)):
        _evaluate(keeper, model, epoch, 1.0, correct)
    keeper.finish()
    assert (new / "best.pth").exists() == is_lost
    assert not is_lost or _read_best(new) == [2, 2]
    assert keeper.scores.highest == pytest.approx(0.9), "early stopping counts from the best evaluation"


def test_what_a_loop_calls_is_that_of_exact():
    """The contract of a Checkpointer: it adds to three methods, and repeats none."""
    own = vars(Checkpointer).keys() & {name for name in vars(Exact) if not name.startswith("_")}
    assert own == {"resume", "end_step", "close"}


@pytest.mark.parametrize(("at_url", "writes"), [(["best.pth"], True), ([], False)])
def test_best_that_is_at_the_url_or_is_not_written_is_not_missing(tmp_path, capsys, at_url, writes):
    scores = Scores(None)
    scores.best = 0.7
    scores.settle(str(tmp_path), at_url, writes, print)
    assert scores.best == 0.7 and capsys.readouterr().out == ""


@pytest.mark.parametrize(("error", "code"), [("EACCES", 2), ("EIO", 6)])
def test_checkpoints_that_cannot_be_listed_are_one_line(recovery, tmp_path, monkeypatch, error, code):
    """They belong to another user, or their mount is gone."""
    monkeypatch.setattr(again, "PAUSES", (0.0,))
    keeper, model = recovery()
    _train(keeper, model)
    message = f"^checkpoints in {tmp_path}/checkpoints cannot be listed: "
    broken = failing(tmp_path / "calls", "/checkpoints$", error, times=100, calls="look")
    with broken, pytest.raises(BadInput, match=message) as refused:
        recovery()
    assert refused.value.code == code and "\n" not in str(refused.value)


def test_a_report_by_time_is_asked_for_once_and_agreed_on_with_the_step(recovery):
    keeper, model = recovery(report_every=Interval(10, "s"))
    due = [_step(keeper, model).report]
    keeper.parts.reports.reported_at -= 11
    due += [_step(keeper, model).report for _ in range(3)]
    is_late = bool(keeper.state.objects["optimizer"].defaults.get("fused"))
    assert due == [True, not is_late, is_late, True]


def test_weights_are_initial_values_and_a_checkpoint_wins(recovery, tmp_path, capsys):
    (tmp_path / "given").mkdir()
    given = str(tmp_path / "given" / "best.pth")
    keeper, model = recovery()
    torch.save({name: tensor + 1 for name, tensor in model.state_dict().items()}, given)
    expected = model[0].weight + 1
    keeper, model = recovery(weights=given)
    assert torch.equal(model[0].weight, expected)
    assert f"weights from {given}: 7 of 7" in capsys.readouterr().out
    _train(keeper, model)
    trained = model[0].weight.detach().clone()
    os.remove(given)  # a restart does not need the file
    recovery()
    for option in (given, "other.pth"):
        _, model = recovery(weights=option)
        assert torch.equal(model[0].weight, trained)
        line = rf"--weights {option} .*not used: .* {given}$"
        assert re.search(line, capsys.readouterr().out, re.MULTILINE)
    with pytest.raises(BadInput, match=rf"weights {given}: .*No such file"):
        recovery(weights=given, resume="never", output_dir=str(tmp_path / "another"))


def test_evaluation_takes_weights_from_any_file_of_any_run(recovery, tmp_path, capsys):
    """The run may have another batch size, seed, data set and more steps. Evaluation writes nothing."""
    keeper, model = recovery()
    _train(keeper, model)
    keeper, model = recovery()
    keeper.save_weights(1, torch.tensor([1.0, 5.0, 10.0]))
    keeper.finish()
    trained = _copy(model)
    files = sorted(str(path) for path in tmp_path.rglob("*"))
    capsys.readouterr()
    for option, named in (
        ("weights", "best.pth"), ("weights", "epoch_1.pth"), ("weights", "checkpoints/step_4.pt"),
        ("resume", "checkpoints/step_4.pt"), ("resume", "checkpoints"), ("resume", "."),
    ):  # fmt: skip
        for tensor in model.state_dict().values():
            tensor.zero_()
        other = {"resume": "auto", "batch_size": 3, "seed": 9, "dataset": "cifar10", "evaluate": True}
        evaluating, model = recovery(**other | {option: str(tmp_path / named)})
        assert _is(model, trained), named
        assert ": 7 of 7 tensors" in capsys.readouterr().out
        assert evaluating.resume() == 20
        evaluating.save_weights(2, torch.tensor([1.0, 9.0, 10.0]))
        evaluating.finish()
    assert sorted(str(path) for path in tmp_path.rglob("*")) == files
    with pytest.raises(BadInput, match=rf"best.pth.json cannot be read.*: --weights {tmp_path / 'best.pth'}"):
        recovery(resume=str(tmp_path / "best.pth"), output_dir=str(tmp_path / "another"))


def test_averaged_weights_begin_at_the_given_ones(tmp_path, monkeypatch):
    monkeypatch.setattr("bootfile.processes.signals.watch", lambda *arguments: None)
    model = torch.nn.Linear(3, 2)
    ema = torch.optim.swa_utils.AveragedModel(model)
    given = {"weight": torch.ones(2, 3), "bias": torch.ones(2)}
    torch.save(given, tmp_path / "best.pth")
    args = argparse.Namespace(
        output_dir=str(tmp_path), weights=str(tmp_path / "best.pth"), evaluate=True, resume="never"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make(args, 2, total_steps=4, model=model, optimizer=optimizer, ema=ema).resume()
    assert torch.equal(ema.module.weight, given["weight"]) and torch.equal(model.weight, given["weight"])


@pytest.mark.parametrize(
    ("given", "refused"),
    [({"max_steps": 20}, ""), ({"max_steps": 19}, "max_steps 19"), ({"epoch_steps": 4}, "epoch_steps 4")],
)
def test_an_option_that_the_sampler_did_not_get_is_refused(given, refused, recovery):
    """The training would be longer than the option says. It has 20 steps, 5 in an epoch."""
    if not refused:
        recovery(**given)
        return
    with pytest.raises(BadInput, match=f"--{refused}: .*not .*sampler"):
        recovery(**given)

"""A learning-rate schedule continues after a restart as if there had been none, or the restart is refused."""

import argparse
import itertools
import random

import pytest
import torch

from bootfile.exact.due import Interval
from bootfile.exact.replay import load
from bootfile.exact.schedules import ScheduleState
from bootfile.ground.errors import BadInput
from tests.conftest import cases
from tests.support.checkpointers import make

STEPS = 40
lrs = torch.optim.lr_scheduler


class Halving(lrs.LRScheduler):
    """A user's schedule that depends on the previous rate and stores a list."""

    def __init__(self, optimizer, every):
        self.every, self.seen = every, []
        super().__init__(optimizer)

    def get_lr(self):
        self.seen.append(self.last_epoch)
        half = 0.5 if self.last_epoch and self.last_epoch % self.every == 0 else 1
        return [group["lr"] * half for group in self.optimizer.param_groups]


class Cosine(Halving):
    """A schedule with a bound method in an attribute, like several published classes."""

    def __init__(self, optimizer, every):
        self.shape = self.square
        super().__init__(optimizer, every)

    def square(self, rate):
        return rate * self.every / (self.every + self.last_epoch)

    def get_lr(self):
        return [self.shape(rate) for rate in self.base_lrs]


SCHEDULES = {
    "StepLR": lambda o: lrs.StepLR(o, 10, 0.5),
    "MultiStepLR": lambda o: lrs.MultiStepLR(o, [5, 13, 30], 0.3),
    "ConstantLR": lambda o: lrs.ConstantLR(o, 0.3, 15),
    "LinearLR": lambda o: lrs.LinearLR(o, 0.1, total_iters=25),
    "ExponentialLR": lambda o: lrs.ExponentialLR(o, 0.93),
    "PolynomialLR": lambda o: lrs.PolynomialLR(o, 35, 2.0),
    "CosineAnnealingLR": lambda o: lrs.CosineAnnealingLR(o, T_max=STEPS, eta_min=0.001),
    "CosineAnnealingLR beyond T_max": lambda o: lrs.CosineAnnealingLR(o, T_max=9),
    "CosineAnnealingWarmRestarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 7, 2),
    "CyclicLR": lambda o: lrs.CyclicLR(o, 0.01, 0.1, 6, mode="exp_range", gamma=0.99),
    "CyclicLR with a function": lambda o: lrs.CyclicLR(o, 0.01, 0.1, 6, scale_fn=lambda x: 0.9**x),
    "OneCycleLR": lambda o: lrs.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
    "LambdaLR": lambda o: lrs.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lrs.MultiplicativeLR(o, lambda step: 0.97),
    "SequentialLR": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.1, total_iters=8), lrs.CosineAnnealingLR(o, 12), lrs.StepLR(o, 3)], [8, 25]
    ),
    "ChainedScheduler": lambda o: lrs.ChainedScheduler(
        [lrs.ConstantLR(o, 0.1, 4), lrs.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: lrs.ReduceLROnPlateau(o, factor=0.5, patience=2, cooldown=1),
    "a class of the user's own": lambda o: Halving(o, 6),
    "a class with a bound method": lambda o: Cosine(o, 6),
    "none": lambda o: None,
}


# classes of torch whose state is of the kind of another one in SCHEDULES
SIMILAR = (
    "MultiStepLR", "ConstantLR", "LinearLR", "ExponentialLR", "PolynomialLR", "CyclicLR", "MultiplicativeLR",
    "CosineAnnealingLR beyond T_max",
)  # fmt: skip


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Return job(schedule, to, **arguments). It trains up to a step, from the newest checkpoint if any, and
    returns the learning rates of these steps and all that a schedule may change."""
    monkeypatch.setattr("bootfile.processes.signals.watch", lambda *arguments: None)

    def train(schedule, to=STEPS, folder="resumed", each=1, hand=None, groups=2, **values):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
        given = dict(
            output_dir=str(tmp_path / folder), resume="auto", save_every=Interval(1000, "step"), keep=2,
            grace=25.0, max_bad_steps=3, lr=0.1, epochs=4, weight_decay=0.01,
        )  # fmt: skip
        args = argparse.Namespace(**given | values)
        parts = [model[0], model[2]] if groups == 2 else [model]
        parameters = [{"params": part.parameters(), "lr": args.lr / k} for k, part in enumerate(parts, 1)]
        optimizer = torch.optim.SGD(parameters, momentum=0.9, weight_decay=args.weight_decay)
        scheduler = schedule(optimizer)
        checkpoint = make(args, 10, total_steps=STEPS, model=model, optimizer=optimizer, scheduler=scheduler)
        step = checkpoint.resume()
        rates = []
        while step < to:
            rates.append([group["lr"] for group in optimizer.param_groups])
            images = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
            loss = (model(images) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if checkpoint.accepts(loss):
                optimizer.step()
            step += 1
            if scheduler and step % each == 0:
                plateau = isinstance(scheduler, lrs.ReduceLROnPlateau)
                scheduler.step(loss.detach() if plateau else None) if plateau else scheduler.step()
            if hand and step == hand:
                optimizer.param_groups[0]["lr"] *= 0.5
        checkpoint.position.is_stopping = True
        checkpoint.loader.step = step
        monkeypatch.setattr(checkpoint, "_exit", lambda step: checkpoint.finish())
        checkpoint.save()
        others = [
            {name: group[name] for name in group if name != "params"} for group in optimizer.param_groups
        ]
        return rates, others, [weight.clone() for weight in model.parameters()]

    return train


@pytest.mark.parametrize("name", cases(SCHEDULES, *SIMILAR))
def test_every_rate_and_weight_is_that_of_the_uninterrupted_run(job, name):
    rates, groups, weights = job(SCHEDULES[name], folder="whole")
    assert name == "none" or len({str(rate) for rate in rates}) > 1
    found = []
    for stop in (7, 26, STEPS):  # 0 to 7, 7 to 26, 26 to the end
        several, others, last = job(SCHEDULES[name], to=stop)
        found += several
    assert found == rates and others == groups
    assert all(map(torch.equal, last, weights))


@pytest.mark.parametrize(
    "name", ["StepLR", "LambdaLR", "ReduceLROnPlateau", "ChainedScheduler", "SequentialLR"]
)
def test_a_schedule_that_moves_once_an_epoch(job, name):
    rates, _, weights = job(SCHEDULES[name], folder="whole", each=4)
    found = [rate for stop in (7, 26, STEPS) for rate in job(SCHEDULES[name], to=stop, each=4)[0]]
    assert found == rates
    found = job(SCHEDULES[name], each=4)
    assert found[0] == [] and all(map(torch.equal, found[2], weights))


@pytest.mark.filterwarnings("ignore:Detected call of")
@pytest.mark.parametrize("name", ["StepLR", "ChainedScheduler", "SequentialLR"])
def test_a_schedule_that_has_moved_before_the_run(job, name):
    def moved(optimizer):
        scheduler = SCHEDULES[name](optimizer)
        for _ in range(3):
            scheduler.step()
        return scheduler

    rates, groups, _ = job(moved, folder="whole")
    job(moved, to=7)
    rest, others, _ = job(moved)
    assert rest == rates[7:] and others == groups


def test_groups_that_begin_in_another_place_are_refused():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    began_with_one = ScheduleState(optimizer, None, {})
    optimizer.add_param_group({"params": [torch.zeros(1)]})
    with pytest.raises(BadInput, match=r"began with 1 parameter groups, .* 2"):
        load(ScheduleState(optimizer, None, {}), began_with_one.state())


def test_a_rate_that_is_a_tensor_continues_without_the_schedule():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=torch.tensor(0.1))
    saved = ScheduleState(optimizer, lrs.StepLR(optimizer, 10), {}).state()
    other = torch.optim.SGD([torch.zeros(1)], lr=torch.tensor(0.1))
    state = ScheduleState(other, None, {})
    load(state, saved)
    assert state.change == "it was StepLR"


def test_a_rate_that_was_changed_by_hand_stays(job):
    for name in ("none", "StepLR", "ReduceLROnPlateau"):
        whole = job(SCHEDULES[name], folder=f"{name} whole", hand=9)
        job(SCHEDULES[name], to=26, folder=name, hand=9)
        rest = job(SCHEDULES[name], folder=name, hand=9)
        assert rest[0] == whole[0][26:] and all(map(torch.equal, rest[2], whole[2]))


@pytest.mark.parametrize(
    "name", cases([each for each in SCHEDULES if each[0].isupper() and "Plateau" not in each], *SIMILAR)
)
def test_another_rate_and_length_go_on_at_the_same_place_of_the_new_schedule(job, name):
    def longer(optimizer):
        if name == "LambdaLR":  # its state_dict does not show the difference
            return lrs.LambdaLR(optimizer, lambda step: 1 / (2 + step))
        if name == "OneCycleLR":
            return lrs.OneCycleLR(optimizer, 0.2, total_steps=STEPS + 9)
        return SCHEDULES[name](optimizer)

    expected, groups, _ = job(longer, folder="new", lr=0.2, epochs=5)
    job(SCHEDULES[name], to=26)
    rates, others, _ = job(longer, lr=0.2, epochs=5)
    assert rates == expected[26:] and others == groups


def test_weight_decay_may_change_and_the_rest_stays(job):
    job(SCHEDULES["StepLR"], to=26)
    rates, groups, _ = job(SCHEDULES["StepLR"], weight_decay=0.5)
    assert rates == job(SCHEDULES["StepLR"], folder="whole")[0][26:]
    assert [group["weight_decay"] for group in groups] == [0.5, 0.5]


@pytest.mark.parametrize("name", ["ReduceLROnPlateau", "a class of the user's own"])
@pytest.mark.parametrize(
    ("argument", "text"), [({"lr": 0.2}, "0.1.* 0.2"), ({"epochs": 9}, "epochs was 4.* 9")]
)
def test_other_schedules_refuse_another_rate_and_length(job, name, argument, text):
    job(SCHEDULES[name], to=26)
    kind = "ReduceLROnPlateau" if "Plateau" in name else "Halving"
    with pytest.raises(BadInput, match=f"{kind}.*{text}"):
        job(SCHEDULES[name], **argument)
    assert job(SCHEDULES[name])[0] == job(SCHEDULES[name], folder="whole")[0][26:]


def test_another_class_and_other_settings_of_it(job):
    job(SCHEDULES["StepLR"], to=26)
    with pytest.raises(BadInput, match=r"ReduceLROnPlateau.*was StepLR"):
        job(SCHEDULES["ReduceLROnPlateau"])
    expected = job(SCHEDULES["CosineAnnealingLR"], folder="whole")[0]
    assert job(SCHEDULES["CosineAnnealingLR"])[0] == expected[26:]

    job(lambda o: lrs.ReduceLROnPlateau(o, patience=2), to=26, folder="plateau")
    with pytest.raises(BadInput, match=r"ReduceLROnPlateau.*patience [^;]*\b2\b[^;]*\b3\b"):
        job(lambda o: lrs.ReduceLROnPlateau(o, patience=3), folder="plateau")
    with pytest.raises(BadInput, match=r"groups [^;]*\[2, 2\][^;]*\[4\]"):
        job(SCHEDULES["StepLR"], groups=1)


def test_a_function_that_depends_on_more_than_the_step_is_refused(job):
    draw = random.Random(0)
    job(lambda o: lrs.LambdaLR(o, lambda step: draw.random()), to=26)
    with pytest.raises(BadInput, match="LambdaLR had the learning rates"):
        job(lambda o: lrs.LambdaLR(o, lambda step: draw.random()))


class Forgetful(Halving):
    def state_dict(self):
        return {"last_epoch": self.last_epoch}


class Iterating(Halving):
    def __init__(self, optimizer, every):
        self.rates = itertools.cycle([0.1, 0.2])
        super().__init__(optimizer, every)


class Bare:
    def step(self):
        pass


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (lambda o: Forgetful(o, 3), "Forgetful.*leaves out"),
        (lambda o: Iterating(o, 3), "Iterating.*rates, cycle"),
        (lambda o: Bare(), "Bare.*state_dict"),
    ],
)
def test_a_class_that_cannot_be_resumed_is_refused_by_name(schedule, text):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    with pytest.raises(BadInput, match=text):
        ScheduleState(optimizer, schedule(optimizer), {})


def test_fractions_of_an_epoch(job):
    """scheduler.step(epoch + part) resumes exactly with the same settings, and is refused with others."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    scheduler = lrs.CosineAnnealingWarmRestarts(optimizer, 7)
    state = ScheduleState(optimizer, scheduler, {})
    scheduler.step(3.25)
    saved, rate = state.state(), optimizer.param_groups[0]["lr"]
    load(state, saved)
    assert optimizer.param_groups[0]["lr"] == rate and scheduler.T_cur == 3.25
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.2)
    with pytest.raises(Exception, match=r"WarmRestarts cannot be repeated[^;]* 0\.1\b[^;]* 0\.2\b"):
        load(ScheduleState(optimizer, lrs.CosineAnnealingWarmRestarts(optimizer, 7), {}), saved)

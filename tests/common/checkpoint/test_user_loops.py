"""Loops of users continue exactly after a restart, or a line says before the first step why they cannot.

Each case is a loop of another shape. It trains in this process and is stopped at a step, as by SIGKILL: what
was not saved is lost. A new start resumes. All digests of the state must be those of an uninterrupted run.
"""

import argparse
import random
import re

import numpy as np
import pytest
import torch

from bootfile.exact.due import Interval
from bootfile.ground.errors import BadInput
from bootfile.histories import read_states
from bootfile.loaders.map_style import map_style_loader
from bootfile.sampling.sampler import BatchSampler
from common.checkpoint.checkpointer import Checkpointer
from tests.support.checkpointers import run_of

EPOCHS, BATCH, SIZE = 3, 8, 80  # 30 steps


class Killed(Exception):
    pass


class Loop:
    """train.py's loop. A case overrides what its user changes."""

    collate_fn = None

    def build(self):
        """Set model, optimizer, scheduler, criterion."""
        layers = [torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.ReLU()]
        self.model = torch.nn.Sequential(*layers, torch.nn.Linear(16, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.95)
        self.criterion = torch.nn.CrossEntropyLoss()

    def add(self, checkpoint):
        """Add objects before resume()."""

    def begin(self, epoch):
        """Do what the loop does at the beginning of an epoch."""

    def loss(self, inputs, labels):
        return self.criterion(self.model(inputs), labels)

    def step(self, inputs, labels, step):
        self.optimizer.zero_grad()
        loss = self.loss(inputs, labels)
        loss.backward()
        if self.checkpoint.accepts(loss):
            self.optimizer.step()

    def train(self, folder, kill_at=None):
        """Train, and raise Killed after a step. Return the Checkpointer."""
        torch.manual_seed(0)
        np.random.seed()
        random.seed()
        torch.rand(int.from_bytes(random.randbytes(1), "little"))  # the history must not matter
        args = argparse.Namespace(
            report_every=Interval(5, "step"), output_dir=str(folder), save_every=Interval(4, "step"),
            batch_size=BATCH, seed=0,
        )  # fmt: skip
        inputs = torch.randn(SIZE, 6, generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))
        sampler = BatchSampler(SIZE, BATCH, seed=3, epochs=EPOCHS)
        loader = map_style_loader(data, sampler, torch.device("cpu"), collate_fn=self.collate_fn)
        torch.manual_seed(0)
        self.build()
        run = run_of(args)
        checkpoint = self.checkpoint = Checkpointer(
            run, model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, loader=loader,
            criterion=self.criterion,
        )  # fmt: skip
        self.add(checkpoint)
        step = checkpoint.resume()
        running = torch.zeros(3, dtype=torch.float64)
        try:
            for epoch in loader.epochs_from(step):
                self.model.train()
                self.begin(epoch)
                for batch, labels in loader:
                    self.step(batch, labels, step)
                    if self.scheduler:
                        self.scheduler.step()
                    step += 1
                    due = checkpoint.end_step()
                    if due.report:
                        run.log.report(running, self.scheduler)
                    if due.save:
                        checkpoint.save()
                    if step == kill_at:
                        raise Killed
                checkpoint.save_weights(epoch, torch.tensor([1.0, 5.0, 10.0]))
                run.log.validation(torch.tensor([1.0, 5.0, 10.0]))
        except Killed:
            checkpoint.saver.collect(wait=True)
        finally:
            checkpoint.finish()
        return checkpoint


class NumbersInTheLoop(Loop):
    """Mixup with the generators of NumPy, `random` and torch, and noise at the beginning of an epoch."""

    def begin(self, epoch):
        self.noise = torch.rand(1) + np.random.rand() + random.random()

    def loss(self, inputs, labels):
        share = np.random.beta(0.4, 0.4) * random.random()
        order = torch.randperm(len(inputs))
        mixed = inputs * share + inputs[order] * (1 - share) + self.noise
        return self.criterion(self.model(mixed.float()), labels)


class Accumulation(Loop):
    """The usual form: an optimizer step every third batch."""

    def step(self, inputs, labels, step):
        loss = self.loss(inputs, labels) / 3
        loss.backward()
        if self.checkpoint.accepts(loss) and (step + 1) % 3 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()


class AccumulationInPlace(Accumulation):
    """Gradients are set to 0, not to None, before the window."""

    def step(self, inputs, labels, step):
        if step % 3 == 0:
            self.optimizer.zero_grad(set_to_none=False)
        loss = self.loss(inputs, labels) / 3
        loss.backward()
        if self.checkpoint.accepts(loss) and (step + 1) % 3 == 0:
            self.optimizer.step()


class GroupAddedLater(Loop):
    """The head trains from the beginning, the other layers from epoch 2 on."""

    def build(self):
        super().build()
        self.optimizer = torch.optim.SGD(self.model[4].parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 4, 0.8)

    def begin(self, epoch):
        if epoch >= 2 and len(self.optimizer.param_groups) == 1:
            self.optimizer.add_param_group({"params": self.model[0].parameters(), "lr": 0.01})
            self.scheduler.base_lrs.append(0.01)


class Unfrozen(Loop):
    def begin(self, epoch):
        for parameter in self.model[0].parameters():
            parameter.requires_grad_(epoch >= 2)


class SAM(torch.optim.Optimizer):
    """P. Foret et al., "Sharpness-Aware Minimization", ICLR 2021, in its usual form for torch."""

    def __init__(self, parameters, base, **options):
        super().__init__(parameters, options)
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def climb(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["before"] = parameter.clone()
                parameter += 0.05 * parameter.grad

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.copy_(self.state[parameter]["before"])
        self.base_optimizer.step()


class TwoPasses(Loop):
    def build(self):
        super().build()
        self.optimizer = SAM(self.model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.95)

    def step(self, inputs, labels, step):
        self.loss(inputs, labels).backward()
        self.optimizer.climb()
        self.optimizer.zero_grad()
        loss = self.loss(inputs, labels)
        loss.backward()
        if self.checkpoint.accepts(loss):
            self.optimizer.step()
        self.optimizer.zero_grad()


class GAN(Loop):
    """Two optimizers and two losses of a step; the first is checked before the second backward()."""

    def build(self):
        super().build()
        generator = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.Tanh())
        self.model = torch.nn.ModuleDict({"generator": generator, "critic": self.model})
        self.optimizer = torch.optim.Adam(generator.parameters(), lr=0.01)
        self.second = torch.optim.Adam(self.model["critic"].parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.95)

    def add(self, checkpoint):
        checkpoint.add(second=self.second)

    def step(self, inputs, labels, step):
        made = self.model["generator"](inputs + torch.randn_like(inputs))
        self.second.zero_grad()
        loss = (
            self.criterion(self.model["critic"](inputs), labels) - self.model["critic"](made.detach()).std()
        )
        loss.backward()
        if self.checkpoint.accepts(loss):
            self.second.step()
        self.optimizer.zero_grad()
        loss = self.criterion(self.model["critic"](made), labels)
        loss.backward()
        if self.checkpoint.accepts(loss):
            self.optimizer.step()


class OwnGenerator(Loop):
    """A generator in the model, and one of NumPy; both were added. The rate is a tensor, and a buffer holds
    infinity, as the mask of an attention does."""

    def build(self):
        super().build()
        self.model.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=torch.tensor(0.01))
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.95)
        self.model.noise, self.numbers = torch.Generator(), np.random.default_rng()

    def add(self, checkpoint):
        checkpoint.add(noise=self.model.noise, numbers=self.numbers)

    def loss(self, inputs, labels):
        noise = torch.rand(inputs.shape, generator=self.model.noise) * float(self.numbers.random())
        return self.criterion(self.model(inputs + noise), labels)


class CriterionWithWeights(Loop):
    def build(self):
        super().build()
        self.criterion = torch.nn.Sequential(torch.nn.Linear(3, 3))
        parameters = [*self.model.parameters(), *self.criterion.parameters()]
        self.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        self.scheduler = None

    def loss(self, inputs, labels):
        return torch.nn.functional.cross_entropy(self.criterion(self.model(inputs)), labels)


class StateOfNumPy(Loop):
    """Objects whose state is a float64 of NumPy or has no entry, and a module with extra state."""

    class Best:
        value = np.float64(3.5)

        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value = np.float64(state["value"])

    class Empty:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            assert state == {}

    class Layer(torch.nn.Linear):
        def get_extra_state(self):
            return [1, None, {"a": "b"}]

        def set_extra_state(self, state):
            assert state == [1, None, {"a": "b"}]

    def build(self):
        super().build()
        self.model[4] = self.Layer(16, 3)
        self.optimizer.param_groups[0]["params"][-2:] = self.model[4].parameters()

    def add(self, checkpoint):
        checkpoint.add(best=self.Best(), empty=self.Empty())


class SlowCritic(GAN):
    """The second optimizer accumulates over three batches, the first one steps in each."""

    def step(self, inputs, labels, step):
        loss = self.criterion(self.model["critic"](inputs), labels)
        loss.backward(inputs=list(self.model["critic"].parameters()))
        if self.checkpoint.accepts(loss) and (step + 1) % 3 == 0:
            self.second.step()
            self.second.zero_grad()
        self.optimizer.zero_grad()
        loss = self.model["critic"](self.model["generator"](inputs)).square().mean()
        loss.backward(inputs=list(self.model["generator"].parameters()))
        if self.checkpoint.accepts(loss):
            self.optimizer.step()


class GroupAddedToTheSecond(GAN):
    def build(self):
        super().build()
        layers = self.model["critic"]
        self.second = torch.optim.Adam([each for layer in layers[:2] for each in layer.parameters()], lr=0.01)

    def begin(self, epoch):
        if epoch >= 2 and len(self.second.param_groups) == 1:
            self.second.add_param_group({"params": self.model["critic"][4].parameters(), "lr": 0.02})


class Adversarial(Accumulation):
    """A fresh optimizer trains the input in each batch; the model accumulates over three batches."""

    def loss(self, inputs, labels):
        noise = torch.zeros_like(inputs, requires_grad=True)
        attack = torch.optim.SGD([noise], lr=0.1)
        (-self.criterion(self.model(inputs + noise), labels)).backward(inputs=[noise])
        attack.step()
        return super().loss(inputs + noise.detach(), labels)


class OwnState(torch.optim.SGD):
    """An optimizer with a count of its own in its state_dict()."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad *= 1 / self.count
        return super().step(closure)

    def state_dict(self):
        return super().state_dict() | {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]
        super().load_state_dict({name: state[name] for name in ("state", "param_groups")})


class WithOwnState(Loop):
    def build(self):
        super().build()
        self.optimizer = OwnState(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = None


class TwoLoaders(Loop):
    """A second loader is read in each step; its samples draw random numbers."""

    def build(self):
        super().build()
        data = torch.utils.data.TensorDataset(torch.randn(SIZE, 6))
        self.others = map_style_loader(_Noisy(data), BatchSampler(SIZE, BATCH, seed=5), torch.device("cpu"))

    def begin(self, epoch):
        self.others.seek(self.checkpoint.loader.plan.sampler.step)
        self.iterator = iter(self.others)

    def loss(self, inputs, labels):
        others, _ = next(self.iterator)
        return super().loss(inputs + 0.1 * others + torch.rand(1), labels)


class _Noisy(torch.utils.data.Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, id):
        return self.data[id][0] + torch.rand(6), 0


class Toggled(GAN):
    """The critic is frozen while the generator trains, as in CycleGAN."""

    def step(self, inputs, labels, step):
        for parameter in self.model["critic"].parameters():
            parameter.requires_grad_(True)
        super().step(inputs, labels, step)
        for parameter in self.model["critic"].parameters():
            parameter.requires_grad_(False)


CASES = [
    SlowCritic, GroupAddedToTheSecond, Adversarial, WithOwnState, TwoLoaders, Toggled, Loop,
    NumbersInTheLoop, Accumulation, AccumulationInPlace, GroupAddedLater, Unfrozen, TwoPasses, StateOfNumPy,
]  # fmt: skip
LONG = (OwnGenerator, CriterionWithWeights)
CASES += [pytest.param(loop, marks=pytest.mark.thorough) for loop in LONG]


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr("bootfile.processes.signals.watch", lambda *arguments: None)


def digests(folder):
    return {step: line["digest"] for step, line in read_states(str(folder)).items()}


@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_ends_in_the_bits_of_an_uninterrupted_one(case, tmp_path, capsys):
    case().train(tmp_path / "whole")
    whole = digests(tmp_path / "whole")
    assert len(whole) >= 9 and 30 in whole and len(set(whole.values())) == len(whole)
    for kill_at in (7, 18, 29, None):
        case().train(tmp_path / "killed", kill_at)
    assert digests(tmp_path / "killed") == whole
    printed = capsys.readouterr().out
    assert "warning" not in printed and printed.count("resumed from") == 3


def test_a_save_waits_for_the_end_of_an_accumulation(tmp_path):
    checkpoint = Accumulation().train(tmp_path)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("*.pt"))
    assert kept == ["step_21.pt", "step_24.pt", "step_30.pt"]
    assert set(digests(tmp_path)) == {6, 9, 10, 12, 18, 20, 21, 24, 30}
    assert checkpoint.state.bad_steps == 0


def _collate_with(own):
    def collate_fn(items):
        torch.rand(1, generator=own)
        return torch.utils.data.default_collate(items)

    return collate_fn


class Lost:
    """Cases whose restart cannot be exact: a line says so at the moment when it can be seen."""

    class NewOptimizer(Loop):
        def begin(self, epoch):
            if epoch == 2:
                self.optimizer = torch.optim.AdamW(self.model.parameters())

    class NewSchedule(Loop):
        def begin(self, epoch):
            if epoch == 2:
                self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)

    class GeneratorOfTheModel(Loop):
        def build(self):
            super().build()
            self.model[2].noise = torch.Generator()

    class GeneratorOfTheCriterion(Loop):
        def build(self):
            super().build()
            own = torch.Generator()
            self.criterion = lambda logits, labels: logits.sum() * torch.rand(1, generator=own)

    class GeneratorOfTheCollateFunction(Loop):
        collate_fn = staticmethod(_collate_with(torch.Generator()))


@pytest.mark.parametrize(
    "case, text",
    [
        (Lost.NewOptimizer, "warning: AdamW .*no checkpoint"),
        (Lost.NewSchedule, "warning: .*schedule StepLR .*not "),
        (Lost.GeneratorOfTheModel, "warning: model.2.noise: random number generators"),
        (Lost.GeneratorOfTheCriterion, "warning: criterion.own: random number generators"),
        (Lost.GeneratorOfTheCollateFunction, "warning: collate_fn.own: random number generators"),
    ],
)
def test_what_cannot_be_exact_is_named_once(case, text, tmp_path, capsys, optimizer_hooks):
    case().train(tmp_path)
    printed = capsys.readouterr().out
    assert len(re.findall(text, printed)) == 1 and printed.count("warning") == 1, printed


def test_what_only_happens_in_one_epoch_is_noticed_after_a_restart(tmp_path, capsys):
    class Added(GroupAddedLater):
        def begin(self, epoch):
            if epoch == 2:
                super().begin(epoch)

    class Thawed(Unfrozen):
        def begin(self, epoch):
            if epoch == 2:
                super().begin(epoch)

        def build(self):
            super().build()
            super().begin(1)

    Added().train(tmp_path / "added", kill_at=26)
    with pytest.raises(BadInput, match=r"\[2, 2\] .*this run.* \[2\].*epoch >= N"):
        Added().train(tmp_path / "added")
    Thawed().train(tmp_path / "thawed", kill_at=26)
    Thawed().train(tmp_path / "thawed")
    assert "warning: 0.bias is frozen now" in capsys.readouterr().out


def test_another_schedule_or_optimizer_is_a_line_in_the_log(tmp_path, capsys):
    class Stepwise(Loop):
        def build(self):
            super().build()
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5)

    class Adam(Loop):
        def build(self):
            super().build()
            self.optimizer = torch.optim.AdamW(self.model.parameters())
            self.scheduler = None

    Loop().train(tmp_path, kill_at=18)
    Stepwise().train(tmp_path, kill_at=22)
    text = "schedule .*checkpoint .*another.* ExponentialLR"
    assert len(re.findall(text, capsys.readouterr().out)) == 1
    with pytest.raises(BadInput, match=r"optimizer .*SGD, this run.* AdamW"):
        Adam().train(tmp_path)


class Refused:
    """Cases that a Checkpointer refuses."""

    class CountsTwo(Loop):
        def step(self, inputs, labels, step):
            super().step(inputs, labels, step)
            self.checkpoint.end_step()

    class ReadsTwice(Loop):
        def begin(self, epoch):
            next(iter(self.checkpoint.loader))  # a pass of its own before the epoch

    class TrainsMore(Loop):
        def build(self):
            super().build()
            self.sigma = torch.nn.Parameter(torch.zeros(2))
            self.optimizer.add_param_group({"params": [self.sigma]})

    class AddsLate(Loop):
        def begin(self, epoch):
            self.checkpoint.add(ema=self.model)

    class Bundles(Loop):
        def build(self):
            super().build()
            self.optimizer = argparse.Namespace(optimizers=[self.optimizer])


@pytest.mark.parametrize(
    "case, message",
    [
        (Refused.CountsTwo, r"\b2 steps after 1 batches"),
        (Refused.ReadsTwice, "loader .*step 0 after 1 batches"),
        (Refused.TrainsMore, "optimizer .* 1 tensors .*no checkpoint"),
        (Refused.AddsLate, r"add\(ema\) comes after resume\(\)"),
        (Refused.Bundles, "optimizer Namespace .*not .*torch.optim.Optimizer"),
    ],
)
def test_loops_that_could_not_be_resumed_are_refused(case, message, tmp_path):
    with pytest.raises(BadInput, match=message):
        case().train(tmp_path)


def test_a_batch_that_is_not_finite_costs_one_window_of_an_accumulation(tmp_path, capsys):
    class Poisoned(Accumulation):
        def loss(self, inputs, labels):
            loss = super().loss(inputs, labels)
            return loss * torch.nan if self.checkpoint.loader.step == 8 else loss

    checkpoint = Poisoned().train(tmp_path)
    assert (checkpoint.state.bad_steps, checkpoint.state.bad_in_a_row) == (1, 0)


def test_generators_of_ones_own_draw_different_numbers(tmp_path):
    class Two(Loop):
        def add(self, checkpoint):
            self.both = torch.Generator(), torch.Generator()
            checkpoint.add(one=self.both[0], other=self.both[1])

        def loss(self, inputs, labels):
            numbers = [torch.rand(1, generator=each).item() for each in self.both] + [torch.rand(1).item()]
            assert len(set(numbers)) == 3
            return super().loss(inputs, labels)

    Two().train(tmp_path)


@pytest.mark.parametrize(
    "value, named",
    [
        (np.zeros(2), "own.value, a ndarray"), (__import__("decimal").Decimal(1), "own.value, a Decimal"),
        (__import__("datetime").datetime.now(), "own.value, a datetime"), (Loop, "own.value, a type"),
        ({"deep": [1, np.zeros(1)]}, "own.value.deep.1, a ndarray"),
    ],
)  # fmt: skip
def test_a_state_that_could_not_be_read_back_is_refused_before_the_first_step(value, named, tmp_path):
    class Own(Loop):
        def add(self, checkpoint):
            own = argparse.Namespace(state_dict=lambda: {"value": value}, load_state_dict=lambda state: None)
            checkpoint.add(own=own)

    with pytest.raises(BadInput, match=f"cannot be saved: .*{named}"):
        Own().train(tmp_path)


def test_a_state_that_becomes_unreadable_is_noticed_at_the_first_save(tmp_path):
    class Grows(Loop):
        def step(self, inputs, labels, step):
            super().step(inputs, labels, step)
            self.optimizer.state[self.model[0].weight]["seen"] = [np.zeros(3)]

    with pytest.raises(
        BadInput, match=r"step_\d+\.pt .*not saved: .*optimizer\.state\.0\.seen\.0\b.*ndarray"
    ) as error:
        Grows().train(tmp_path)
    assert error.value.code == 6 and not list((tmp_path / "checkpoints").glob("*.pt"))

"""A checkpoint whose order of parameters is not that of the program is continued by name, or refused."""

import re

import pytest
import torch

from bootfile.exact.files import Refused
from bootfile.exact.state import RunState


class Receipt:
    fingerprint = ""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class Kept:
    """An object of a user: state_dict() is what a function returns, which other() takes."""

    def __init__(self, get, take=lambda state: None, **parts):
        self.state_dict = get
        self.load_state_dict = take
        vars(self).update(parts)


def net(names):
    """Return a module whose layers are registered in this order, with the same weights in any order."""
    model = torch.nn.Module()
    for name in names:
        layer = torch.nn.Linear(4, 4)
        with torch.no_grad():
            layer.weight.fill_(ord(name))
        model.add_module(name, layer)
    return model


def state_of(model, optimizer, scheduler=None, **objects):
    made = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "receipt": Receipt()} | objects
    state = RunState(made)
    state.check_saveable()
    return state


def train(model, *optimizers):
    for factor in (1.0, 2.0):
        for place, parameter in enumerate(sorted(model.parameters(), key=lambda each: each.sum().item())):
            parameter.grad = torch.full_like(parameter, factor * (place + 1))
        for optimizer in optimizers:
            optimizer.step()


class Buffers(torch.optim.SGD):
    """Keeps one tensor for each parameter in a list of its group."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            group["kept"] = [torch.zeros_like(parameter) for parameter in group["params"]]


class Counts(torch.optim.SGD):
    """Keeps a number that belongs to no parameter."""

    def step(self):
        self.state["total"] = self.state.get("total", 0) + 1
        super().step()


def test_what_an_optimizer_keeps_under_a_name_stays():
    first = net("ab")
    optimizer = Counts(first.parameters(), lr=0.1, momentum=0.9)
    train(first, optimizer)
    saved = state_of(first, optimizer).capture(2)
    second = net("ba")
    moved = Counts(second.parameters(), lr=0.1, momentum=0.9)
    state_of(second, moved).load(saved, 9)
    assert moved.state["total"] == 2
    there = optimizer.state[first.a.weight]["momentum_buffer"]
    assert torch.equal(moved.state[second.a.weight]["momentum_buffer"], there)


def test_lists_of_tensors_in_a_group_are_refused():
    first = net("ab")
    saved = state_of(first, Buffers(first.parameters())).capture(0)

    second = net("ba")
    with pytest.raises(Refused, match=r"its optimizer .*position.*a\.weight .*b\.weight"):
        state_of(second, Buffers(second.parameters())).load(saved, 9)


def optimizers_of(model, order):
    return [torch.optim.Adam(model.get_submodule(name).parameters(), lr=0.1) for name in order]


def holder(optimizers):
    return Kept(lambda: {"several": [each.state_dict() for each in optimizers]}, several=optimizers)


def schedules_of(optimizers):
    schedules = [torch.optim.lr_scheduler.StepLR(each, 2) for each in optimizers]
    return Kept(lambda: {"several": [each.state_dict() for each in schedules]}, schedules=schedules)


@pytest.mark.parametrize("held", [holder, schedules_of])
def test_optimizers_in_the_list_of_an_object_are_not_exchanged(held):
    first = net("abc")
    several = optimizers_of(first, "ab")
    main = torch.optim.SGD(first.c.parameters(), lr=0.1)
    train(first, main, *several)
    saved = state_of(first, main, held=held(several)).capture(2)
    second = net("abc")
    main = torch.optim.SGD(second.c.parameters(), lr=0.1)
    state_of(second, main, held=held(optimizers_of(second, "ab"))).load(saved, 9)
    with pytest.raises(Refused, match=r"its held\.0 .*b\.weight .*\bno group\b.*group 0\b"):
        state_of(second, main, held=held(optimizers_of(second, "ba"))).load(saved, 9)


def test_the_state_of_an_optimizer_that_an_object_holds_is_not_moved():
    def start(order):
        model = net(order)
        inner = torch.optim.Adam([*model.a.parameters(), *model.b.parameters()], lr=0.1)
        if order == "bac":
            inner = torch.optim.Adam([*model.b.parameters(), *model.a.parameters()], lr=0.1)
        main = torch.optim.SGD(model.c.parameters(), lr=0.1)
        train(model, main, inner)
        return state_of(model, main, held=Kept(lambda: {"inner": inner.state_dict()}, inner=inner))

    saved = start("abc").capture(2)
    start("abc").load(saved, 9)
    with pytest.raises(Refused, match=r"its held\.0 .*position"):
        start("bac").load(saved, 9)


def vector(model):
    return Kept(lambda: {"flat": torch.nn.utils.parameters_to_vector(model.parameters()).detach()})


def list_of_records(model):
    return Kept(lambda: {"average": [{"value": each.detach()} for each in model.parameters()]})


def numbered(model):
    return Kept(lambda: {str(place): each.detach() for place, each in enumerate(model.parameters())})


class Copies(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        copies = [torch.nn.Parameter(each.detach(), requires_grad=False) for each in model.parameters()]
        self.copies = torch.nn.ParameterList(copies)


class Shadows(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        for place, each in enumerate(model.parameters()):
            self.register_buffer(f"shadow_{place}", each.detach().clone())


@pytest.mark.parametrize("average", [vector, list_of_records, numbered, Copies, Shadows])
@pytest.mark.parametrize("is_of_model", [True, False], ids=["of the model", "of another module"])
def test_averages_by_position_are_refused(average, is_of_model):
    def start(order):
        model = net(order if is_of_model else "xy")
        other = net(order)
        main = torch.optim.SGD(model.parameters(), lr=0.1)
        return state_of(model, main, other=other, average=average(model if is_of_model else other))

    saved = start("ab").capture(0)
    start("ab").load(saved, 9)
    with pytest.raises(Refused, match=r"its average .*position.*a\.weight .*b\.weight"):
        start("ba").load(saved, 9)


def test_averages_by_name_and_what_is_of_no_parameter_stay():
    def start(order):
        model = net(order)
        main = torch.optim.SGD(model.parameters(), lr=0.1)
        scores = Kept(lambda: {"best": torch.tensor(1.0), "matrix": torch.zeros(3, 3)})
        names = Kept(lambda: {name: each.detach() for name, each in model.named_parameters()})
        average = torch.optim.swa_utils.AveragedModel(model)
        return state_of(model, main, scores=scores, names=names, average=average)

    start("ba").load(start("ab").capture(0), 9)


@pytest.mark.skipif(torch.__version__ < "2.6", reason="optimizers take names from torch 2.6 on")
def test_names_that_an_optimizer_was_given_are_not_a_setting():
    first = net("ab")
    saved = state_of(first, torch.optim.SGD(first.named_parameters(), lr=0.1)).capture(0)
    second = net("ba")
    state = state_of(second, torch.optim.SGD(second.named_parameters(), lr=0.1))
    state.load(saved, 9)
    assert state.take_notes() == []


def test_what_was_edited_of_a_further_optimizer_and_its_schedule_has_a_line():
    def start(rate, gamma):
        model = net("ab")
        main = torch.optim.SGD(model.a.parameters(), lr=0.1)
        further = torch.optim.SGD(model.b.parameters(), lr=rate)
        schedule = torch.optim.lr_scheduler.ExponentialLR(further, gamma)
        state = state_of(model, main, further=further, schedule=schedule)
        train(model, main, further)
        schedule.step()
        return state

    saved = start(0.5, 0.9).capture(1)
    same = start(0.5, 0.9)
    same.load(saved, 9)
    assert same.take_notes() == []
    edited = start(0.25, 0.8)
    edited.load(saved, 9)
    notes = "\n".join(edited.take_notes())
    assert re.search(r"gamma of schedule .*\b0\.9\b.* used\b.*\b0\.8\b", notes)
    assert re.search(r"initial_lr of further, group 0\b.*\b0\.5\b.* used\b.*\b0\.25\b", notes)
    again = start(0.25, 0.8)
    again.load(edited.capture(2), 9)
    assert again.take_notes()  # as long as the program says so


def test_the_rate_of_a_further_optimizer_without_a_schedule_has_a_line():
    def start(rate):
        model = net("ab")
        main = torch.optim.SGD(model.a.parameters(), lr=0.1)
        return state_of(model, main, further=torch.optim.SGD(model.b.parameters(), lr=rate))

    state = start(0.25)
    state.load(start(0.5).capture(0), 9)
    [note] = state.take_notes()
    assert re.search(r"lr of further, group 0\b.*\b0\.5\b.* used\b.*\b0\.25\b", note)

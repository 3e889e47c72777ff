"""A checkpoint whose order of parameters is not that of the program is refused."""

import re

import pytest
import torch

from bootfile.exact.files import Refused
from bootfile.exact.restore import load
from bootfile.exact.start import check_saveable
from bootfile.exact.state import RunState
from bootfile.ground.errors import BadInput


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
    check_saveable(state)
    return state


def train(model, *optimizers):
    for factor in (1.0, 2.0):
        for place, parameter in enumerate(sorted(model.parameters(), key=lambda each: each.sum().item())):
            parameter.grad = torch.full_like(parameter, factor * (place + 1))
        for optimizer in optimizers:
            optimizer.step()


def test_an_optimizer_whose_parameters_have_other_places_is_refused():
    first = net("ab")
    saved = state_of(first, torch.optim.SGD(first.parameters(), lr=0.1)).capture(0)
    second = net("ba")
    with pytest.raises(Refused, match=r"its optimizer has a\.weight where this run has b\.weight"):
        load(state_of(second, torch.optim.SGD(second.parameters(), lr=0.1)), saved, 9)


def test_a_group_that_the_loop_has_still_to_add_is_not_compared():
    """The state of a group that is missing is given at the first step, if its parameters are the same."""

    def start(order, saved=None):
        model = net("abc")
        optimizer = torch.optim.SGD(getattr(model, order[0]).parameters(), lr=0.1, momentum=0.9)
        state = state_of(model, optimizer)
        if saved:
            load(state, saved, 9)
        for name in order[1:]:
            optimizer.add_param_group({"params": list(getattr(model, name).parameters())})
        return model, optimizer, state

    model, optimizer, state = start("abc")
    train(model, optimizer)
    saved = state.capture(2)
    model, optimizer, state = start("abc", saved)
    state.before_step()
    assert torch.is_tensor(optimizer.state[model.c.weight]["momentum_buffer"])
    *_, state = start("acb", saved)
    with pytest.raises(BadInput, match=r"its optimizer has b\.weight where this run has c\.weight"):
        state.before_step()


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
    load(state_of(second, main, held=held(optimizers_of(second, "ab"))), saved, 9)
    with pytest.raises(Refused, match=r"its held\.0 has a\.weight where this run has b\.weight"):
        load(state_of(second, main, held=held(optimizers_of(second, "ba"))), saved, 9)


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
    load(start("abc"), saved, 9)
    with pytest.raises(Refused, match=r"its held\.0 has a\.weight where this run has b\.weight"):
        load(start("bac"), saved, 9)


def test_the_order_of_a_module_whose_parameters_another_object_may_keep_counts():
    def start(order):
        model = net("xy")
        main = torch.optim.SGD(model.parameters(), lr=0.1)
        return state_of(model, main, other=net(order))

    saved = start("ab").capture(0)
    load(start("ab"), saved, 9)
    with pytest.raises(Refused, match=r"its model has other\.a\.weight where this run has other\.b\.weight"):
        load(start("ba"), saved, 9)


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
    load(same, saved, 9)
    assert same.take_notes() == []
    edited = start(0.25, 0.8)
    load(edited, saved, 9)
    notes = "\n".join(edited.take_notes())
    assert re.search(r"gamma of schedule .*\b0\.9\b.* used\b.*\b0\.8\b", notes)
    assert re.search(r"initial_lr of further, group 0\b.*\b0\.5\b.* used\b.*\b0\.25\b", notes)
    again = start(0.25, 0.8)
    load(again, edited.capture(2), 9)
    assert again.take_notes()  # as long as the program says so


def test_the_rate_of_a_further_optimizer_without_a_schedule_has_a_line():
    def start(rate):
        model = net("ab")
        main = torch.optim.SGD(model.a.parameters(), lr=0.1)
        return state_of(model, main, further=torch.optim.SGD(model.b.parameters(), lr=rate))

    state = start(0.25)
    load(state, start(0.5).capture(0), 9)
    [note] = state.take_notes()
    assert re.search(r"lr of further, group 0\b.*\b0\.5\b.* used\b.*\b0\.25\b", note)

"""Measure what a step of a loop of one's own costs more with a loader of ours and with Exact.

CPU microseconds a step of a tiny network (32 numbers, 64 hidden ones, AdamW, a batch of 64), one process and
one thread of operators, before the first save. "bare" is a DataLoader in the process with the same samples.
On a GPU: microseconds by the clock, until the device has ended the steps.

python -m tests.benchmarks.own_step [--rounds 5] [--steps 400] [--device cuda] [--compile] [--profile NAME]
"""

import cProfile
import functools
import pstats
import tempfile
import time
from typing import NamedTuple

import torch
from torch.utils.data import DataLoader, TensorDataset

from bootfile import BatchSampler, Exact, Job, map_style_loader, torch_loader
from bootfile.ground import accelerator
from tests.benchmarks.rounds import Record, conditions, make_parser, print_ratios, spread, take_turns

_WARM = 50  # steps before the first that counts
_BATCH = 64
_COMPILED = ", compiled"


class Case(NamedTuple):
    """What a contestant trains, and where."""

    device: torch.device
    steps: int
    is_compiled: bool


def main():
    parser = make_parser(__doc__, 5)
    parser.add_argument("--steps", type=int, default=400, help="steps of a round (default: %(default)s)")
    parser.add_argument("--device", type=torch.device, default="cpu", help="default: cpu")
    parser.add_argument("--compile", action="store_true", help="also compiled networks")
    parser.add_argument("--profile", help="print where the time of one contestant goes")
    parser.add_argument("--json", help="file for the raw figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    contestants = {}
    for suffix in ("", _COMPILED)[: 1 + options.compile]:
        case = Case(options.device, options.steps, bool(suffix))
        contestants[f"bare{suffix}"] = functools.partial(_bare, case)
        for make in (_of_torch, _map_style):
            for is_exact in (False, True):
                name = f"{_NAMES[make]}{' + Exact' * is_exact}{suffix}"
                contestants[name] = functools.partial(_with_loader, make, is_exact, case)
    if options.profile:
        profile = cProfile.Profile()
        contestants[options.profile](profile)
        pstats.Stats(profile).sort_stats("tottime").print_stats(60)
        return
    record = Record()
    with conditions():
        figures = take_turns(contestants, options.rounds)
        print_ratios("own loop", figures, unit="us a step")
        for name, values in figures.items():
            base = figures[f"bare{_COMPILED * name.endswith(_COMPILED)}"]
            if values is base:
                continue
            more = [value - bare for value, bare in zip(values, base, strict=True)]
            print(f"{name}: {spread(more, '.0f', ' us more')}, n={options.rounds}")
    speeds = {name: [1e6 / value for value in values] for name, values in figures.items()}
    unit = "steps/CPU s" if options.device.type == "cpu" else "steps/s"
    record.add("own loop", unit, speeds)
    record.write(options.json)


def _make(case):
    torch.manual_seed(0)
    count = _BATCH * 100
    data = TensorDataset(torch.randn(count, 32), torch.randn(count, 1))
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    model = model.to(case.device)
    forward = torch.compile(model) if case.is_compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    epochs = -(-(case.steps + _WARM + 2) // 100)
    return data, model, forward, optimizer, epochs


def _of_torch(data, device, epochs):
    return torch_loader(DataLoader(data, _BATCH, shuffle=True, drop_last=True), device, epochs=epochs)


def _map_style(data, device, epochs):
    return map_style_loader(data, BatchSampler(len(data), _BATCH, 0, epochs), device)


_NAMES = {_of_torch: "torch_loader", _map_style: "map_style_loader"}


class _Clock:
    """Microseconds of a step, of the steps after the first ones: of the CPU, or on a GPU by the clock."""

    def __init__(self, case, profile):
        self._profile = profile
        self._device = case.device
        self._last = _WARM + case.steps
        self._step = 0
        self._began = 0.0
        self.figure = 0.0

    def tick(self):
        """Call it after each step. Return whether the last one has ended."""
        self._step += 1
        if self._step == _WARM:
            self._began = self._now()
            if self._profile:
                self._profile.enable()
        elif self._step == self._last:
            if self._profile:
                self._profile.disable()
            self.figure = (self._now() - self._began) / (self._last - _WARM) * 1e6
        return self._step >= self._last

    def _now(self):
        if self._device.type == "cpu":
            return time.process_time()
        accelerator.of(self._device).synchronize()
        return time.perf_counter()


def _bare(case, profile=None):
    data, _, forward, optimizer, epochs = _make(case)
    clock = _Clock(case, profile)
    for _ in range(epochs):
        for inputs, targets in DataLoader(data, _BATCH, shuffle=True, drop_last=True):
            _train(forward, optimizer, inputs.to(case.device), targets.to(case.device))
            if clock.tick():
                return clock.figure
    raise AssertionError("too few steps")


def _with_loader(make_loader, is_exact, case, profile=None):
    data, model, forward, optimizer, epochs = _make(case)
    loader = make_loader(data, case.device, epochs)
    clock = _Clock(case, profile)
    with tempfile.TemporaryDirectory() as folder:
        run = None
        first = 0
        if is_exact:
            run = Exact(
                folder,
                loader,
                model=model,
                forward=forward,
                optimizer=optimizer,
                save_every=10**6,
                job=Job(say=_say_nothing),
            )
            first = run.resume()
        else:
            loader.seek(0)
        for _ in loader.epochs_from(first):
            for inputs, targets in loader:
                _train(forward, optimizer, inputs, targets)
                if run and run.end_step().save and not clock.figure:
                    raise AssertionError("a save is not part of a step")
                if clock.tick():
                    break
            if clock.figure:
                break
        if run:
            run.close()
    return clock.figure


def _train(forward, optimizer, inputs, targets):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(forward(inputs), targets)
    loss.backward()
    optimizer.step()


def _say_nothing(line):
    pass


if __name__ == "__main__":
    main()

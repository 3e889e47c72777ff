"""Measure what a step of a loop of one's own costs more with a loader of ours and with Exact.

CPU microseconds a step of a tiny network (32 numbers, 64 hidden ones, AdamW, a batch of 64), one process and
one thread of operators, before the first save. "bare" is a DataLoader in the process with the same samples.

python -m tests.benchmarks.own_step [--rounds 5] [--steps 400] [--profile NAME]
"""

import cProfile
import functools
import pstats
import tempfile
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

from bootfile import BatchSampler, Exact, Job, map_style_loader, torch_loader
from tests.benchmarks.rounds import Record, conditions, make_parser, print_ratios, spread, take_turns

_WARM = 50  # steps before the first that counts
_BATCH = 64
_CPU = torch.device("cpu")


def main():
    parser = make_parser(__doc__, 5)
    parser.add_argument("--steps", type=int, default=400, help="steps of a round (default: %(default)s)")
    parser.add_argument("--profile", help="print where the time of one contestant goes")
    parser.add_argument("--json", help="file for the raw figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    contestants = {
        "bare": functools.partial(_bare, options.steps),
        "torch_loader": functools.partial(_with_loader, _of_torch, False, options.steps),
        "torch_loader + Exact": functools.partial(_with_loader, _of_torch, True, options.steps),
        "map_style_loader": functools.partial(_with_loader, _map_style, False, options.steps),
        "map_style_loader + Exact": functools.partial(_with_loader, _map_style, True, options.steps),
    }
    if options.profile:
        profile = cProfile.Profile()
        contestants[options.profile](profile)
        pstats.Stats(profile).sort_stats("tottime").print_stats(60)
        return
    record = Record()
    with conditions():
        figures = take_turns(contestants, options.rounds)
        print_ratios("own loop", figures, unit="us a step")
        for name, values in list(figures.items())[1:]:
            more = [value - bare for value, bare in zip(values, figures["bare"], strict=True)]
            print(f"{name}: {spread(more, '.0f', ' us more')}, n={options.rounds}")
    speeds = {name: [1e6 / value for value in values] for name, values in figures.items()}
    record.add("own loop", "steps/CPU s", speeds)
    record.write(options.json)


def _make(steps):
    torch.manual_seed(0)
    count = _BATCH * 100
    data = TensorDataset(torch.randn(count, 32), torch.randn(count, 1))
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    epochs = -(-(steps + _WARM + 2) // 100)
    return data, model, optimizer, epochs


def _of_torch(data, epochs):
    return torch_loader(DataLoader(data, _BATCH, shuffle=True, drop_last=True), _CPU, epochs=epochs)


def _map_style(data, epochs):
    return map_style_loader(data, BatchSampler(len(data), _BATCH, 0, epochs), _CPU)


class _Clock:
    """CPU microseconds of a step, of the steps after the first ones."""

    def __init__(self, steps, profile):
        self._profile = profile
        self._last = _WARM + steps
        self._step = 0
        self._began = 0.0
        self.figure = 0.0

    def tick(self):
        """Call it after each step. Return whether the last one has ended."""
        self._step += 1
        if self._step == _WARM:
            self._began = time.process_time()
            if self._profile:
                self._profile.enable()
        elif self._step == self._last:
            if self._profile:
                self._profile.disable()
            self.figure = (time.process_time() - self._began) / (self._last - _WARM) * 1e6
        return self._step >= self._last


def _bare(steps, profile=None):
    data, model, optimizer, epochs = _make(steps)
    clock = _Clock(steps, profile)
    for _ in range(epochs):
        for inputs, targets in DataLoader(data, _BATCH, shuffle=True, drop_last=True):
            _train(model, optimizer, inputs, targets)
            if clock.tick():
                return clock.figure
    raise AssertionError("too few steps")


def _with_loader(make_loader, is_exact, steps, profile=None):
    data, model, optimizer, epochs = _make(steps)
    loader = make_loader(data, epochs)
    clock = _Clock(steps, profile)
    with tempfile.TemporaryDirectory() as folder:
        run = None
        first = 0
        if is_exact:
            run = Exact(
                folder, loader, model=model, optimizer=optimizer, save_every=10**6, job=Job(say=_say_nothing)
            )
            first = run.resume()
        else:
            loader.seek(0)
        for _ in loader.epochs_from(first):
            for inputs, targets in loader:
                _train(model, optimizer, inputs, targets)
                if run and run.end_step().save and not clock.figure:
                    raise AssertionError("a save is not part of a step")
                if clock.tick():
                    break
            if clock.figure:
                break
        if run:
            run.close()
    return clock.figure


def _train(model, optimizer, inputs, targets):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    optimizer.step()


def _say_nothing(line):
    pass


if __name__ == "__main__":
    main()

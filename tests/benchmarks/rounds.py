"""What the measurements share: options, the conditions of a figure, turns, medians with their range."""

import contextlib
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import numpy
import torch

from common.console import arguments


def make_parser(description: str | None, rounds: int | None = None) -> arguments.Parser:
    """Return a parser for a program of this folder. rounds: default of --rounds, if it has this option."""
    parser = arguments.Parser(description)
    if rounds:
        help = "number of rounds (default: %(default)s)"
        parser.add_argument("--rounds", type=arguments.positive_int, default=rounds, help=help)
    return parser


def describe() -> str:
    """Return one line: processor or GPU, cores, versions, load average."""
    processor = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            processor = next((line.split(":")[1].strip() for line in file if "model name" in line), processor)
    device = f"{torch.cuda.get_device_name(0)}, " if torch.cuda.is_available() else ""
    return (
        f"{device}{processor} ({os.cpu_count()} cores), Python {platform.python_version()}, "
        f"torch {torch.__version__}, numpy {numpy.__version__}, load average {os.getloadavg()[0]:.2f}"
    )


class Record:
    """The raw figures of a run, with its conditions: a small JSON file for tests.benchmarks.compare."""

    def __init__(self) -> None:
        self._record = {
            "date": str(datetime.date.today()),
            "machine": describe(),
            "flags": _find_flags(),
            "load_at_begin": round(os.getloadavg()[0], 2),
            "command": " ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]]),
            "figures": [],
        }

    def add(self, title: str, unit: str, figures: dict[str, list[float]], **notes: object) -> None:
        """Add the figures of take_turns(): name -> one for each round, more is better. notes: of the rows."""
        rows = {name: [float(f"{value:.5g}") for value in values] for name, values in figures.items()}
        self._record["figures"].append({"title": title, "unit": unit, "rounds": rows, **notes})

    def write(self, path: str | None) -> None:
        """Write the file, if it has a path."""
        if path:
            self._record["load_at_end"] = round(os.getloadavg()[0], 2)
            with open(path, "w") as file:
                json.dump(self._record, file, indent=1)
                file.write("\n")


def _find_flags() -> list[str]:
    """Return the instruction sets of the processor that change speeds, such as avx2."""
    if not os.path.exists("/proc/cpuinfo"):
        return []
    with open("/proc/cpuinfo") as file:
        flags = next((line.split() for line in file if line.startswith("flags")), [])
    return [flag for flag in flags if flag.startswith(("avx", "amx", "sse4"))]


@contextlib.contextmanager
def conditions() -> Iterator[None]:
    """Print date and machine before the block, and the load average after it."""
    print(f"{datetime.date.today()}, {describe()}", flush=True)
    yield
    print(f"load average at the end {os.getloadavg()[0]:.2f}")


def take_turns(contestants: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Return {name: one figure for each round}. In each round every function is called once.

    A round before the first one warms up. Every other round has the reverse order, against drift.
    """
    figures: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name in list(contestants)[:: -1 if number % 2 else 1]:
            figure = contestants[name]()
            if number:
                figures[name].append(figure)
    return figures


def print_ratios(
    title: str, figures: dict[str, list[float]], form: str = ".0f", unit: str = "images/s"
) -> None:
    """Print the figures of take_turns(), a row for each contestant, and their ratios to the first one."""
    base = next(iter(figures.values()))
    print(f"\n| {title} | {unit} | ratio in one round, n={len(base)} |\n|---|---|---|")
    for name, own in figures.items():
        print(f"| {name} | {spread(own, form)} | {spread(divide(own, base), '.2f', 'x')} |", flush=True)


def timed(function: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def cpu_seconds(function: Callable[[], object]) -> float:
    """Return the CPU seconds of this process in a call."""
    begin = time.process_time()
    function()
    return time.process_time() - begin


def divide(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the ratio of two contestants in each round."""
    return [value / other for value, other in zip(values, others, strict=True)]


def spread(values: Sequence[float], form: str = ".2f", unit: str = "") -> str:
    """Return the median and the range, for example "4.12x (4.01-4.20)"."""
    return f"{statistics.median(values):{form}}{unit} ({min(values):{form}}-{max(values):{form}})"


def tail(text: str) -> str:
    """Return the end of a program's output as one line."""
    return " ".join(text.split())[-500:]

"""Parse the faults of a simulation: kill:rank=3,step=20."""

import argparse
from dataclasses import dataclass

from bootfile.ground.errors import BadInput
from bootfile.ground.intervals import Interval
from common.console.arguments import interval

KINDS = {  # kind: its keys, in [] if they may be missing
    "kill": "rank step or every",  # SIGKILL to a rank, or to a random process every N steps or seconds
    "term": "rank step",  # SIGTERM
    "stop": "rank step",  # SIGSTOP: the process hangs, its connections stay open
    "hang": "rank step [for]",  # the main thread waits, as for data that never come
    "hold": "rank step [for]",  # the main thread waits in C code that holds the lock of Python
    "pause": "node step for",  # SIGSTOP to all processes of a node, and SIGCONT
    "restart": "node step",  # in place: the same folders, the command again
    "reschedule": "[node] step",  # a new container; without a node: all nodes
}
HANGS = ("hang", "hold")  # kinds that the job needs a handler for (hanging/sitecustomize.py)
_MOST = 10**9


@dataclass(frozen=True)
class Fault:
    """One fault.

    step: the optimizer step that the fault waits for, of the job: any node may print it
    rank: global; None for a fault of nodes
    node: its index; None for a fault of a rank, or of all nodes
    seconds: between two kills, or of a pause or a hang; 0 for others, and for a hang without an end
    steps: between two kills; 0 for others
    """

    text: str
    kind: str
    step: int = 1
    rank: int | None = None
    node: int | None = None
    seconds: float = 0
    steps: int = 0


def parse(spec: str, nodes: int, processes: int) -> Fault:
    """Return the fault that `spec` names, for nodes x processes ranks.

    `launch simulate` calls it for each --fault before it starts a node. Raises BadInput with the spec and its
    keys.
    """
    kind, _, rest = spec.partition(":")
    if kind not in KINDS:
        raise BadInput(f"--fault {spec}: unknown fault {kind!r}: expected one of {', '.join(KINDS)}")
    choices = [keys.split() for keys in KINDS[kind].split(" or ")]
    pairs = [pair.partition("=")[::2] for pair in rest.split(",")]
    given = [key for key, _ in pairs]
    are_keys = any(_are_keys(given, keys) for keys in choices)
    if not are_keys or len({*given}) < len(given):
        names = " or ".join(", ".join(keys) for keys in choices)
        raise BadInput(f"--fault {spec}: expected {kind} with the keys {names}, each once")
    limits = {"step": (1, _MOST), "rank": (0, nodes * processes - 1), "node": (0, nodes - 1)}
    numbers = {key: _number(spec, key, value, *limits[key]) for key, value in pairs if key in limits}
    time = Interval(0, "s")
    for key, value in pairs:
        if key not in limits:
            time = _interval(spec, key, value)
    if time.unit == "step":
        return Fault(spec, kind, **numbers, steps=int(time.number))
    return Fault(spec, kind, **numbers, seconds=time.number)


def _are_keys(given: list[str], keys: list[str]) -> bool:
    """Return whether the given keys are those of a kind of fault. keys: "[node]" may be missing."""
    needed = {key for key in keys if not key.startswith("[")}
    allowed = {key.strip("[]") for key in keys}
    return needed <= {*given} <= allowed


def _number(spec: str, key: str, value: str, least: int, most: int) -> int:
    """Return a value as a whole number. Raises BadInput if it is not one in least..most."""
    if not value.isdecimal() or not least <= int(value) <= most:
        raise BadInput(f"--fault {spec}: {key}={value} is not a whole number in {least}..{most}")
    return int(value)


def _interval(spec: str, key: str, value: str) -> Interval:
    """Return the value of "for" or "every". Raises BadInput if it is not one of the units of that key."""
    expected = "a number of seconds such as 10s or 0.5s"
    units = ["s"]
    if key == "every":
        expected = "a number of steps such as 20step, or of seconds such as 10s"
        units = ["s", "step"]
    try:
        time = interval(value)
    except argparse.ArgumentTypeError:
        time = Interval(0, "")
    if time.unit not in units or value.isdecimal():  # without a unit: a number of what?
        raise BadInput(f"--fault {spec}: {key}={value} is not {expected}")
    return time

"""Parse the faults of a simulation: kill:rank=3,step=20."""

import argparse
from dataclasses import dataclass
from typing import Any

from bootfile.ground.errors import BadInput
from bootfile.ground.intervals import Interval
from common.console.arguments import interval

KINDS = {  # kind: its keys, in [] if they may be missing
    "kill": "rank step or every",  # SIGKILL to a rank, or to a random process every N steps or seconds
    "term": "rank step",  # SIGTERM
    "stop": "rank step",  # SIGSTOP: the process hangs, its connections stay open
    # SIGSTOP and SIGCONT, to all processes of a node or to that of a rank, once or every N steps
    "pause": "node step for or rank step for or node every for or rank every for",
    "throttle": "rank step to [for] or node step to [for]",  # less time on the CPU
    "slow_data": "rank step by [for] or node step by [for]",  # each file below --data_url opens later
    "hang": "rank step [for]",  # the main thread waits, as for data that never come
    "hold": "rank step [for]",  # the main thread waits in C code that holds the lock of Python
    "restart": "node step",  # in place: the same folders, the command again
    "evict": "node step",  # SIGTERM, SIGKILL after a pod's grace, and a new pod
    "reschedule": "[node] step",  # a new container; without a node: all nodes
}
HANGS = ("hang", "hold")  # kinds that the job needs a handler for (hooks/sitecustomize.py)
_MOST = 10**9


@dataclass(frozen=True)
class Fault:
    """One fault.

    step: the optimizer step that the fault waits for, of the job: any node may print it
    rank: global; None for a fault of nodes
    node: its index; None for a fault of a rank, or of all nodes
    seconds: between two kills, or until the end of a fault that lasts; 0 for others, and for a hang without
        an end
    steps: between two kills or pauses; 0 for others
    delay: seconds until a file opens; 0 for others
    share: of the time that a process may run; 1 for others
    """

    text: str
    kind: str
    step: int = 1
    rank: int | None = None
    node: int | None = None
    seconds: float = 0
    steps: int = 0
    delay: float = 0
    share: float = 1


def parse(spec: str, nodes: int, processes: int) -> Fault:
    """Return the fault that `spec` names, for nodes x processes ranks. `launch simulate` calls it for each
    --fault before it starts a node. Raises BadInput with the spec and its keys."""
    kind, _, rest = spec.partition(":")
    if kind not in KINDS:
        raise BadInput(f"--fault {spec}: unknown fault {kind!r}: expected one of {', '.join(KINDS)}")
    choices = [keys.split() for keys in KINDS[kind].split(" or ")]
    pairs = [pair.partition("=")[::2] for pair in rest.split(",")]
    given_keys = [key for key, _ in pairs]
    is_known_form = any(_are_keys(given_keys, keys) for keys in choices)
    if not is_known_form or len({*given_keys}) < len(given_keys):
        # the error names the forms that the user may have meant: those that have all given keys
        similar = [keys for keys in choices if {*given_keys} <= _names(keys)]
        names = " or ".join(map(", ".join, similar or choices))
        raise BadInput(f"--fault {spec}: expected {kind} with the keys {names}, each once")
    # keys that are whole numbers, with the least and the greatest
    limits = {"step": (1, _MOST), "rank": (0, nodes * processes - 1), "node": (0, nodes - 1)}
    fields: dict[str, Any] = {}
    for key, value in pairs:
        if key in limits:
            fields[key] = _number(spec, key, value, *limits[key])
        elif key == "to":
            fields["share"] = _share(spec, value)
        else:
            time = _interval(spec, kind, key, value)
            if time.unit == "step":
                fields["steps"] = int(time.number)
            elif key == "by":
                fields["delay"] = time.number
            else:
                fields["seconds"] = time.number
    return Fault(spec, kind, **fields)


def _are_keys(given: list[str], keys: list[str]) -> bool:
    """Return whether the given keys are those of a kind of fault. keys: "[node]" may be missing."""
    needed = {key for key in keys if not key.startswith("[")}
    return needed <= {*given} <= _names(keys)


def _names(keys: list[str]) -> set[str]:
    return {key.strip("[]") for key in keys}


def _number(spec: str, key: str, value: str, least: int, most: int) -> int:
    """Return a value as a whole number. Raises BadInput if it is not one in least..most."""
    if not value.isdecimal() or not least <= int(value) <= most:
        raise BadInput(f"--fault {spec}: {key}={value} is not a whole number in {least}..{most}")
    return int(value)


def _share(spec: str, value: str) -> float:
    """Return the value of "to": "30%" is 0.3. Raises BadInput if it is not above 0 and below 100 %."""
    number = value.removesuffix("%")
    if not (value.endswith("%") and number.isdecimal() and 0 < int(number) < 100):
        raise BadInput(f"--fault {spec}: to={value} is not a share in 1%..99%")
    return int(number) / 100


def _interval(spec: str, kind: str, key: str, value: str) -> Interval:
    """Return the value of "for", "by" or "every". Raises BadInput if it is not one of the units of that
    key."""
    expected = "a number of seconds such as 10s or 0.5s"
    units = ["s"]
    if key == "every" and kind == "pause":
        expected = "a number of steps such as 20step"
        units = ["step"]
    elif key == "every":
        expected = "a number of steps such as 20step, or of seconds such as 10s"
        units = ["s", "step"]
    try:
        time = interval(value)
    except argparse.ArgumentTypeError:
        time = Interval(0, "")
    if time.unit not in units or value.isdecimal():  # without a unit: a number of what?
        raise BadInput(f"--fault {spec}: {key}={value} is not {expected}")
    return time

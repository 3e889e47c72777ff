"""Parse the faults of a simulation: kill:rank=3,step=20."""

import math
from dataclasses import dataclass
from typing import Any

from common.ground.exits import BadInput

KINDS = {  # kind: its keys, in [] if they may be missing. A kind with a step waits for that step
    "kill": "rank step",  # SIGKILL
    "term": "rank step",  # SIGTERM
    "stop": "rank step",  # SIGSTOP: the process hangs, its connections stay open
    "cut": "node step seconds",  # the node's link is down
    "late": "node seconds",
    "missing": "node",  # never started
    "duplicate": "rank",  # another node gets the same rank
    "restart": "node step",  # in place: the same folders, the command again
    "reschedule": "[node] step",  # a new container; without a node: all nodes
}
_MOST = 1e9
NOT_GIVEN = -1


@dataclass(frozen=True)
class Fault:
    """One fault.

    rank: global
    node: its index
    step: the optimizer step that the fault waits for; None: it waits for none
    seconds: its duration (infinity: forever), or the delay of `late`
    """

    text: str
    kind: str
    rank: int = NOT_GIVEN
    node: int = NOT_GIVEN
    step: int | None = None
    seconds: float = 0.0


def parse(specs: list[str], nodes: int, processes: int) -> list[Fault]:
    """Return the faults that `specs` name, for nodes x processes ranks. Raises BadInput with the spec and its
    keys."""
    faults = [_parse(spec, nodes, nodes * processes) for spec in specs]
    at_start = [fault for fault in faults if fault.kind in ("late", "missing")]
    if len({fault.node for fault in at_start}) < len(at_start):
        raise BadInput(f"--fault {' and '.join(fault.text for fault in at_start)}: a node is named twice")
    return faults


def _parse(spec: str, nodes: int, ranks: int) -> Fault:
    kind, _, rest = spec.partition(":")
    if kind not in KINDS:
        raise BadInput(f"--fault {spec}: unknown fault {kind!r}: expected one of {', '.join(KINDS)}")
    keys = KINDS[kind].split()
    pairs = [pair.partition("=")[::2] for pair in filter(None, rest.split(","))]
    given = [key for key, _ in pairs]
    unknown, missing = {*given} - {key.strip("[]") for key in keys}, {*keys} - {*given, "[node]"}
    if unknown or missing or len({*given}) < len(given):
        raise BadInput(f"--fault {spec}: expected {kind} with the keys {', '.join(keys)}, each once")
    most = {"rank": ranks - 1, "node": nodes - 1}
    values: dict[str, Any] = {key: _number(spec, key, value, most.get(key, _MOST)) for key, value in pairs}
    return Fault(spec, kind, **values)


def _number(spec: str, key: str, value: str, most: float) -> float:
    if value == "forever" and spec.startswith("cut:"):
        return math.inf
    try:
        number = float(value) if key == "seconds" else int(value)
    except ValueError:
        number = -1
    least = 1 if key == "step" else 0
    if not least <= number <= most:
        wanted = "a number of seconds" if key == "seconds" else f"a whole number in {least}..{most:g}"
        raise BadInput(f"--fault {spec}: {key}={value} is not {wanted}")
    return number

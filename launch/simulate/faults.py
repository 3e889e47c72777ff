"""Parse the faults of a simulation: kill:rank=3,step=20."""

import math
import random
from dataclasses import dataclass
from typing import Any

from common.ground.exits import BadInput

# kind -> (required keys, optional keys). A kind with a step waits for that step.
KINDS = {
    "kill": ({"rank"}, {"step"}),  # SIGKILL
    "term": ({"rank"}, {"step"}),  # SIGTERM
    "stop": ({"rank"}, {"step"}),  # SIGSTOP: the process hangs, its connections stay open
    "cut": ({"node", "seconds"}, {"step"}),  # the node's link is down
    "late": ({"node", "seconds"}, set()),
    "missing": ({"node"}, set()),  # never started
    "duplicate": ({"rank"}, set()),  # another node gets the same rank
    "restart": ({"node"}, {"step"}),  # in place: the same folders, the command again
    "reschedule": (set(), {"node", "step"}),  # a new container; without a node: all nodes
}
_MOST = 1e9
NOT_GIVEN = -1
_ANY_STEP = 20  # the last step that is drawn if the job has no --max_steps


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


def parse(specs: list[str], nodes: int, processes: int, seed: int, max_steps: int | None) -> list[Fault]:
    """Return the faults that `specs` name, for nodes x processes ranks.

    A missing step is drawn from the seed, in 1..max_steps-1, or in 1..20 if max_steps is None. Raises
    BadInput with the spec and its keys.
    """
    draw = random.Random(seed)
    last_step = _ANY_STEP if max_steps is None else max(1, max_steps - 1)
    faults = [_parse(spec, nodes, nodes * processes, draw.randint(1, last_step)) for spec in specs]
    at_start = [fault for fault in faults if fault.kind in ("late", "missing")]
    for fault in at_start:
        others = [other.text for other in at_start if other.node == fault.node and other is not fault]
        if others:
            raise BadInput(f"--fault {fault.text} and --fault {others[0]} name the same node")
    return faults


def _parse(spec: str, nodes: int, ranks: int, drawn_step: int) -> Fault:
    kind, _, rest = spec.partition(":")
    if kind not in KINDS:
        raise BadInput(f"--fault {spec}: unknown fault {kind!r}: expected one of {', '.join(KINDS)}")
    needed, optional = KINDS[kind]
    keys = " ".join(sorted(needed)) or "none"
    allowed = f"{kind} has the required keys: {keys}; optional: {' '.join(sorted(optional)) or 'none'}"
    values: dict[str, Any] = {}
    for pair in filter(None, rest.split(",")):
        key, _, value = pair.partition("=")
        if key not in needed | optional or key in values:
            wrong = "repeated" if key in values else "unknown"
            raise BadInput(f"--fault {spec}: {wrong} key {key!r}; {allowed}")
        values[key] = _number(spec, key, value)
    if needed - values.keys():
        raise BadInput(f"--fault {spec}: {', '.join(sorted(needed - values.keys()))} is missing; {allowed}")
    for key, size in (("rank", ranks), ("node", nodes)):
        if values.get(key, 0) >= size:
            raise BadInput(f"--fault {spec}: {key} {values[key]} is not in 0..{size - 1}")
    if kind == "late" and values["seconds"] == math.inf:
        raise BadInput(f"--fault {spec}: use missing:node={values['node']}")
    if values.get("step") == 0:
        raise BadInput(f"--fault {spec}: the first step is 1")
    if "step" in optional:
        values.setdefault("step", drawn_step)
    return Fault(spec, kind, **values)


def _number(spec: str, key: str, value: str) -> float:
    if key == "seconds" and value == "forever":
        return math.inf
    try:
        number = float(value) if key == "seconds" else int(value)
    except ValueError:
        number = -1
    if not 0 <= number <= _MOST:
        wanted = "seconds, or forever" if key == "seconds" else f"a whole number in 0..{_MOST:g}"
        raise BadInput(f"--fault {spec}: {key}={value} is not {wanted}")
    return number

"""What may go wrong in a simulation, as users write it: kill:rank=3,step=20."""

import math
import random
from dataclasses import dataclass

from common.exits import BadInput

# kind -> (keys it needs, keys it takes beside them). A kind that takes a step waits for it.
KINDS = {
    "kill": ({"rank"}, {"step"}),  # SIGKILL
    "term": ({"rank"}, {"step"}),  # SIGTERM
    "stop": ({"rank"}, {"step"}),  # SIGSTOP: the process hangs, its connections stay open
    "cut": ({"node", "seconds"}, {"step"}),  # the node's link is down
    "late": ({"node", "seconds"}, set()),
    "missing": ({"node"}, set()),  # never started
    "duplicate": ({"rank"}, set()),  # another node is told that it has this rank
    "restart": ({"node"}, {"step"}),  # in place: the same folders, the command run again
    "reschedule": (set(), {"node", "step"}),  # a new container; no node named: all of them
}
_MOST = 1e9
_ANY_STEP = 20  # a step drawn where the job has no --max_steps


@dataclass(frozen=True)
class Fault:
    """One fault. rank: global. node: its index. step: the optimizer step it waits for; None at the start.

    seconds: how long it lasts (infinity: for ever). Keys that the kind does not take are None.
    """

    text: str
    kind: str
    rank: int | None = None
    node: int | None = None
    step: int | None = None
    seconds: float | None = None


def parse(specs: list[str], nodes: int, processes: int, seed: int, max_steps: int | None) -> list[Fault]:
    """The faults that `specs` name, for nodes x processes ranks.

    A step that is not given is drawn from the seed: of 1..max_steps-1, or of 1..20 where max_steps is None.
    Raises BadInput with the spec and the keys that it may have.
    """
    draw = random.Random(seed)
    last_step = _ANY_STEP if max_steps is None else max(1, max_steps - 1)
    faults = [_parse(spec, nodes, nodes * processes, draw.randint(1, last_step)) for spec in specs]
    at_start = [fault for fault in faults if fault.kind in ("late", "missing")]
    for fault in at_start:
        others = [other.text for other in at_start if other.node == fault.node and other is not fault]
        if others:
            raise BadInput(f"--fault {fault.text} and --fault {others[0]} are about the same node")
    return faults


def _parse(spec: str, nodes: int, ranks: int, drawn_step: int) -> Fault:
    kind, _, rest = spec.partition(":")
    if kind not in KINDS:
        raise BadInput(f"--fault {spec}: there is no {kind!r}, only {', '.join(KINDS)}")
    needed, optional = KINDS[kind]
    keys = " ".join(sorted(needed)) or "none"
    allowed = f"{kind} needs the keys: {keys}; may have: {' '.join(sorted(optional)) or 'none'}"
    values = {}
    for pair in filter(None, rest.split(",")):
        key, _, value = pair.partition("=")
        if key not in needed | optional or key in values:
            raise BadInput(
                f"--fault {spec}: {key!r} is {'twice there' if key in values else 'no key'}; {allowed}"
            )
        values[key] = _number(spec, key, value)
    if needed - values.keys():
        raise BadInput(f"--fault {spec}: no {' and no '.join(sorted(needed - values.keys()))}; {allowed}")
    for key, size in (("rank", ranks), ("node", nodes)):
        if values.get(key, 0) >= size:
            raise BadInput(f"--fault {spec}: {key} {values[key]} is not in 0..{size - 1}")
    if kind == "late" and values["seconds"] == math.inf:
        raise BadInput(f"--fault {spec}: a node that is late for ever is missing:node={values['node']}")
    if values.get("step") == 0:
        raise BadInput(f"--fault {spec}: steps count from 1")
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

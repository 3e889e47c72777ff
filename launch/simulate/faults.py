"""Parse the faults of a simulation: kill:rank=3,step=20."""

import re
from dataclasses import dataclass
from typing import Any

from bootfile.ground.errors import BadInput

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
_UNITS = {"s": "a number of seconds such as 10s or 0.5s", "step": "a number of steps such as 20step"}


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

    @property
    def target(self) -> str:
        """Return "rank 1" or "node 0"."""
        return f"rank {self.rank}" if self.rank is not None else f"node {self.node}"


def parse(spec: str, nodes: int, processes: int) -> Fault:
    """Return the fault that `spec` names, for nodes x processes ranks. Raises BadInput."""
    kind, _, rest = spec.partition(":")
    if kind not in KINDS:
        raise BadInput(f"--fault {spec}: unknown fault {kind!r}: expected one of {', '.join(KINDS)}")
    forms = [keys.split() for keys in KINDS[kind].split(" or ")]
    pairs = [pair.partition("=")[::2] for pair in rest.split(",")]
    given = sorted(key for key, _ in pairs)  # twice, if it is given twice
    if not any(_is_form(given, keys) for keys in forms):
        # the error names the forms that the user may have meant: those that have all given keys
        similar = [keys for keys in forms if {*given} <= {key.strip("[]") for key in keys}]
        names = " or ".join(map(", ".join, similar or forms))
        raise BadInput(f"--fault {spec}: expected {kind} with the keys {names}, each once")
    most = {"step": _MOST, "rank": nodes * processes - 1, "node": nodes - 1}
    fields: dict[str, Any] = {}
    for key, value in pairs:
        field, expected = _parse_value(kind, key, value, most)
        if not field:
            raise BadInput(f"--fault {spec}: {key}={value} is not {expected}")
        fields |= field
    return Fault(spec, kind, **fields)


def _is_form(given: list[str], keys: list[str]) -> bool:
    """Return whether the given keys, sorted, are those of a form: "[node]" may be missing."""
    chosen = [key.strip("[]") for key in keys if not key.startswith("[") or key.strip("[]") in given]
    return given == sorted(chosen)


def _parse_value(kind: str, key: str, value: str, most: dict[str, int]) -> tuple[dict[str, Any], str]:
    """Return the field of Fault that a key sets, {} for a wrong value, and what is expected. most: the
    greatest whole number of a key."""
    if key in most:
        least = int(key == "step")
        is_right = value.isdecimal() and least <= int(value) <= most[key]
        return {key: int(value)} if is_right else {}, f"a whole number in {least}..{most[key]}"
    if key == "to":
        is_share = re.fullmatch("[1-9][0-9]?%", value)
        return {"share": int(value[:-1]) / 100} if is_share else {}, "a share in 1%..99%"
    units = {"kill": "s|step", "pause": "step"}.get(kind, "") if key == "every" else "s"
    expected = " or ".join(_UNITS[unit] for unit in units.split("|"))
    time = re.fullmatch(rf"(\d*\.?\d+)({units})", value)
    if not time or not float(time[1]):
        return {}, expected
    if time[2] == "step":
        return {"steps": int(time[1])} if time[1].isdecimal() else {}, expected
    return {"delay" if key == "by" else "seconds": float(time[1])}, expected
